"""Whether a run can be believed: the judgement every run passes on itself."""

from __future__ import annotations

import math

import numpy as np

from loadgen.measure.backlog import backlog
from loadgen.measure.distribution import Distribution, min_samples, rank_test
from loadgen.measure.record import Failure, Records
from loadgen.measure.rounding import significant
from loadgen.measure.stats import Summary
from loadgen.measure.window import in_flight

MAX_LAG = 0.002
"""Seconds by which the client's loop, or a send, may be late …"""
LAG_SHARE = 0.1
"""… or this share of the latency at the same percentile, if that is more. A client on the server's own
machine is late by some ms at p99; where the server's p99 is a second, that moves nothing."""
MAX_STALL = 0.1
"""Seconds for which the client may have stood still once; or the same share of the p99 gap."""
MAX_CPU = 0.8
"""Share of a core for one client process; above it, arrivals queue in the client."""
VERDICT_WORDS = {
    "ok": "Valid",
    "client_limited": "Invalid: the client was the limit",
    "server_saturated": "Server saturated",
    "warm_cache": "Prompts were cached before the run",
    "server_failing": "Server failed requests",
    "unsteady": "Load not steady",
    "too_few_samples": "Too few samples for percentiles",
}
"""Each verdict as a reader sees it."""
MAX_FAILED = 0.01
"""Share of the requests that may fail: of more, P99 is that of a failure."""
_BINS = 120


def judge_run(records: Records) -> tuple[str, tuple[str, ...]]:
    """(verdict, reasons). The first of VERDICT_WORDS that applies, after ok."""
    summary = Summary(records)
    findings = {
        "client_limited": _client_limits(records, summary),
        "server_saturated": _saturation(records, summary),
        "server_failing": _failing(summary),
        "unsteady": _drift(records, summary),
        "too_few_samples": _shortage(summary),
    }
    reasons = tuple(reason for found in findings.values() for reason in found)
    verdict = next((name for name, found in findings.items() if found), "ok")
    return verdict, reasons + _notes(records, summary)


def _client_limits(records: Records, summary: Summary) -> list[str]:
    client, found = records.client, []
    gaps, waits = summary.distribution("inter_chunk"), summary.distribution("ttft")
    sends = summary.distribution("lateness")
    lags = {0.5: client.lag_p50, 0.95: client.lag_p95, 0.99: client.lag_p99}
    for quantile, lag in lags.items():
        if lag > _allowed(gaps, quantile, MAX_LAG):
            found.append(f"the client's loop was late by {lag * 1e3:.1f} ms at p{quantile * 100:g}")
        late = sends.rank(quantile)
        if records.mode == "open" and late > _allowed(waits, quantile, MAX_LAG):
            found.append(f"requests were sent {late * 1e3:.1f} ms late at p{quantile * 100:g}")
    found += [
        f"the client stood still for {length * 1e3:.0f} ms at {at:.2f} s"
        for at, length in client.stalls
        if length >= _allowed(gaps, 0.99, MAX_STALL) and records.window[0] - length <= at <= records.window[1]
    ]
    if client.wall > 0 and client.cpu / client.wall / client.workers > MAX_CPU:
        found.append(f"a client process used {client.cpu / client.wall / client.workers:.0%} of a core")
    return found


def _allowed(latency: Distribution, quantile: float, at_least: float) -> float:
    """By what was served: a failure has no latency."""
    level = latency.finite.rank(quantile)
    return max(at_least, LAG_SHARE * level) if math.isfinite(level) else at_least


def _saturation(records: Records, summary: Summary) -> list[str]:
    found = []
    grown = backlog(records)
    if grown > 0:
        offered, served = (significant(summary.value(name), 3) for name in ("offered_rate", "request_rate"))
        found.append(f"{grown:.0f} requests piled up: {offered} req/s were offered, {served} served")
    left = sum(r.failure is Failure.UNFINISHED for r in records.requests)
    if left:
        found.append(f"{left} requests were unfinished when the time for the drain was over")
    return found


def _failing(summary: Summary) -> list[str]:
    failed, measured = (int(summary.value(name)) for name in ("failed", "measured"))
    return [f"{failed} of {measured} requests failed"] if failed > MAX_FAILED * measured else []


def _drift(records: Records, summary: Summary) -> list[str]:
    if not records.steady:
        return ["the schedule is shorter than two requests take: there is no steady part, all of it counts"]
    found = []
    low, high = records.window
    level = in_flight(records.requests, np.linspace(low, high, _BINS))
    halves = float(level[: _BINS // 2].mean()), float(level[_BINS // 2 :].mean())
    if _differ(*halves) and abs(halves[0] - halves[1]) > 2 * float(np.sqrt(np.mean(level))) + 1:
        found.append(
            f"requests in flight drifted: {halves[0]:.1f} in the first half, {halves[1]:.1f} in the second"
        )
    drift = _ttft_drift(records)
    if drift:
        found.append(drift)
    return found


def _ttft_drift(records: Records) -> str:
    """Medians of the two halves differ by half, and a rank test says that this is no chance (p < 0.001)."""
    middle = sum(records.window) / 2
    halves: tuple[list[float], list[float]] = ([], [])
    for r in records.in_window():
        if r.ok:
            halves[r.intended / 1e9 > middle].append((r.chunk_at[0] - r.intended) / 1e9)
    if min(map(len, halves)) < 10:
        return ""
    first, second = (float(np.median(half)) for half in halves)
    if not _differ(first, second) or rank_test(*halves) >= 0.001:
        return ""
    words = f"median {significant(first, 3)} s in the first half, {significant(second, 3)} s in the second"
    return f"TTFT drifted: {words}"


def _differ(a: float, b: float) -> bool:
    return max(a, b) > 1.5 * min(a, b)


def _shortage(summary: Summary) -> list[str]:
    measured = int(summary.value("measured"))
    needed = min_samples(0.9)
    if measured >= needed:
        return []
    return [f"{measured} requests were measured; even a p90 needs {needed}"]


def _notes(records: Records, summary: Summary) -> tuple[str, ...]:
    """What a reader should know and what is no verdict."""
    notes = []
    failed: dict[str, int] = {}
    for r in records.in_window():
        if r.failure is not None:
            failed[r.failure] = failed.get(r.failure, 0) + 1
    if failed:
        notes.append("failed: " + ", ".join(f"{count} {kind}" for kind, count in failed.items()))
    told = [r for r in records.requests if r.failure is not None]
    if any(r.failure is Failure.WRONG_PATH for r in told):
        notes.append("the server has no such path: one that only chats wants --chat")
    if any("ignore_eos" in r.detail for r in told):
        notes.append(
            "the server refuses ignore_eos: give --natural-stop, and answers end where the model does"
        )
    if any(r.ok and r.completion_tokens is None for r in records.requests):
        notes.append("the server sent no usage: each chunk counts as one token")
    if records.warmup_failures:
        notes.append(f"{len(records.warmup_failures)} warm-up requests failed: {records.warmup_failures[0]}")
    if records.partial:
        notes.append("the run was interrupted: figures are of what had been measured by then")
    return tuple(notes)
