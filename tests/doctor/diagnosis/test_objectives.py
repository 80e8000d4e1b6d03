"""Every objective is judged by a measured figure, and only who holds them all is healthy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from playbook_cases import BASE
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.objective_judgement import ObjectiveJudgement
from doctor.metrics.sources import Scrapes
from doctor.output.report import as_text


def judged(server: Server, slo: str | None = None) -> tuple[Diagnosis, dict[str, ObjectiveJudgement]]:
    found = diagnose(Scrapes(server.scrapes()), {}, slo)
    return found, {one.bound.metric: one for one in found.objectives}


def slow_first_tokens(seconds: float) -> Server:
    return replace(BASE, histograms={"ttft": {seconds: 10}})


def test_the_defaults_are_judged_and_printed_where_nothing_is_found() -> None:
    found, seen = judged(BASE)
    assert found.healthy
    assert {name: (one.held, one.origin) for name, one in seen.items()} == {
        "itl_p99": (True, "default"),
        "ttft_p95": (True, "default"),
    }
    assert "ITL P99 < 200 ms (default): held, 50 ms" in as_text(found)


@pytest.mark.parametrize(
    ("slo", "held"),
    [
        ("ttft_p50<1s", False),
        ("ttft_p90<1s", False),
        ("ttft_mean<6100ms", True),
        ("ttft_mean<5900ms", False),
        ("tpot_p99<50ms", True),
        ("tpot_mean<20ms", False),
        ("e2e_p95<1s", False),
        ("e2e_p95<10s", True),
        ("itl_p95<10ms", False),
        ("throughput>100", True),
        ("request_rate>1", True),
    ],
)
def test_each_objective_is_judged_by_its_own_figure(slo: str, held: bool) -> None:
    found, (one,) = (result := judged(slow_first_tokens(6.0), slo))[0], result[1].values()
    assert (one.held, one.origin) == (held, slo.replace("6100ms", "6.1s").replace("5900ms", "5.9s"))
    assert found.healthy is held


@pytest.mark.parametrize(
    ("limit", "held"), [("1s", False), ("2.5s", True), ("2.45s", True), ("2.4s", None), ("1.1s", None)]
)
def test_a_limit_inside_the_bucket_of_its_figure_decides_only_on_the_near_side(
    limit: str, held: bool | None
) -> None:
    """All first tokens come after 1.2 s; the bucket is 1 to 2.5 s, and P95 is interpolated to 2.425 s."""
    found, (one,) = (result := judged(slow_first_tokens(1.2), f"ttft_p95<{limit}"))[0], result[1].values()
    assert (one.held, one.bucket) == (held, (1.0, 2.5))
    assert found.healthy is bool(held)
    assert ("its bucket is 1 s to 2.5 s" in as_text(found)) is (limit not in ("1s", "2.5s"))


@pytest.mark.parametrize("slo", ["throughput>1000", "request_rate>9"])
def test_a_rate_is_missed_only_while_requests_wait(slo: str) -> None:
    alone, (one,) = (result := judged(BASE, slo))[0], result[1].values()
    assert (one.held, one.excused, alone.healthy) == (None, True, True)
    assert "no request waited" in as_text(alone)
    queued, (one,) = (result := judged(replace(BASE, waiting=4), slo))[0], result[1].values()
    assert (one.held, queued.healthy) == (False, False)


def test_what_only_a_client_measures_is_said_and_keeps_the_server_from_being_healthy() -> None:
    found, (one,) = (result := judged(BASE, "max_stall_p99<1s"))[0], result[1].values()
    assert (one.held, found.healthy) == (None, False)
    assert "longest gap P99 < 1 s (yours): not judged, only a client can measure it" in as_text(found)


def test_a_decode_window_without_first_tokens_is_no_fault_and_one_without_tokens_is() -> None:
    quiet = {"ttft": {0.1: 0}}
    decoding, seen = judged(replace(BASE, histograms=quiet))
    assert (seen["ttft_p95"].held, seen["ttft_p95"].excused) == (None, True)
    assert decoding.healthy
    stuck, seen = judged(replace(BASE, histograms=quiet, counters={"generation_tokens": 0}))
    assert (seen["ttft_p95"].held, seen["ttft_p95"].excused) == (None, False)
    assert not stuck.healthy


def test_of_a_fleet_the_engine_furthest_from_the_objective_is_shown() -> None:
    pages = [
        replace(
            slow_first_tokens(seconds), labels={"engine": "0", "model_name": "m", "instance": name}
        ).scrapes()
        for name, seconds in (("a:1", 0.1), ("b:1", 4.0), ("c:1", 9.0))
    ]
    merged = [(parts[0][0], "".join(text for _, text in parts)) for parts in zip(*pages, strict=True)]
    text = as_text(diagnose(Scrapes(merged), {}))
    assert "TTFT P95 < 2 s (default): MISSED on 2 of 3 engines (9.88 s on c:1); held on 1 of 3" in text
