"""Space files: knobs and constraints as data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tuner.space.file import SpaceError, SpaceFile, read_space_file
from tuner.space.space import DRAFTS, SPECULATION, Space, Surroundings, build_space, effective

DOCS = Path(__file__).parents[3] / "docs" / "targets.md"
BASELINE = effective({}, "bundled")


def space(data: dict[str, Any], **words: Any) -> Space:
    return build_space(BASELINE, 8192, file=SpaceFile.of(data), **words)


def values(found: Space) -> dict[str, tuple[object, ...]]:
    return {axis.name: axis.values for axis in found.axes}


def test_a_file_says_what_is_searched() -> None:
    found = space(
        {
            "knobs": {
                "max-num-seqs": [8, 16],
                "max_num_batched_tokens": {"low": 512, "high": "2 * max_num_batched_tokens"},
                "gpu_memory_utilization": {"low": 0.8, "high": 0.95, "step": 0.05},
                "scheduling_policy": ["fcfs", "priority"],
            }
        }
    )
    assert values(found) == {
        "max_num_seqs": (8, 16, 128),  # the baseline's own is always there
        "max_num_batched_tokens": (512, 768, 1024, 1536, 2048, 3072, 4096),
        "gpu_memory_utilization": (0.8, 0.85, 0.9, 0.92, 0.95),
        "scheduling_policy": ("fcfs", "priority"),
    }


def test_nested_flags_depend_on_each_other() -> None:
    found = space({"knobs": {DRAFTS: [0, 4], f"{SPECULATION}.prompt_lookup_max": [3, 5]}})
    assert found.size == 1 + 2
    configs = [config[SPECULATION] for config in found._every()]
    assert {json.dumps(config) for config in configs} == {
        "null",
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}',
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}',
    }


def test_a_knob_without_what_it_needs_is_left_out_with_a_note() -> None:
    found = space({"knobs": {"max_num_seqs": [8, 16], f"{SPECULATION}.prompt_lookup_max": [3, 5]}})
    assert list(values(found)) == ["max_num_seqs"]
    assert found.notes == (f"{SPECULATION}.prompt_lookup_max is not varied: it needs {DRAFTS}",)


def test_constraints_refuse_without_a_launch() -> None:
    found = space(
        {
            "knobs": {"max_num_seqs": [8, 16], "enable_prefix_caching": [True, False]},
            "constraints": [
                {
                    "holds": "max_num_batched_tokens <= 128 * max_num_seqs",
                    "because": "must not exceed 128 tokens a sequence",
                    "when": {"enable-prefix-caching": False},
                },
                "max_num_seqs >= min(16, max_model_len)",
            ],
        }
    )
    tokens = "max_num_batched_tokens=2048: must not exceed 128 tokens a sequence"
    seqs = "max_num_seqs=8: must hold max_num_seqs >= min(16, max_model_len)"
    assert found.refusals({**BASELINE, "max_num_seqs": 16}) == []
    assert found.refusals({**BASELINE, "max_num_seqs": 8}) == [seqs]
    assert found.refusals({**BASELINE, "max_num_seqs": 8, "enable_prefix_caching": False}) == [tokens, seqs]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"knobs": {"max_num_seqs": {"low": 1, "high": "2 * max_seqs"}}},
            "max_seqs is not known here; known are",
        ),
        ({"knobs": {"max_num_seqs": {"low": 1, "high": "2 / (1 - 1)"}}}, "divides by 0"),
        ({"knobs": {"max_num_seqs": {"low": 0, "high": 1e9, "step": 1}}}, "more than 1000 values"),
        ({"knobs": {"max_num_seqs": {"low": 0, "high": "kv_requests", "step": 1}}}, "more than 1000 values"),
        (
            {"knobs": {"a": {"values": [1, 2], "needs": "b"}, "b": {"values": [1, 2], "needs": "a"}}},
            "a: needs b, which is not there without it",
        ),
        ({"knobs": {"max_num_seqs": ["few", "many"]}}, "is the number 128 now, and 'few' is none"),
        (
            {"knobs": {"max_num_seqs": [8]}, "constraints": ["max_num_seq < 9"]},
            r"no flag max_num_seq \(did you mean max_num_seqs\?\)",
        ),
        (
            {
                "knobs": {"max_num_seqs": [8]},
                "constraints": [{"holds": "max_num_seqs < 9", "when": {"pr": 1}}],
            },
            "no flag pr",
        ),
    ],
)
def test_what_only_shows_beside_a_baseline_is_said_too(data: dict[str, Any], says: str) -> None:
    with pytest.raises(SpaceError, match=says):
        space(data)


def test_fix_and_vary_go_on_top_of_a_file() -> None:
    data = {"knobs": {"max_num_seqs": [8, 16], "max_num_batched_tokens": [512, 1024]}}
    found = space(data, fix=["max_num_seqs"], vary={"block_size": (16, 32), "enable_prefix_caching": None})
    assert list(values(found)) == ["max_num_batched_tokens", "block_size", "enable_prefix_caching"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "needs a mapping 'knobs'"),
        ({"knobs": {}}, "needs a mapping 'knobs'"),
        (
            {"knobs": {"a": [1]}, "constraint": []},
            "unknown key 'constraint'; known are knobs, constraints, file. Did",
        ),
        ({"knobs": {"a": 1}}, "knobs: a: write the list of values"),
        ({"knobs": {"a": []}}, "knobs: a: has neither values nor low and high"),
        ({"knobs": {"a": {"low": 1}}}, "knobs: a: low and high belong together"),
        ({"knobs": {"a": {"low": 1, "high": "max(1"}}}, "knobs: a: high: 'max\\(1': not an expression"),
        ({"knobs": {"a": {"low": "__import__('os')", "high": 2}}}, "is not allowed; use numbers, names"),
        ({"knobs": {"a": {"values": [1], "stp": 2}}}, "unknown key 'stp'; .* Did you mean step"),
        ({"knobs": {"a": {"low": 1, "high": 2, "step": -1}}}, "step: must be a number above 0"),
        ({"knobs": {"a": [None]}}, "None is neither a number nor a switch nor a word"),
        ({"knobs": {"a": [float("nan")]}}, "nan is neither a number"),
        ({"knobs": {"a": [1]}, "constraints": {}}, "constraints: must be a list"),
        ({"knobs": {"a": [1]}, "constraints": [{"holds": 3}]}, "constraints\\[0\\]: write a comparison"),
        ({"knobs": {"a": [1]}, "constraints": ["a"]}, "holds: 'a': write one comparison"),
        ({"knobs": {"a": [1]}, "constraints": ["a.b < 1"]}, "'a.b' is not allowed"),
        ({"knobs": {"a": [1]}, "constraints": [{"holds": "a < 1", "when": 2}]}, "when: must map flags"),
    ],
)
def test_what_is_wrong_is_said(data: Any, says: str) -> None:
    with pytest.raises(SpaceError, match=says):
        SpaceFile.of(data)


def test_files_are_yaml_or_json(tmp_path: Path) -> None:
    path = tmp_path / "space"
    content = {"file": str(path), "knobs": {"max_num_seqs": [8, 16]}}
    path.write_text("knobs: {max_num_seqs: [8, 16]}")
    assert read_space_file(path) == content
    path.write_text(json.dumps({"knobs": content["knobs"]}))
    assert read_space_file(path) == content
    for text in ("knobs: [", "\x00", "!!python/object/apply:os.system [ls]"):
        path.write_text(text)
        with pytest.raises(SpaceError, match="neither YAML nor JSON"):
            read_space_file(path)
    with pytest.raises(SpaceError, match="No such file"):
        read_space_file(tmp_path / "gone")


def test_a_knob_that_the_server_lacks_is_an_error() -> None:
    from servers.flags.offered_flags import OfferedFlags

    around = Surroundings("bundled", offered=OfferedFlags("x", "1.0", {"max_num_seqs": ()}))
    with pytest.raises(SpaceError, match=r"block_size: cannot be varied: x 1.0 has no --block-size"):
        space({"knobs": {"block_size": [16, 32]}}, around=around)


def test_the_example_in_the_docs_is_read(tmp_path: Path) -> None:
    text = DOCS.read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(knobs:.*?)```", text, re.DOTALL)
    path = tmp_path / "space.yaml"
    path.write_text(example)
    found = space(dict(read_space_file(path)))
    assert found.refusals(found.baseline) == []
    assert len(found.rules) > len(space({"knobs": {"max_num_seqs": [8]}}).rules)
