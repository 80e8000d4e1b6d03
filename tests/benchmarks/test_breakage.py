"""A made-up release names each metric, knob and playbook that it breaks."""

from __future__ import annotations

from benchmarks.servers.breakage import broken
from servers.facts import Releases, releases_of
from servers.kinds import SGLANG, VLLM

NEXT = "99.0.0"


def followed(releases: Releases, *gone: str) -> Releases:
    """With a release more, which has everything of the newest but what is ``gone``."""
    last = releases.releases[-1]
    flags, metrics = (
        {
            name: tuple(
                (first, last if end is None and name in gone else end, fact) for first, end, fact in spans
            )
            for name, spans in table.items()
        }
        for table in (releases.flags, releases.metrics)
    )
    return Releases((*releases.releases, NEXT), flags, metrics)  # type: ignore[arg-type]


def test_a_release_that_drops_nothing_breaks_nothing() -> None:
    for kind in (VLLM, SGLANG):
        known = releases_of(kind.name)
        assert known is not None
        assert broken(kind, followed(known), known.releases[-1], NEXT) == []


def test_each_rule_knob_and_playbook_that_a_release_breaks_is_named() -> None:
    known = releases_of("vllm")
    assert known is not None
    gone = followed(known, "max_num_seqs", "vllm:kv_cache_usage_perc")
    lines = broken(VLLM, gone, known.releases[-1], NEXT)
    assert "knob max_num_seqs: 99.0.0 has no such flag" in lines
    assert "playbook seq-cap: there is no max_num_seqs any more" in lines
    assert any(
        line.startswith("metric kv_usage: 99.0.0 exposes none of vllm:kv_cache_usage_perc") for line in lines
    )
    assert any(
        line.startswith("playbook kv-") and line.endswith("nothing is left that tells kv_max")
        for line in lines
    )
    assert not [line for line in lines if "max_num_batched_tokens" in line]


def test_a_source_that_is_left_keeps_a_rule_whole() -> None:
    """Prefill takes what a first token takes beside the wait, where it has no histogram of its own."""
    known = releases_of("vllm")
    assert known is not None
    gone = followed(known, "vllm:request_prefill_time_seconds")
    lines = broken(VLLM, gone, known.releases[-1], NEXT)
    assert [line for line in lines if line.startswith("metric prefill_time")]
    assert not [line for line in lines if "prefill_time_mean" in line]
