"""vLLM's spellings of lists and of JSON flags."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from engine.server.serve_arguments import join_dotted, normalize, spread_lists

JSON = {"--speculative-config"}
LISTS = {"--served-model-name", "--api-key"}


@pytest.mark.parametrize(
    ("word", "normal"),
    [("--max_num_seqs", "--max-num-seqs"), ("--a_b.c_d", "--a-b.c_d"), ("-O", "-O")],
)
def test_underscores_are_dashes_before_the_first_dot(word: str, normal: str) -> None:
    assert normalize(word) == normal


@pytest.mark.parametrize(
    ("line", "spread"),
    [
        ("M --served-model-name a", "M --served-model-name a"),
        (
            "M --served_model_name a b --port 1",
            "M --served_model_name a --served-model-name b --port 1",
        ),
        ("--api-key=k l --port 1 M", "--api-key=k --api-key l --port 1 M"),
        ("--port 1 M", "--port 1 M"),
        ("--served-model-name", "--served-model-name"),
    ],
)
def test_lists_are_spread(line: str, spread: str) -> None:
    assert spread_lists(line.split(), LISTS) == spread.split()


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["--speculative-config.method", "ngram"], {"method": "ngram"}),
        (["--speculative_config.method=ngram"], {"method": "ngram"}),
        (
            ["--speculative-config.num_speculative_tokens", "4", "--speculative-config.model", "m"],
            {"num_speculative_tokens": 4, "model": "m"},
        ),
        (["--speculative-config.a.b.c", "null"], {"a": {"b": {"c": None}}}),
        (
            ["--speculative-config", '{"method": "ngram", "k": 1}', "--speculative-config.k", "2"],
            {"method": "ngram", "k": 2},
        ),
    ],
)
def test_dotted_flags_make_one_object(words: list[str], config: dict[str, Any]) -> None:
    *rest, flag, value = join_dotted(["M", *words, "--port", "1"], JSON)
    assert rest == ["M", "--port", "1"]
    assert (flag, json.loads(value)) == ("--speculative-config", config)


def test_whole_objects_and_other_dots_stay_as_they_are() -> None:
    assert join_dotted(["--speculative-config", "{", "--x.y", "1"], JSON) == [
        "--x.y",
        "1",
        "--speculative-config",
        "{",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--speculative-config.method"], "needs a value"),
        (["--speculative-config.a", "1", "--speculative-config.a.b", "2"], "had a value before"),
        (["--speculative-config", "{", "--speculative-config.a", "1"], "is not JSON"),
        (["--speculative-config", "[]", "--speculative-config.a", "1"], "must be a JSON object"),
    ],
)
def test_what_cannot_be_joined(words: list[str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        join_dotted(words, JSON)
