"""Results of other tools compared: repeats are runs, loads must match, no verdict where there can be none."""

from dataclasses import replace

import pytest

from loadgen.compare import Incomparable
from loadgen.foreign.comparison import compare_stated
from loadgen.foreign.result import AskedLoad, StatedResult

LOAD = AskedLoad(4.0, None, 200, "sharegpt")


def run(ttft: float, **changes: object) -> StatedResult:
    result = StatedResult(
        "vllm bench serve",
        "a.json",
        {"ttft_p50": ttft, "throughput": 800.0 / ttft, "request_rate": 4.0},
        LOAD,
        completed=200,
        failed=0,
    )
    return replace(result, **changes)  # type: ignore[arg-type]


OLD = [run(value) for value in (0.99, 1.0, 1.01, 1.0)]


@pytest.mark.parametrize(
    ("factor", "verdicts"),
    [
        (1.3, {"ttft_p50": "regress", "throughput": "regress", "failed": "pass"}),
        (0.7, {"ttft_p50": "improve", "throughput": "improve", "failed": "pass"}),
        (1.0, {"ttft_p50": "pass", "throughput": "pass", "failed": "pass"}),
    ],
)
def test_repeats_are_runs_and_need_not_be_as_many(factor: float, verdicts: dict[str, str]) -> None:
    found = compare_stated(OLD, [run(factor * value) for value in (0.99, 1.0, 1.02)], None)
    assert {row.metric: row.verdict for row in found.rows} == verdicts
    assert found.told == "4 and 3 runs, as stated by vllm bench serve"


def test_one_run_of_a_side_shows_nothing() -> None:
    found = compare_stated(OLD, [run(3.0)], None)
    assert found.verdict == "inconclusive"
    assert found.row("ttft_p50").ratio == pytest.approx(3.0, rel=0.01)
    assert any("no spread" in note for note in found.notes)


def test_failures_are_counted_over_all_runs() -> None:
    found = compare_stated(OLD, [run(1.0, completed=180, failed=20)] * 2, None)
    assert (found.row("failed").verdict, found.verdict) == ("regress", "regress")
    assert found.row("failed").note == "of 800 and 400 requests"
    assert any("20 failed requests are in no percentile" in note for note in found.notes)


def test_a_figure_that_is_asked_for_and_not_stated_is_no_pass() -> None:
    found = compare_stated(OLD, OLD, ["ttft_p50", "itl_p99"])
    assert found.row("itl_p99").verdict == "inconclusive"
    assert found.row("itl_p99").note == "not stated by 4 of 4 runs of A and 4 of 4 runs of B"


def test_loads_are_compared_one_by_one_as_far_as_both_sides_have_them() -> None:
    fast = AskedLoad(8.0, None, 200, "sharegpt")
    faster = AskedLoad(16.0, None, 200, "sharegpt")
    a = [*OLD, *(run(value, asked=fast) for value in (2.0, 2.02))]
    b = [*OLD, *(run(value, asked=fast) for value in (4.0, 4.02)), run(9.0, asked=faster)]
    found = compare_stated(a, b, ["ttft_p50"])
    assert [(row.metric, row.verdict) for row in found.rows] == [
        ("ttft_p50{class=sharegpt, 4 req/s, 200 requests}", "pass"),
        ("ttft_p50{class=sharegpt, 8 req/s, 200 requests}", "regress"),
    ]
    assert "1 runs of B have a load that the other side has not" in found.notes


def test_what_one_file_leaves_open_is_no_difference_of_loads() -> None:
    found = compare_stated(OLD, [run(1.0, asked=AskedLoad(4.0))] * 2, None)
    assert found.row("ttft_p50").verdict == "pass"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tool": "AIPerf"}, r"results of one tool \(A: vllm bench serve and B: AIPerf\)"),
        ({"asked": AskedLoad(8.0)}, r"no load is on both sides \(A: .*4 req/s.*, B: 8 req/s\)"),
        ({"prompt_tokens": 900.0}, r"mean prompt tokens are 1,000 on A and 900 on B"),
    ],
)
def test_other_tools_and_other_loads_are_refused(other: dict[str, object], message: str) -> None:
    a = [run(1.0, prompt_tokens=1000.0)]
    with pytest.raises(Incomparable, match=message):
        compare_stated(a, [replace(a[0], **other)], None)  # type: ignore[arg-type]


def test_a_client_that_fell_behind_makes_it_invalid() -> None:
    late = run(1.0, figures={"ttft_p50": 1.0, "lateness_p99": 12.0})
    found = compare_stated(OLD, [late, late], ["ttft_p50"])
    assert found.verdict == "invalid"
    assert "after they were due" in found.notes[0]
