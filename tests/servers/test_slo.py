import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.slo.bounds import LATENCIES, STATISTICS, UNITS, Bound, SloError, format_value
from servers.slo.objective import PRESETS, Objective, parse_slo


def test_the_example_of_the_documentation() -> None:
    slo = parse_slo("itl_p99<50ms, ttft_p95{class=short} < 0.3s,throughput>100")
    assert slo.objective == Objective("goodput", "maximize")
    assert [(b.metric, b.cls, b.op, pytest.approx(b.limit)) for b in slo.bounds] == [
        ("itl_p99", None, "<=", 0.05),
        ("ttft_p95", "short", "<=", 0.3),
        ("throughput", None, ">=", 100),
        ("failed", None, "<=", 0),
    ]
    assert slo.per_request == (("itl", None, pytest.approx(0.05)), ("ttft", "short", pytest.approx(0.3)))


@pytest.mark.parametrize(
    ("text", "position", "fragment"),
    [
        ("", 0, "expected a metric"),
        ("itl_p99<50", 10, "needs a unit"),
        ("itl_p99<50min", 10, "unknown unit 'min'"),
        ("itl_p99>50ms", 7, "bounded from above"),
        ("throughput<100", 10, "bounded from below"),
        ("throughput>100ms", 14, "takes no unit"),
        ("itl_p99<50ms,,x", 13, "expected a metric"),
        ("itl_p99<50ms ttft_p95<1s", 13, "expected a comma"),
        ("itl_p99<50ms,itl_p99<60ms", 13, "bounded twice"),
        ("itl<50ms", 0, "itl of what statistic"),
        ("foo_p99<50ms", 0, "unknown metric 'foo_p99'"),
        ("ttft_p97<50ms", 0, "unknown metric"),
        ("itl_p99<50ms,ttft", 13, "of what statistic"),
        ("itl_p99<50ms,throughput", 23, "expected < or >"),
        ("ttft_p95{short}<1s", 9, "only class=NAME"),
        ("ttft_p95{class=}<1s", 15, "has no name"),
        ("ttft_p95{class=short<1s", 20, "not closed"),
        ("itl_p99<0ms", 8, "never be met"),
        ("itl_p99<-5ms", 8, "expected a positive number"),
        ("itl_p99=50ms", 7, "expected < or >"),
    ],
)
def test_errors_name_the_position(text: str, position: int, fragment: str) -> None:
    with pytest.raises(SloError, match=fragment) as caught:
        parse_slo(text)
    assert caught.value.position == position
    assert f"at character {position + 1}" in str(caught.value)
    caret = str(caught.value).splitlines()[2]
    assert caret.index("^") == position + 2, "the caret stands under the character"


@given(
    family=st.sampled_from(LATENCIES),
    statistic=st.sampled_from(STATISTICS),
    cls=st.none() | st.from_regex(r"[a-z0-9_.-]{1,8}", fullmatch=True),
    number=st.floats(0.001, 1e6),
    unit=st.sampled_from(sorted(UNITS)),
    blank=st.sampled_from(["", " ", "  "]),
)
def test_every_written_bound_is_read_back(
    family: str, statistic: str, cls: str | None, number: float, unit: str, blank: str
) -> None:
    braces = "" if cls is None else f"{{{blank}class={cls}{blank}}}"
    slo = parse_slo(f"{blank}{family}_{statistic}{braces}{blank}<{blank}{number:.6f}{blank}{unit}{blank}")
    bound = slo.bounds[0]
    assert (bound.metric, bound.cls) == (f"{family}_{statistic}", cls)
    assert bound.limit == pytest.approx(float(f"{number:.6f}") * UNITS[unit])


@given(st.text(max_size=30))
def test_no_text_does_anything_but_parse_or_raise_an_slo_error(text: str) -> None:
    position = 0
    try:
        parse_slo(text)
    except SloError as error:
        position = error.position
    assert 0 <= position <= len(text)


def test_itl_preset_is_relative_to_the_baseline() -> None:
    measured = {"throughput": 100.0, "ttft_es95": 2.0}
    bounds = PRESETS["itl"].resolve(lambda metric, cls: measured[metric])
    assert {b.metric: (b.op, pytest.approx(b.limit)) for b in bounds} == {
        "failed": ("<=", 0),
        "throughput": (">=", 90.0),
        "ttft_es95": ("<=", 2.4),
    }
    assert PRESETS["itl"].objective == Objective("itl_es99", "minimize")
    assert not PRESETS["itl"].saturated


def test_ttft_preset_is_the_mirror_image() -> None:
    assert PRESETS["ttft"].objective == Objective("ttft_es95", "minimize")
    bounds = PRESETS["ttft"].resolve(lambda metric, cls: 1.0)
    assert {b.metric for b in bounds} == {"failed", "throughput", "itl_es99"}


def test_throughput_preset_saturates() -> None:
    slo = PRESETS["throughput"]
    assert slo.saturated
    assert slo.objective == Objective("throughput", "maximize")
    assert [b.metric for b in slo.bounds] == ["failed"]


def test_bounds_relative_to_a_baseline_that_could_not_be_measured_are_dropped() -> None:
    assert {b.metric for b in PRESETS["itl"].resolve(lambda metric, cls: math.nan)} == {"failed"}


@given(st.floats(0.001, 1e3), st.floats(0.0001, 1e4), st.sampled_from(["<=", ">="]))
def test_violation_has_the_sign_of_the_comparison_and_stays_below_one(
    limit: float, value: float, op: Literal["<=", ">="]
) -> None:
    violation = Bound("itl_p99", op, limit).violation(value)
    holds = value <= limit if op == "<=" else value >= limit
    assert (violation <= 0) == holds
    assert violation < 1


def test_violation_of_a_zero_bound_counts_and_of_a_missing_value_is_certain() -> None:
    assert Bound("failed", "<=", 0).violation(0) == 0
    assert Bound("failed", "<=", 0).violation(3) == 3
    assert Bound("itl_p99", "<=", 0.05).violation(math.nan) == 1


def test_a_missing_value_is_never_better() -> None:
    objective = Objective("itl_p99", "minimize")
    assert objective.better(1.0, math.nan)
    assert not objective.better(math.nan, 1.0)
    assert not objective.better(math.nan, math.nan)
    assert Objective("throughput", "maximize").better(2.0, 1.0)


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("itl_p99", 0.1384, "138 ms"),
        ("ttft_p95", 1.254, "1.25 s"),
        ("throughput", 201.37, "201.4 tok/s"),
        ("goodput", 2.104, "2.1 req/s"),
        ("failed", 2, "2"),
        ("itl_p99", math.nan, "n/a"),
    ],
)
def test_format_value(metric: str, value: float, text: str) -> None:
    assert format_value(metric, value) == text


def test_goodput_is_compared_by_the_latency_that_is_bounded() -> None:
    assert parse_slo("ttft_p95{class=short}<300ms,itl_p99<50ms").compared.name == "ttft_p95{class=short}"
    assert parse_slo("throughput>10").compared.name == "goodput"
    assert parse_slo("itl").compared.name == "itl_es99"
    assert parse_slo("throughput").compared.name == "throughput"


def test_stall_preset_minimises_the_longest_gap() -> None:
    slo = PRESETS["stall"]
    assert slo.objective == Objective("max_stall_mean", "minimize")
    bounds = slo.resolve(lambda metric, cls: 1.0)
    assert {b.metric for b in bounds} == {"failed", "throughput", "ttft_es95"}
