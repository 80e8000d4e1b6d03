"""Causes that look alike: a cap or a full device, a wide batch or a slow step, prompts or a backlog."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_server import Server

from benchmarks.doctor.loads import Load, arrivals, clients, each
from benchmarks.loadgen.virtual_server import CPU, GPU, Pace, VirtualServer
from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.finding import Prescription
from doctor.metrics.log_source import LogSource
from doctor.metrics.sources import Scrapes
from doctor.output.report import as_text
from servers.server_log import read_log

REPORTS = Path(__file__).parents[1] / "reports"
SLOW_CPU = CPU.times(9)
"""A step of a few sequences takes a quarter of a second, nearly all of it fixed."""


def virtual(
    load: Load,
    flags: Mapping[str, Any] | None = None,
    pace: Pace = CPU,
    slo: str | None = None,
    until: float = 90.0,
    known: bool = True,
) -> Diagnosis:
    server = VirtualServer(seed=3, pace=pace, scrape_every=3.0, **(flags or {}))
    load(server)
    return diagnose(Scrapes(server.run(until)), server.flags if known else None, slo)


def reported(name: str, flags: Mapping[str, Any] | None = None, slo: str | None = None) -> Diagnosis:
    path = REPORTS / name
    return diagnose(LogSource(path), flags, slo, log=read_log(path))


def written(tmp_path: Path, lines: list[tuple[float, float, int, int, float]]) -> Diagnosis:
    """A log with one line per 10 s: prompt and output tokens per second, running, waiting, KV usage."""
    path = tmp_path / "server.log"
    path.write_text(
        "".join(
            f"INFO 06-06 14:{20 + n // 6}:{n % 6}4 [loggers.py:118] Engine 000: Avg prompt throughput: {p} "
            f"tokens/s, Avg generation throughput: {g} tokens/s, Running: {r} reqs, Waiting: {w} reqs, "
            f"GPU KV cache usage: {kv}%, Prefix cache hit rate: 0.0%\n"
            for n, (p, g, r, w, kv) in enumerate(lines)
        )
    )
    return diagnose(LogSource(path), log=read_log(path))


def ids(found: Diagnosis) -> set[str]:
    return {finding.id for finding in found.findings}


def cures(found: Diagnosis, identity: str) -> tuple[Prescription, ...]:
    return next(finding.prescriptions for finding in found.findings if finding.id == identity)


# A slow device with a small cap


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seqs", [1, 2, 4])
def test_a_small_cap_on_a_slow_device_is_a_cap(seqs: int, known: bool) -> None:
    found = virtual(clients(16, each(64, 48), 300), {"max_num_seqs": seqs}, SLOW_CPU, known=known)
    assert found.findings[0].id == "seq-cap"
    assert "overload" not in ids(found)
    assert all(cure.changes["max_num_seqs"] > seqs for cure in cures(found, "seq-cap"))


def test_a_tight_objective_makes_no_overload_of_a_cap() -> None:
    capped = {"max_num_seqs": 4}
    found = virtual(clients(32, each(100, 100), 4000), capped, GPU, "itl_p99<6ms", until=40)
    assert "seq-cap" in ids(found)
    assert not {"overload", "itl-flat-high"} & ids(found)


def test_a_wide_batch_on_the_same_slow_device_is_overload() -> None:
    found = virtual(arrivals(2.0, each(128, 128)), {"max_num_seqs": 64}, SLOW_CPU)
    assert found.findings[0].id == "overload"
    assert "seq-cap" not in ids(found)


def test_a_log_alone_tells_a_small_cap_from_overload(tmp_path: Path) -> None:
    found = written(tmp_path, [(5.0, 6.4, 2, 14, 0.3)] * 8)
    assert found.findings[0].id == "seq-cap"
    assert "overload" not in ids(found)


# Slow steps without a queue


@pytest.mark.parametrize("number", [1, 3])
def test_a_few_streams_of_a_slow_model_are_no_wide_batch(number: int) -> None:
    found = virtual(clients(number, each(64, 64), 60), None, SLOW_CPU)
    assert found.findings[0].id == "slow-steps"
    assert "itl-flat-high" not in ids(found)
    assert not any(cure.changes for cure in cures(found, "slow-steps"))


def test_an_objective_below_the_fixed_part_of_a_step_is_not_blamed_on_the_batch() -> None:
    found = virtual(arrivals(8, each(100, 300)), None, GPU, "itl_p99<5ms", until=40)
    assert "slow-steps" in ids(found)
    assert "itl-flat-high" not in ids(found)


def test_a_batch_whose_sequences_take_the_time_is() -> None:
    found = virtual(clients(24, each(64, 128), 300), None, CPU, "itl_p99<35ms")
    assert "itl-flat-high" in ids(found)
    assert "slow-steps" not in ids(found)


def test_long_contexts_get_words_of_their_own() -> None:
    lengths = {"prompt_length": {30000.0: 10}, "prefill_length": {30000.0: 10}, "prefill_time": {9.0: 10}}
    steps = {"itl": {0.35: 1000}, "tpot": {0.35: 10}, "decode_time": {35.0: 10}}
    found = diagnose(Scrapes(replace(Server(running=3), histograms={**steps, **lengths}).scrapes()), {})
    (finding,) = [finding for finding in found.findings if finding.id == "slow-steps"]
    assert finding.title.endswith("with contexts this long")
    assert "--kv-cache-dtype fp8" in finding.prescriptions[1].text


# Prompts, bursts and backlogs in a log


def test_a_burst_of_prompts_is_no_overload_and_has_no_gap_between_tokens() -> None:
    found = reported("prompts-admitted-one-by-one.log")
    assert ids(found) == {"prefill-burst"}
    assert not any(item.signal == "itl_mean" for finding in found.findings for item in finding.evidence)


def test_a_pair_that_gets_a_token_in_five_seconds_has_slow_steps() -> None:
    """No prompt is computed in the window: all of the time is decoding."""
    found = reported("v0-five-seconds-per-token.log")
    assert found.family.startswith("vLLM V0")
    assert [finding.id for finding in found.findings if not finding.suppressed_by] == ["slow-steps"]
    figures = {item.signal: item.value for item in found.findings[0].evidence}
    assert figures["itl_mean"] == pytest.approx(5, rel=0.01)
    assert figures["decode_per_prefill"] == math.inf


SHEDDING = """\
vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"} %d
vllm:admission_rejections_total{model_name="m",reason="max_num_queued_tokens"} 0
"""


def test_who_refuses_requests_is_not_healthy() -> None:
    """Queue and latency are as of a server with little to do; its front end counts what it refuses."""
    pages = Server().scrapes()
    assert diagnose(Scrapes(pages)).healthy
    shed = [(at, page + SHEDDING % (30 * n)) for n, (at, page) in enumerate(pages)]
    found = diagnose(Scrapes(shed), {"max_num_queued_reqs": 32})
    assert [finding.id for finding in found.findings] == ["requests-refused"]
    assert not found.healthy
    figures = {item.signal: item.value for item in found.findings[0].evidence}
    assert figures["rejected"] == pytest.approx(30 * (len(pages) - 1), rel=0.01)


def test_a_full_device_that_refuses_the_rest_is_overloaded() -> None:
    slow = replace(Server(), running=64, histograms={"itl": {0.35: 1000}, "prefill_time": {0.8: 10}})
    shed = [(at, page + SHEDDING % (30 * n)) for n, (at, page) in enumerate(slow.scrapes())]
    found = diagnose(Scrapes(shed), {"max_num_seqs": 64})
    assert found.findings[0].id == "overload"
    assert {f.suppressed_by for f in found.findings if f.id == "requests-refused"} == {"overload"}


def test_two_lines_tell_of_their_drafts() -> None:
    """The drafts that a line tells of are those of the interval that it ends."""
    found = reported("two-lines-with-drafts.log")
    assert [finding.id for finding in found.findings] == ["speculation-loses"]
    figures = {item.signal: item.value for item in found.findings[0].evidence}
    assert figures["acceptance"] == pytest.approx(5306 / 8703)
    assert figures["tokens_drafted_per_draft"] == pytest.approx(3)
    assert found.findings[0].flags["num_speculative_tokens"].value == 3


def test_two_lines_with_a_burst_infer_no_cap() -> None:
    found = reported("two-lines.log")
    assert not found.findings
    figures = {item.signal: item.value for (own,) in [found.figures.values()] for item in own}
    assert (figures["running_max"], figures["waiting_max"]) == (629, 226)
    assert "running_max 629 requests, " in as_text(found)


def test_prompts_that_keep_coming_are_overload() -> None:
    found = reported("flood-of-prompts.log")
    assert found.findings[0].id == "overload"
    assert found.findings[0].flags["num_speculative_tokens"].value == 2  # positions, of which it tells rates
    assert not any(item.signal == "itl_mean" for item in found.findings[0].evidence)


def test_a_backlog_beyond_the_pool_is_overload_and_a_wider_cap_a_part() -> None:
    found = reported("v0-4471-waiting.log", {"max_num_seqs": 600, "enforce_eager": True})
    assert found.findings[0].id == "overload"
    assert "seq-cap" not in ids(found)
    (wider,) = [cure for cure in cures(found, "overload") if "max_num_seqs" in cure.changes]
    assert wider.changes["max_num_seqs"] == 912
    assert "a part of the cure" in wider.text
    assert "of the 5,070 that run and wait" in wider.text
    assert wider.verification == "not verified"
    assert any(cure.changes == {"enforce_eager": None} for cure in cures(found, "overload"))


# Caps


def test_a_curve_is_no_cap_and_drafts_cost_at_that_width() -> None:
    found = reported("drafts-at-600-running.log")
    assert found.findings[0].id == "speculation-loses"
    assert "seq-cap" not in ids(found)
    assert any("num_speculative_tokens_per_batch_size" in c.text for c in cures(found, "speculation-loses"))


@pytest.mark.parametrize("running", [[600, 629, 610, 590, 605, 615], [100, 300, 629, 610, 620, 400]])
def test_a_wide_batch_that_goes_up_and_down_has_no_cap(tmp_path: Path, running: list[int]) -> None:
    found = written(tmp_path, [(100.0, 9000.0, r, 50, 17.0) for r in running])
    assert "seq-cap" not in ids(found)


def test_a_flat_batch_with_others_waiting_has(tmp_path: Path) -> None:
    found = written(tmp_path, [(100.0, 9000.0, r, 50, 17.0) for r in (256, 255, 256, 256, 254, 256)])
    assert found.findings[0].id == "seq-cap"
    assert found.findings[0].flags["max_num_seqs"].value == 256


# The pool, and caps that graphs are captured for


@pytest.mark.parametrize("flags", [None, {"speculative_config": {"num_speculative_tokens": 2}}])
def test_a_pool_that_drafts_halve_is_given_back_first(flags: Mapping[str, Any] | None) -> None:
    found = reported("pool-halved-by-drafts.log", flags)
    assert found.findings[0].id == "kv-pressure"
    first = found.findings[0].prescriptions[0]
    assert first.changes == {"speculative_config": None}
    assert "78 %" in first.text
    assert any(item.signal == "acceptance" for item in found.findings[0].evidence)


def test_no_cure_is_printed_whose_condition_its_own_figure_breaks() -> None:
    found = reported("pool-of-18-to-21.log")
    assert found.findings[0].id == "kv-pressure"
    assert not any("num_gpu_blocks_override" in cure.changes for cure in found.findings[0].prescriptions)


def test_a_cap_is_one_that_graphs_are_captured_for() -> None:
    (cap,) = [
        c for c in cures(reported("pool-of-18-to-21.log"), "kv-pressure") if "max_num_seqs" in c.changes
    ]
    assert cap.changes["max_num_seqs"] == 16


def test_data_parallel_ranks_are_held_against_each_other_and_no_router_is_blamed() -> None:
    found = reported("ranks-unequally-loaded.log")
    named = {(f.id, f.labels["engine"]) for f in found.findings if f.suppressed_by is None}
    assert named >= {
        ("kv-pressure", "0"),
        ("kv-pressure", "1"),
        ("replica-imbalance", "0"),
        ("replica-imbalance", "1"),
    }
    (step,) = next(f for f in found.findings if f.id == "replica-imbalance").prescriptions
    assert "no router chose between these ranks" in step.text
    assert "data parallel ranks against each other" not in found.not_judged
