"""What a diagnosis makes of flags, of logs beside metrics, and of the names of versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_server import Server

from doctor.diagnosis.diagnose import diagnose
from doctor.metrics.log_source import LogSource
from doctor.metrics.sources import Scrapes
from servers.kinds import KINDS
from servers.server_log import parse_log, read_log

START = """\
INFO 11-30 10:00:00 [api_server.py:1842] vLLM API server version 0.19.0
INFO 11-30 10:00:00 [utils.py:233] non-default args: {'model': 'm', 'max_num_seqs': 64}
INFO 11-30 10:04:30 [default_loader.py:268] Loading weights took 240.12 seconds
INFO 11-30 10:10:40 [monitor.py:34] torch.compile takes 310.20 s in total
INFO 11-30 10:11:05 [core.py:210] init engine (profile, create kv cache, warmup model) took 390.11 seconds
"""


def test_a_log_of_the_start_alone_tells_of_the_start(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(START)
    found = diagnose(LogSource(path), log=read_log(path))
    (slow,) = found.findings
    assert slow.id == "slow-start"
    figures = {item.signal: item.value for item in slow.evidence}
    assert figures == {"startup_seconds": 390.11, "load_seconds": 240.12, "compile_seconds": 310.2}
    assert {item.query for item in slow.evidence} == {"the server's log (--log FILE)"}
    assert not found.healthy
    assert found.flags[found.engines[0]].value("max_num_seqs") == 64
    assert any("fewer than two periodic load lines" in note for note in found.notes)


def test_a_hint_does_not_ask_for_the_log_that_was_passed() -> None:
    """It tells of the load, and the start is not in it."""
    pages, log = (
        Server().scrapes(),
        parse_log("INFO 11-30 10:00:00 [x.py:1] vLLM API server version 0.19.0\n"),
    )
    for known, reason in ((None, "needs the server's log (--log FILE)"), (log, "the log has no line on it")):
        found = diagnose(Scrapes(pages), {}, log=known)
        (start,) = [item for item in found.cannot_tell if item.id == "slow-start"]
        assert {missing.why for missing in start.missing} == {reason}
        assert found.healthy


@pytest.mark.parametrize("flags", [{}, None])
def test_a_level_that_others_wait_at_is_a_cap_whatever_the_default(flags: dict[str, Any] | None) -> None:
    """Ten run while others wait, though vLLM allows 128 at least where the flag is not set."""
    waiting = replace(Server(), running=10, waiting=3, kv=0.02)
    cap = diagnose(Scrapes(waiting.scrapes()), flags).findings[0].flags["max_num_seqs"]
    assert (cap.value, cap.origin) == (10, "inferred")


SPIKES = replace(
    Server(),
    histograms={
        "itl": {0.03: 970, 1.5: 30},
        "prefill_length": {100.0: 9, 4000.0: 1},
        "prompt_length": {100.0: 9, 4000.0: 1},
        "prefill_time": {0.1: 9, 1.5: 1},
    },
)


@pytest.mark.parametrize(
    ("engine", "version", "threshold"),
    [("vllm", "0.32.0", True), ("vllm", "0.6.3", False), ("bundled", None, True), ("sglang", None, False)],
)
def test_only_flags_that_the_server_has_are_prescribed(
    engine: Any, version: str | None, threshold: bool
) -> None:
    log = parse_log(f"version {version}") if version else None
    found = diagnose(Scrapes(SPIKES.scrapes()), {"max_num_seqs": 64}, log=log, kind=KINDS[engine])
    (finding,) = [finding for finding in found.findings if finding.id == "itl-spikes-long-prefill"]
    given = " ".join(prescription.args for prescription in finding.prescriptions)
    assert ("--long-prefill-token-threshold" in given) == threshold
    assert ("--chunked-prefill-size" if engine == "sglang" else "--max-num-batched-tokens") in given


OLD_NAMES = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_": "vllm:gpu_prefix_cache_",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}


def test_the_old_names_are_read_as_the_new_ones() -> None:
    pages = SPIKES.scrapes()
    old = [(t, page) for t, page in pages]
    for new, before in OLD_NAMES.items():
        old = [(t, page.replace(new, before)) for t, page in old]
    assert old != pages
    renamed, current = (diagnose(Scrapes(those), {}) for those in (old, pages))
    assert [f.id for f in renamed.findings] == [f.id for f in current.findings]
    assert "vllm:time_per_output_token_seconds" in renamed.findings[0].evidence[0].query


def test_of_two_names_at_once_the_new_one_counts() -> None:
    """For two releases a server exposes both."""
    alone = SPIKES.scrapes()
    both = [(t, page + page.replace("inter_token_latency", "time_per_output_token")) for t, page in alone]
    first, second = (diagnose(Scrapes(pages), {}).findings for pages in (alone, both))
    assert [e.value for f in first for e in f.evidence] == [e.value for f in second for e in f.evidence]


def test_sglang_is_read_and_what_it_lacks_is_named() -> None:
    def page(number: int) -> str:
        labels = '{model_name="m"}'
        return (
            f"sglang:num_running_reqs{labels} 4\nsglang:num_queue_reqs{labels} 0\n"
            f"sglang:token_usage{labels} 0.99\nsglang:cache_hit_rate{labels} 0.1\n"
            f"sglang:generation_tokens_total{labels} {100 * number}\n"
        )

    found = diagnose(Scrapes([(1000 * n, page(n)) for n in range(1, 12)]))
    assert found.family == "SGLang"
    assert "preemptions" in {m.name for item in found.cannot_tell for m in item.missing}
    assert not found.healthy


def test_a_shorter_draft_is_written_into_the_speculative_config() -> None:
    drafting = replace(
        Server(),
        running=64,
        counters={"drafts": 1000, "draft_tokens": 4000, "accepted_tokens": 1200},
    )
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    found = diagnose(Scrapes(drafting.scrapes()), {"speculative_config": config})
    (finding,) = [finding for finding in found.findings if finding.id == "speculation-loses"]
    off, shorter, _ = finding.prescriptions
    assert off.args == "drop --speculative-config"
    assert shorter.changes == {"speculative_config": {**config, "num_speculative_tokens": 2}}
    assert '"num_speculative_tokens": 2' in shorter.args


def test_sglang_without_our_speculation_metrics_is_not_said_to_speculate_or_not() -> None:
    labels = '{model_name="m"}'
    pages = [
        (1000 * n, f"sglang:num_running_reqs{labels} 4\nsglang:gen_throughput{labels} {n}\n")
        for n in range(1, 9)
    ]
    found = diagnose(Scrapes(pages))
    told = {finding.id for finding in found.findings} | {item.id for item in found.cannot_tell}
    assert "speculation-loses" not in told, "no SGLang counts drafts"
    assert "speculation-preempts" in told


def test_engines_are_named_by_what_tells_them_apart() -> None:
    def page(number: int) -> str:
        return "".join(
            Server(labels={"engine": engine, "model_name": model, "instance": "host:1"}).page(number, 0)
            for engine in "01"
            for model in ("small", "large")
        )

    found = diagnose(Scrapes([(1000 * n, page(n)) for n in range(1, 5)]), {})
    assert found.engines[0] == "host:1 large engine 0"
    assert len(set(found.engines)) == 4


def test_few_requests_are_said_to_be_few() -> None:
    found = diagnose(Scrapes(Server().scrapes(count=2)), {})
    assert found.notes == ("scrapes: only 10 requests, so percentiles are rough",)
