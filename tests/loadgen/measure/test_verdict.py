"""The judgement a run passes on itself, and the window it measures."""

from dataclasses import replace

import numpy as np
import pytest
from recorded_exchange import HEALTHY, record, records

from loadgen.measure.backlog import backlog
from loadgen.measure.record import Failure, Records, RequestRecord
from loadgen.measure.run_validity import judge_run
from loadgen.measure.window import in_flight, measured_window


def steady(count: int = 100, **options: float) -> list[RequestRecord]:
    """Ten requests a second, each of half a second."""
    return [record(k, k / 10, first_s=0.3, gap_s=0.05, **options) for k in range(count)]  # type: ignore[arg-type]


def overloaded(count: int = 100) -> list[RequestRecord]:
    """Ten a second come, seven are served: each waits longer than the one before."""
    return [record(k, k / 10, first_s=0.3 + k * (1 / 7 - 1 / 10)) for k in range(count)]


def test_a_steady_run_is_ok() -> None:
    assert judge_run(records(steady())) == ("ok", ())


def test_a_late_loop_makes_the_client_the_limit() -> None:
    verdict, reasons = judge_run(records(steady(), client=replace(HEALTHY, lag_p99=0.006)))
    assert verdict == "client_limited"
    assert reasons == ("the client's loop was late by 6.0 ms at p99",)


def test_lag_is_judged_against_what_is_measured_at_the_same_percentile() -> None:
    """Half the gaps take 10 ms, one in fifty 500 ms: 10 ms of lag at p99 move nothing, at p50 everything."""
    made = [record(k, k / 10, gap_s=0.5 if k % 50 == 0 else 0.01) for k in range(100)]
    assert judge_run(records(made, client=replace(HEALTHY, lag_p99=0.01)))[0] != "client_limited"
    assert judge_run(records(made, client=replace(HEALTHY, lag_p50=0.01)))[0] == "client_limited"
    assert judge_run(records(made, client=replace(HEALTHY, lag_p95=0.01)))[0] == "client_limited"


def test_late_sending_makes_the_client_the_limit() -> None:
    assert judge_run(records(steady(late_s=0.04)))[0] == "client_limited"
    assert judge_run(records(steady(late_s=0.02)))[0] == "ok"  # of 300 ms TTFT


def test_lateness_behind_a_cap_is_the_cap_and_not_the_client() -> None:
    assert judge_run(records(steady(late_s=0.04), mode="semi-open"))[0] == "ok"


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize(("failing", "verdict"), [(1, "ok"), (2, "server_failing"), (38, "server_failing")])
def test_requests_that_fail_are_the_servers(failing: int, verdict: str, sent: bool) -> None:
    """And not a client that sends late: a failed request was sent when it was sent, if it was."""
    made = steady(159, late_s=0.01)
    for k in range(failing):
        at = made[k].sent if sent else None
        made[k] = replace(made[k], failure=Failure.UNAVAILABLE, chunk_at=(), chunk_tokens=(), sent=at)
    said, reasons = judge_run(records(made, window=(0.0, 15.9)))
    assert said == verdict
    assert (f"{failing} of 159 requests failed" in reasons) == (verdict == "server_failing")


def test_a_closed_loop_in_which_all_fails_is_not_ok() -> None:
    made = [replace(r, failure=Failure.UNAVAILABLE) for r in steady(32)]
    assert judge_run(records(made, mode="closed"))[0] == "server_failing"


def test_a_late_client_is_found_where_requests_fail() -> None:
    made = [replace(r, failure=Failure.UNAVAILABLE) for r in steady(late_s=0.04)]
    assert judge_run(records([*made[:50], *steady(late_s=0.04)[50:]]))[0] == "client_limited"


def test_a_stall_is_located() -> None:
    verdict, reasons = judge_run(records(steady(), client=replace(HEALTHY, stalls=((3.21, 0.3),))))
    assert verdict == "client_limited"
    assert reasons == ("the client stood still for 300 ms at 3.21 s",)


def test_a_stall_in_the_drain_hurts_nothing() -> None:
    assert judge_run(records(steady(), client=replace(HEALTHY, stalls=((11.0, 0.3),))))[0] == "ok"


def test_a_busy_client_is_the_limit() -> None:
    assert judge_run(records(steady(), client=replace(HEALTHY, cpu=9.0)))[0] == "client_limited"
    assert judge_run(records(steady(), client=replace(HEALTHY, cpu=9.0, workers=2)))[0] == "ok"


def test_overload_is_told_from_the_pile() -> None:
    run = records(overloaded())
    verdict, reasons = judge_run(run)
    assert verdict == "server_saturated"
    assert "piled up" in reasons[0]
    assert backlog(run) == pytest.approx(30, abs=3)


def test_a_closed_loop_has_no_backlog() -> None:
    assert backlog(records(overloaded(), mode="closed")) == 0


def rising(served: float) -> Records:
    """From 5 to 15 requests a second within 20 s, each in 3 s, as long as the server keeps up: then it serves
    ``served`` a second.
    """
    at = [20 * ((1 + 8 * k / 200) ** 0.5 - 1) / 2 for k in range(200)]
    free, made = 0.0, []
    for k, arrival in enumerate(at):
        free = max(arrival, free + 1 / served)
        made.append(record(k, arrival, first_s=free - arrival + 0.1, gap_s=0.1, tokens=30))
    return records(made, window=(3.0, 20.0))


def test_traffic_that_rises_is_no_backlog() -> None:
    """Three times as many are in flight at the end, for three times as many come, and none waits."""
    run = rising(served=100)
    level = in_flight(run.requests, np.array(run.window))
    assert level[1] > 2 * level[0]
    assert level[1] - level[0] > 0.1 * len(run.requests)
    assert backlog(run) == 0
    assert judge_run(run)[0] != "server_saturated"


def test_traffic_that_rises_above_what_is_served_is_one() -> None:
    assert backlog(rising(served=7)) > 30


@pytest.mark.parametrize("seed", range(20))
def test_a_stable_queue_is_not_taken_for_a_growing_one(seed: int) -> None:
    """Poisson arrivals at 70 % of one server's capacity: a queue that comes and goes."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(0.1, 200))
    free, made = 0.0, []
    for k, (arrival, work) in enumerate(zip(at, rng.exponential(0.07, 200), strict=True)):
        free = max(free, arrival) + work
        made.append(record(k, float(arrival), first_s=free - arrival, tokens=1))
    run = records(made, window=(0.0, float(at[-1])))
    assert backlog(run) == 0
    assert judge_run(run)[0] != "server_saturated"


def test_unfinished_requests_are_saturation() -> None:
    made = steady()
    made[-1] = replace(made[-1], failure=Failure.UNFINISHED)
    assert judge_run(records(made))[0] == "server_saturated"


def test_drift_of_ttft() -> None:
    made = [record(k, k / 10, first_s=0.1 if k < 50 else 0.2) for k in range(100)]
    verdict, reasons = judge_run(records(made))
    assert verdict == "unsteady"
    assert "TTFT drifted" in reasons[0]


def test_few_samples() -> None:
    verdict, reasons = judge_run(records([record(k, k / 3) for k in range(28)]))
    assert verdict == "too_few_samples"
    assert reasons == ("28 requests were measured; even a p90 needs 29",)


def test_the_worst_verdict_wins_and_all_reasons_stay() -> None:
    verdict, reasons = judge_run(records(overloaded(), client=replace(HEALTHY, lag_p99=0.5)))
    assert verdict == "client_limited"
    assert any("piled up" in reason for reason in reasons)


def test_notes_are_no_verdict() -> None:
    made = steady()
    made[5] = replace(made[5], failure=Failure.RATE_LIMITED)
    made[6] = replace(made[6], completion_tokens=None)
    verdict, reasons = judge_run(records(made, warmup_failures=("x: y",), partial=True))
    assert verdict == "ok"
    assert reasons == (
        "failed: 1 rate limited",
        "the server sent no usage: each chunk counts as one token",
        "1 warm-up requests failed: x: y",
        "the run was interrupted: figures are of what had been measured by then",
    )


def test_an_empty_run_is_judged() -> None:
    assert judge_run(records([]))[0] == "too_few_samples"


def test_requests_in_flight() -> None:
    made = [record(0, 0.0, first_s=1.0, tokens=1), record(1, 0.5, first_s=1.0, tokens=1)]
    assert in_flight(made, np.array([0.0, 0.4, 0.5, 0.99, 1.1, 2.0])).tolist() == [1, 1, 2, 2, 1, 0]


def test_the_window_begins_when_the_server_has_filled_and_ends_before_the_drain() -> None:
    made = [record(k, k / 10, first_s=2.0, tokens=1) for k in range(200)]
    (start, end), is_steady = measured_window(made, "open", 20.0, 19.9, False)
    assert is_steady
    assert start == pytest.approx(1.95, abs=0.15)
    assert end == 20.0


def test_a_server_that_never_fills_costs_a_quarter_at_most() -> None:
    (start, _), _ = measured_window(overloaded(), "open", 10.0, 9.9, False)
    assert start <= 2.5


def test_a_schedule_shorter_than_its_requests_has_no_steady_part() -> None:
    made = [record(k, k / 100, first_s=3.0) for k in range(50)]
    window, is_steady = measured_window(made, "open", 0.5, 0.49, False)
    assert not is_steady
    assert window == (0.0, max(r.end for r in made) / 1e9)


def test_an_interrupted_or_closed_run_ends_with_its_last_request() -> None:
    assert measured_window(steady(), "open", 60.0, 9.9, True)[0][1] == 9.9
    assert measured_window(steady(), "closed", 60.0, 9.9, False)[0][1] == 9.9


def test_no_request_at_all() -> None:
    assert measured_window([], "open", 5.0, 0.0, False) == ((0.0, 5.0), False)
