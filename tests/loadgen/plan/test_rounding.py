import math

import pytest

from loadgen.measure.rounding import significant


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (93180.4, "93,180"),
        (1234567.0, "1,235,000"),
        (9999.6, "10,000"),
        (12.0, "12"),
        (37.626, "37.63"),
        (0.0012345, "0.001234"),
        (0.00001, "0.00001"),
        (-4321.9, "-4,322"),
        (0.0, "0"),
        (math.inf, "inf"),
    ],
)
def test_four_digits_and_no_exponent(value: float, shown: str) -> None:
    assert significant(value) == shown


def test_two_digits() -> None:
    assert [significant(value, 2) for value in (123.4, 5.68, 0.333)] == ["120", "5.7", "0.33"]
