"""Tokenizers in the manner of each family, and their chat templates, against transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers as hf
from serving_kit import serving
from tiny_llama import write_config
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.config import EngineConfig
from engine.llm import LLM
from engine.models.model_error import ModelError
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.text.tokenizer import (
    ChatTemplateError,
    IncrementalDetokenizer,
    NoTokenizerError,
    TokenIdsOnly,
    Tokenizer,
)

SPECIAL = ["<unk>", "<bos>", "<eos>", "<turn>"]
TEXTS = ["hello world", "  two  spaces ", "naïve 12 — 你好 🎉", "a\n\n\tb", "<turn>hello<eos>", ""]
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]


def sentencepiece_like() -> hf.Tokenizer:
    """Words begin with U+2581; what the vocabulary lacks falls back to bytes (Llama 2, Mistral, Gemma)."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorwpstin\n", "▁h", "▁he", "lo"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "o")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return hf.Tokenizer(model)


def llama2() -> hf.Tokenizer:
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def gemma() -> hf.Tokenizer:
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def byte_level(normalizer: normalizers.Normalizer | None = None) -> hf.Tokenizer:
    """Bytes as letters, split by a regex (Llama 3, Qwen)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *letters, "he", "lo", "Ġw"])}
    tokenizer = hf.Tokenizer(models.BPE(vocabulary, [("h", "e"), ("l", "o"), ("Ġ", "w")]))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


FAMILIES: dict[str, Callable[[], hf.Tokenizer]] = {
    "llama2": llama2,
    "gemma": gemma,
    "llama3": byte_level,
    "qwen": lambda: byte_level(normalizers.NFC()),
}


def save(directory: Path, tokenizer: hf.Tokenizer, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens([hf.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True},
        "unk_token": "<unk>",
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def both(directory: Path) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    return Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_text_are_transformers(family: str, tmp_path: Path) -> None:
    ours, theirs = both(save(tmp_path, FAMILIES[family]()))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ids[0] == 1
        assert (
            ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        )
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
            stream = IncrementalDetokenizer(ours, skip)
            pieces = [stream.push([token_id]) for token_id in ids]
            assert "".join(pieces) + stream.finish() == ours.decode(ids, skip)


def test_special_tokens_of_the_older_file(tmp_path: Path) -> None:
    save(tmp_path, gemma(), chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    old = {name: config.pop(name) for name in ("bos_token", "eos_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(old))
    assert Tokenizer.load(tmp_path).apply_chat_template(TURNS) == "<bos>hello<eos>"


TEMPLATES = {  # what the families' templates make use of
    "gemma": """
        {{- bos_token -}}
        {%- if messages[0]['role'] == 'system' -%}{%- set rest = messages[1:] -%}
        {%- else -%}{%- set rest = messages -%}{%- endif -%}
        {%- for message in rest -%}
          {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
            {{ raise_exception("roles must alternate") }}
          {%- endif -%}
          {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
          {{ '<turn>' + role + '\\n' }}
          {%- if message['content'] is string -%}{{ message['content'] | trim }}
          {%- elif message['content'] is iterable -%}
            {%- for item in message['content'] if item['type'] == 'text' -%}{{ item['text'] }}{%- endfor -%}
          {%- endif -%}
          {{ '<turn>\\n' }}
        {%- endfor -%}
        {%- if add_generation_prompt -%}{{ '<turn>model\\n' }}{%- endif -%}""",
    "mistral": """
        {%- set found = namespace(last=none) %}
        {%- for message in messages %}
          {%- if message.role == "assistant" %}
            {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
            {%- continue %}
          {%- endif %}
          {%- set found.last = message.content %}
          {{- "[INST] " ~ message.content ~ " [/INST]" }}
        {%- endfor %}
        {{- found.last | tojson(indent=None, separators=(",", ":"), sort_keys=True) }}""",
    "qwen": """
        {%- set seen = namespace(last=messages|length - 1) %}
        {%- for message in messages[::-1] %}
          {%- if message.role == "user" and not message.content.startswith('<tool>') %}
            {%- set seen.last = (messages|length - 1) - loop.index0 %}{%- break %}
          {%- endif %}
        {%- endfor %}
        {%- for message in messages %}
          {{- '<turn>' + message.role + '\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- endfor %}
        {{- seen.last }}{{ '<think>' if enable_thinking is not defined or enable_thinking }}""",
}


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("count", [1, 2])
def test_templates_render_as_in_transformers(family: str, count: int, tmp_path: Path) -> None:
    ours, theirs = both(save(tmp_path, gemma(), chat_template=TEMPLATES[family]))
    for turns in (TURNS[:count], [*TURNS, {"role": "user", "content": '"q"é\n'}]):
        for opens in (True, False):
            expected = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=opens)
            assert ours.apply_chat_template(turns, opens) == expected
            assert expected


def test_a_template_may_refuse(tmp_path: Path) -> None:
    ours = Tokenizer.load(save(tmp_path, gemma(), chat_template=TEMPLATES["gemma"]))
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ours.apply_chat_template(TURNS[::-1])


def test_the_template_of_a_multimodal_model(tmp_path: Path) -> None:
    save(tmp_path, gemma())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages|length }}"}))
    assert Tokenizer.load(tmp_path).apply_chat_template(TURNS) == "2"
    (tmp_path / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelError, match=r"chat_template\.json: chat_template is not a text"):
        Tokenizer.load(tmp_path)


def test_dummy_weights_need_no_tokenizer(tmp_path: Path) -> None:
    """A config.json alone, named by its directory or itself: token ids in, ids as text out."""
    write_config(tmp_path)
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for model in (tmp_path, tmp_path / "config.json"):
        llm = LLM(str(model), load_format="dummy")
        (done,) = llm.generate([[3, 4, 5]], sampling)
        assert done.text == "".join(f"<{token_id}>" for token_id in done.token_ids)
        with pytest.raises(NoTokenizerError, match=r"tokenizer\.json is missing\. Give prompts as token ids"):
            llm.generate(["hello"], sampling)
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing; name a directory that has one"):
        Tokenizer.load(tmp_path)


def test_what_does_not_work_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tmp_path, "dummy")
    assert isinstance(tokenizer, TokenIdsOnly)
    for call in (lambda: tokenizer.encode("x"), tokenizer.to_json):
        with pytest.raises(NoTokenizerError, match="start with --tokenizer"):
            call()
    with pytest.raises(ChatTemplateError, match=r"a chat cannot be made into a prompt: .* --tokenizer"):
        tokenizer.apply_chat_template(TURNS)
    assert tokenizer.token_texts([1, 20]) == ["<1>", "<20>"]
    assert (tokenizer.token_text(7), tokenizer.token_id("<eos>"), tokenizer.vocab_size) == ("<7>", None, 0)


def test_a_model_of_8b_is_refused_on_a_small_machine(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=360,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        torch_dtype="bfloat16",
    )
    with pytest.raises(ModelError, match=r"the weights take 1\d\d GiB in bfloat16, this machine has"):
        ModelRunner(EngineConfig(model=str(tmp_path), load_format="dummy"))


def test_a_server_of_dummy_weights_takes_token_ids_alone(tmp_path: Path) -> None:
    write_config(tmp_path / "model", architectures=["Gemma3ForCausalLM"], head_dim=32, eos_token_id=1)
    with serving(tmp_path / "model", tmp_path / "log") as server:
        prompt = {"prompt": [3, 4, 5], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        (choice,) = httpx.post(f"{server.url}/v1/completions", json=prompt).json()["choices"]
        assert re.fullmatch(r"(<\d+>){4}", choice["text"])
        for path, body in (
            ("completions", {**prompt, "prompt": "hello"}),
            ("chat/completions", {"messages": TURNS[:1]}),
            ("completions", {**prompt, "structured_outputs": {"choice": ["a"]}}),
        ):
            answer = httpx.post(f"{server.url}/v1/{path}", json=body)
            assert answer.status_code == 400, answer.text
            assert "tokenizer" in answer.json()["error"]["message"]
