"""Objects from outside: what is wrong with a field is told by its name, its rule and its value."""

from __future__ import annotations

from datetime import date
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from engine.fields import FieldError, PositiveInteger, read_fields


class Inner(Struct):
    names: list[Annotated[str, Meta(min_length=1, description="must be a non-empty string")]]


class Outer(Struct, forbid_unknown_fields=True):
    count: PositiveInteger = 1
    inner: Inner | None = None
    flag: bool = False


@pytest.mark.parametrize(
    ("value", "path", "message"),
    [
        ({"count": 0}, "count", "count must be an integer of at least 1, got 0"),
        ({"count": 1 << 63}, "count", "count must be below 2**63, got 9223372036854775808"),
        ({"count": date(2024, 1, 2)}, "count", 'count must be an integer of at least 1, got "2024-01-02"'),
        ({"flag": None}, "flag", "flag must be true or false, got null"),
        ({"inner": {"names": "x"}}, "inner.names", 'inner.names must be a list, got "x"'),
        ({"inner": {"names": ["x", ""]}}, "inner.names[1]", 'must be a non-empty string, got ""'),
        ({"inner": {}}, "inner.names", "inner.names is missing"),
        ({"inner": [1, 2]}, "inner", "inner must be an object, got a list of 2"),
        ({"other": 1}, "", 'unknown key "other"; known are count, inner, flag'),
        ({1: 1}, "", "keys must be strings"),
        ({"flag": "x" * 10_000}, "flag", f'flag must be true or false, got "{"x" * 39}...'),
        (7, "", "must be an object, got 7"),
    ],
)
def test_what_is_wrong_is_named(value: object, path: str, message: str) -> None:
    with pytest.raises(FieldError) as caught:
        read_fields(value, Outer)
    assert caught.value.path == path
    assert message in str(caught.value)


def test_what_is_right_is_read() -> None:
    assert read_fields({"count": 3, "inner": {"names": ["a"]}}, Outer) == Outer(3, Inner(["a"]))
