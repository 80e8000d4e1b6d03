"""The rules' language: three values, ranges that decide or do not, and nothing outside the whitelist."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.expression import ExpressionError, parse_comparison, parse_expression
from servers.reading import Missing, Number, Reading

READINGS: dict[str, Reading] = {
    "two": Number.exactly(2),
    "zero": Number.exactly(0),
    "fast": Number(0.005, 0, 0.01),
    "beyond": Number(80, 80, math.inf),
    "guess": Number(256, 1, math.inf, "flag"),
    "gone": Missing("gone", "metric", "not there"),
    "lost": Missing("lost", "empty", "nothing seen"),
}


def judged(text: str) -> tuple[bool | None, list[str]]:
    truth = parse_comparison(text).judge(READINGS.__getitem__)
    return truth.value, [missing.name for missing in truth.missing]


@pytest.mark.parametrize(
    ("text", "value", "missing"),
    [
        ("two > 1", True, []),
        ("two * 3 - 1 == 5", True, []),
        ("-two < min(two, 1)", True, []),
        ("max(two, 3, 4) / 2 <= 2", True, []),
        ("gone > 1", None, ["gone"]),
        ("gone + lost > two", None, ["gone", "lost"]),
        ("two / zero > 1", None, ["zero"]),
        # A quantile inside the first bucket, [0, 0.01]: decided where the whole range is, else not.
        ("0.2 > 4 * fast", True, []),
        ("0.03 > 4 * fast", None, ["fast"]),
        ("beyond > 50", True, []),
        ("beyond > 100", None, ["beyond"]),
        # A flag that is not stated can be anything from 1 up.
        ("3000 > min(guess, 1000)", True, []),
        ("200 > min(guess, 1000)", None, ["guess"]),
    ],
)
def test_three_values(text: str, value: bool | None, missing: list[str]) -> None:
    assert judged(text) == (value, missing)


def test_an_undecided_flag_is_told_from_an_undecided_quantile() -> None:
    truths = [parse_comparison(text).judge(READINGS.__getitem__) for text in ("guess > 5", "fast > 0.001")]
    assert [missing.kind for truth in truths for missing in truth.missing] == ["flag", "bound"]


@pytest.mark.parametrize(
    "text",
    [
        "a if b else c",
        "a and b > 1",
        "a.b > 1",
        "a[0] > 1",
        "f(a) > 1",
        "min(a) > 1",
        "max(a, b, key=c) > 1",
        "'x' > 1",
        "True > 1",
        "a // 2 > 1",
        "1 < a < 2",
        "a in b",
        "lambda: 1",
        "a > 1; b",
        "",
        "(" * 500 + "a" + ")" * 500 + " > 1",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_comparison(text)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e3), st.floats(-1e6, 1e6), st.floats(0, 1e3))
def test_ranges_hold_every_point_inside_them(a: float, width: float, b: float, other: float) -> None:
    """Interval arithmetic is sound: the result's range holds the result of the ends and of the points."""
    names = {"x": Number(a, a - width, a + width), "y": Number(b, b - other, b + other)}
    for text in ("x + y", "x - y", "x * y", "min(x, y)", "max(x, y)"):
        result = parse_expression(text).value(names.__getitem__)
        assert isinstance(result, Number)
        for x in (a - width, a, a + width):
            exact = parse_expression(text).value({"x": Number.exactly(x), "y": Number.exactly(b)}.__getitem__)
            assert isinstance(exact, Number)
            assert result.low <= exact.point <= result.high
