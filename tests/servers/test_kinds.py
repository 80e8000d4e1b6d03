"""The table of kinds: what stands in it agrees with what the kinds are."""

from __future__ import annotations

from dataclasses import fields

import pytest

from engine.config import EngineConfig
from servers.command import ServerCommand, parse_command
from servers.failures import REASONS
from servers.flags.defaults import USUAL, Platform
from servers.kind import ServerKind
from servers.kinds import BUNDLED, KINDS, find_family, find_start
from servers.metrics.catalog import METRICS

ALL = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def test_the_bundled_engine_has_the_flags_that_are_said() -> None:
    assert {field.name for field in fields(EngineConfig)} == BUNDLED.flags


@ALL
def test_a_kind_is_recognised_by_its_command(kind: ServerKind) -> None:
    written = ServerCommand(
        kind.command, "M", {"max_num_seqs": 2, "max_model_len": 99}, {"VAR": "1"}, ("taskset", "-c", "0")
    )
    command = parse_command(str(written))
    assert command == written
    assert command.kind is kind
    start = find_start(f"/opt/bin/{kind.program} {' '.join(kind.serve)} M".split())
    assert start is not None
    assert (start.kind, start.begin, start.end) == (kind, 0, 1 + len(kind.serve))


@ALL
def test_its_facts_are_of_names_that_exist(kind: ServerKind) -> None:
    assert kind.metrics.keys() <= METRICS.keys()
    assert kind.failures.keys() <= REASONS
    for marker, label in kind.families:
        assert find_family([marker]) == (kind, label)
    for name in USUAL:
        number = kind.default(name, Platform())
        assert number.low <= number.point <= number.high


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["vllm:num_requests_running", "vllm:num_requests_swapped", "vllm:gpu_cache_usage_perc"], "V0"),
        (["vllm:num_requests_running", "vllm:gpu_cache_usage_perc"], "0.8 to 0.9.1"),
        (["vllm:kv_cache_usage_perc"], "0.9.2 or later"),
        (["vllm:inter_token_latency_seconds_count"], "0.10.2 or later"),
        (["sglang:num_running_reqs"], "SGLang"),
    ],
)
def test_the_names_tell_the_version(names: list[str], label: str) -> None:
    found = find_family(names)
    assert found is not None
    assert label in found[1]
    assert find_family(["up", "go_threads"]) is None
