"""The tokenizer against transformers', streaming of broken characters, chat templates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cache import FetchError
from engine.models.bundled import fetch_bundled
from engine.models.model_error import ModelError
from engine.text.tokenizer import ChatTemplateError, IncrementalDetokenizer, Tokenizer

TEXTS = [
    "Hello, world!",
    "  leading and trailing  \n\n",
    "12345 + 67 = 12412",
    "def f(x):\n\treturn x ** 2  # naïve",
    "你好，世界。こんにちは 안녕하세요",
    "🎉👩‍👩‍👧‍👦🇩🇪 é e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


@pytest.fixture(scope="module")
def bundled() -> Path:
    try:
        return fetch_bundled()
    except FetchError as error:
        pytest.skip(f"the bundled model cannot be had: {error}")


@pytest.fixture(scope="module")
def tokenizer(bundled: Path) -> Tokenizer:
    return Tokenizer.load(bundled)


def test_equals_transformers(bundled: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(bundled)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    for part in (messages, messages[1:2]):
        for prompt in (True, False):
            assert tokenizer.apply_chat_template(
                part, add_generation_prompt=prompt
            ) == theirs.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt)


def test_transformers_and_torch_are_not_imported() -> None:
    code = (
        "import sys; from engine.text.tokenizer import Tokenizer; "
        "from engine.models.bundled import fetch_bundled;"
        "from engine.models.checkpoint import load_model_config;"
        "path = fetch_bundled(); t = Tokenizer.load(path); t.encode('x'); load_model_config(path);"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]);"
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pieces_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        pieces = [stream.push([token]) for token in ids]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == text
        assert stream.text == text


def test_a_character_is_handed_out_when_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦥")
    assert len(ids) > 1
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🦥"]


def test_a_cut_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push(tokenizer.encode("a🦥")[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_bytes_that_are_no_text_do_not_pile_up(tokenizer: Tokenizer) -> None:
    """A model that emits stray bytes for ever: they come out as replacements, in bounded windows."""
    stray = tokenizer.encode("🦥")[1:2]
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push(stray) for _ in range(100)]
    assert "".join(pieces).count("\ufffd") >= 80
    assert stream.push(tokenizer.encode(" ok")).endswith(" ok")


def test_special_tokens_are_skipped_unless_wanted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b")
    assert IncrementalDetokenizer(tokenizer).push(ids) == "ab"
    assert IncrementalDetokenizer(tokenizer, skip_special_tokens=False).push(ids) == "a<|im_end|>b"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("no such token") is None


def test_ids_outside_the_vocabulary_add_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("a"), 10_000_000]) == "a"


def rewrite(bundled: Path, target: Path, template: object) -> Tokenizer:
    (target / "tokenizer.json").symlink_to(bundled / "tokenizer.json")
    config = json.loads((bundled / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(target)


def test_template_refusals_are_errors(bundled: Path, tmp_path: Path) -> None:
    tokenizer = rewrite(bundled, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="refuses these messages: roles must alternate"):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content / 2 }}", "{{ '%d' % none }}", "{{ deep | tojson }}"]
)
def test_whatever_a_template_stumbles_over_is_the_messages_fault(
    bundled: Path, tmp_path: Path, template: str
) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    tokenizer = rewrite(bundled, tmp_path, template)
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], deep=deep)


@pytest.mark.parametrize("template", [5, [{"name": "default", "template": {}}]])
def test_a_template_that_is_no_text(bundled: Path, tmp_path: Path, template: object) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template is not a text"):
        rewrite(bundled, tmp_path, template)


def test_templates_run_in_a_sandbox(bundled: Path, tmp_path: Path) -> None:
    tokenizer = rewrite(bundled, tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        tokenizer.apply_chat_template([])


def test_a_template_that_does_not_compile(bundled: Path, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        rewrite(bundled, tmp_path, "{% for %}").apply_chat_template([])


def test_named_templates_and_none(bundled: Path, tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ eos_token }}!"}]
    assert rewrite(bundled, tmp_path, named).apply_chat_template([]) == "<|im_end|>!"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ChatTemplateError, match="no chat template; use the completions API"):
        rewrite(bundled, tmp_path, None).apply_chat_template([])


def test_template_helpers(bundled: Path, tmp_path: Path) -> None:
    template = "{{ messages | tojson }}{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%%') }}"
    assert rewrite(bundled, tmp_path, template).apply_chat_template([{"a": "ü"}]) == '[{"a": "ü"}]%'


def test_a_template_file_wins(bundled: Path, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert rewrite(bundled, tmp_path, "from the config").apply_chat_template([]) == "from the file"


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer.json is missing; .*--tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path)
