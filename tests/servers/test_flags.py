"""Server commands: what people paste is read as vLLM reads it, and written back the same."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.command import parse_command
from servers.flags.words import FlagError, render, vocabulary
from servers.kinds import BUNDLED, VLLM


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve M --max-num-seqs 64", {"max_num_seqs": 64}),
        ("vllm serve M --max_num_seqs=64", {"max_num_seqs": 64}),
        ("vllm serve M --max-num-seqs 8 --max-num-seqs 16", {"max_num_seqs": 16}),
        ("vllm serve M --no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("vllm serve --enable-prefix-caching M", {"enable_prefix_caching": True}),
        ("vllm serve M --enable-chunked-prefill False", {"enable_chunked_prefill": False}),
        ("vllm serve M --enable-chunked-prefill=true", {"enable_chunked_prefill": True}),
        (
            "vllm serve M --enable-prefix-caching --no-enable-prefix-caching",
            {"enable_prefix_caching": False},
        ),
        ("vllm serve M --gpu-memory-utilization 1", {"gpu_memory_utilization": 1.0}),
        ("vllm serve M --gpu-memory-utilization .85", {"gpu_memory_utilization": 0.85}),
        ("vllm serve M --max-model-len 16k", {"max_model_len": 16_000}),
        ("vllm serve M --max-model-len 16K", {"max_model_len": 16_384}),
        ("vllm serve M --max-model-len auto", {"max_model_len": "auto"}),
        ("vllm serve M --max-num-batched-tokens 1.5k", {"max_num_batched_tokens": 1500}),
        ("vllm serve M --seed -1", {"seed": -1}),
        ("vllm serve M --api-key 1234", {"api_key": "1234"}),
        ("vllm serve M -tp 2 -q awq", {"tensor_parallel_size": 2, "quantization": "awq"}),
        ("vllm serve -O3 M", {"optimization_level": 3}),
        ("vllm serve M --served-model-name a b --seed 1", {"served_model_name": ["a", "b"], "seed": 1}),
        (
            "vllm serve M --some-new-flag 3 --other x --third",
            {"some_new_flag": 3, "other": "x", "third": True},
        ),
        (
            """vllm serve M --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        (
            "vllm serve M --speculative-config.method ngram --speculative_config.num_speculative_tokens 3",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        ("vllm serve M \\\n  --max-num-seqs 4 \\ \r\n  --seed 2", {"max_num_seqs": 4, "seed": 2}),
        ("vllm serve M --seed 2 2>&1 | tee log", {"seed": 2}),
        ("nohup vllm serve M --seed 2 > log 2>&1 &", {"seed": 2}),
    ],
)
def test_flags(text: str, expected: dict[str, Any]) -> None:
    command = parse_command(text)
    assert command.model == "M"
    assert command.flags == expected
    assert {name: type(value) for name, value in command.flags.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert parse_command(str(command)) == command


@pytest.mark.parametrize(
    ("text", "program", "model", "env", "rest"),
    [
        ("vtune serve bundled --seed 1", "vtune serve", "bundled", {}, ()),
        ("--seed 1", "", None, {}, ()),
        ("$ vllm serve M --seed 1", "vllm serve", "M", {}, ()),
        ("A=1 B='x y' vllm serve M --seed 1", "vllm serve", "M", {"A": "1", "B": "x y"}, ()),
        ("env A=1 vllm serve M --seed 1", "vllm serve", "M", {"A": "1"}, ()),
        (
            "A=1 taskset -c 0-1 vllm serve M --seed 1",
            "vllm serve",
            "M",
            {"A": "1"},
            ("taskset", "-c", "0-1"),
        ),
        ("/opt/my\\ env/bin/vllm serve M --seed 1", "'/opt/my env/bin/vllm' serve", "M", {}, ()),
        (
            "python3 -m vllm.entrypoints.openai.api_server --model M --seed 1",
            "python3 -m vllm.entrypoints.openai.api_server",
            "M",
            {},
            (),
        ),
        (
            "docker run --rm -it --gpus all -v c:/c -p 80:80 --ipc=host "
            "vllm/vllm-openai:latest --model M --seed 1",
            "vllm/vllm-openai:latest",
            "M",
            {},
            ("docker", "run", "--rm", "-it", "--gpus", "all", "-v", "c:/c", "-p", "80:80", "--ipc=host"),
        ),
    ],
)
def test_programs(
    text: str, program: str, model: str | None, env: dict[str, str], rest: tuple[str, ...]
) -> None:
    command = parse_command(text)
    assert (command.program, command.model, command.env, command.rest) == (program, model, env, rest)
    assert command.flags == {"seed": 1}
    assert parse_command(str(command)) == command


def test_engine_names_whose_flags_these_are() -> None:
    assert parse_command("vtune serve bundled").kind is BUNDLED
    assert parse_command("vllm serve M").kind is VLLM
    assert parse_command("--seed 1").kind is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("nginx -c x", "no server is named"),
        ("docker run --rm -it", "names no image"),
        ("vllm serve M --max-num-seqs", "needs a value"),
        ("vllm serve M --max-num-seqs many", "whole number"),
        ("vllm serve M --gpu-memory-utilization high", "must be a number"),
        ("vllm serve M --seed $SEED", r"what \$\{SEED\} stands for is not known here"),
        ("vllm serve M --speculative-config {method: ngram}", "is not JSON"),
        ("vllm serve M --speculative-config '{\"method\": }'", "is not JSON"),
        ("vllm serve M 'unfinished", "quotes do not match"),
        ("vllm serve M --seed 1 stray", "'stray' belongs to no flag"),
        ("vllm serve M –-seed 1", "typographic dash"),
        ("vllm serve M -zz 1", "no such short flag"),
        ("vllm serve M --enable-prefix-caching=maybe", "is a switch"),
        ("vllm serve M --no-enable-prefix-caching=true", "takes no value"),
    ],
)
def test_errors_name_the_word_and_the_fix(text: str, says: str) -> None:
    with pytest.raises(FlagError, match=says):
        parse_command(text)


def test_render_leaves_out_none_and_negates_false() -> None:
    assert render({"a": None, "enforce_eager": False, "b": True, "c": "-x", "d": ""}) == [
        "--no-enforce-eager",
        "--b",
        "--c=-x",
        "--d=",
    ]


def test_with_flags_lays_changes_over_and_drops_none() -> None:
    command = parse_command("vllm serve M --seed 1 --max-num-seqs 8").with_flags(
        {"max_num_seqs": 4, "seed": None}
    )
    assert str(command) == "vllm serve M --max-num-seqs 4"


_TEXT = st.text(
    alphabet=st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=12
).filter(lambda text: text[0] not in "$–—" and text.strip() == text and "\u00a0" not in text)
_JSON = st.dictionaries(_TEXT, st.none() | st.booleans() | st.integers() | _TEXT, max_size=3)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "switch": st.booleans(),
    "int": st.integers(-1, 10**9),
    "size": st.integers(1, 10**12) | st.just("auto"),
    "float": st.floats(0, 1e6, allow_nan=False),
    "json": _JSON,
    "text": _TEXT.filter(lambda text: text[0] not in "<>"),
    "many": st.lists(st.from_regex(r"[a-z][a-z0-9/]{0,8}", fullmatch=True), min_size=1, max_size=3).filter(
        lambda items: not {"true", "false"} & set(items)
    ),
}


KINDS = vocabulary("vllm").kinds
NOT_WRITTEN = {"model", "config", "spec_method", "spec_model", "spec_tokens"}
"""Flags that are read into others."""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(set(KINDS) - NOT_WRITTEN)), unique=True, max_size=6).flatmap(
        lambda names: st.fixed_dictionaries({name: _VALUES[KINDS[name]] for name in names})
    )
)
def test_what_is_rendered_is_read_back(flags: dict[str, Any]) -> None:
    command = parse_command("vllm serve M " + shlex.join(render(flags)))
    assert json.dumps(command.flags) == json.dumps(flags)
