"""JSON bodies and their fields, checked; what is wrong is a RequestError that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
INT64 = 1 << 63
MAX_UNKNOWN = 20
MAX_SHOWN = 40
"""Characters of a refused number that its refusal repeats."""


class RequestError(Exception):
    """A request that is answered with a 4xx. ``param`` is the field at fault, where there is one."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.kind = message, param, status, kind


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``, UTF-8 as the standard has it. Raises RequestError."""
    try:
        # Decoded here, strictly: json.loads would take UTF-16, and halves of surrogate pairs in UTF-8.
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant)
        is_unicode = "\\u" not in text or _is_unicode(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, not {_kind(value)}")
    if not is_unicode:
        raise RequestError("The body holds half of a surrogate pair: it is not valid Unicode")
    return value


class Fields:
    """Typed access to the fields of a JSON object. ``null`` is the same as absent, as in OpenAI's API."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body, self._prefix = body, prefix
        self._seen: set[str] = set()

    def raw(self, name: str) -> Any:
        self._seen.add(name)
        return self._body.get(name)

    def refuse(self, name: str, rule: str) -> RequestError:
        value = self._body.get(name)
        shown = json.dumps(value) if isinstance(value, bool | int | float) else _kind(value)
        if len(shown) > MAX_SHOWN:
            shown = f"{shown[:MAX_SHOWN]}..."
        return RequestError(f"{self._prefix}{name} {rule}, got {shown}", f"{self._prefix}{name}")

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, "must be true or false")
        return default if value is None else value

    def integer(self, name: str, default: T, low: int = -INT64, high: int = INT64 - 1) -> int | T:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, "must be an integer")
        if not low <= value <= high:
            open_ended = value < low and high == INT64 - 1
            limits = f"at least {low}" if open_ended else f"between {low} and {high}"
            raise self.refuse(name, f"must be {limits}")
        return value

    def number(self, name: str, default: float, rule: str, holds: Callable[[float], bool]) -> float:
        """A finite number for which ``holds``; ``rule`` says it in words."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "must be a number")
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if not math.isfinite(number):
            raise self.refuse(name, "must be finite")
        if not holds(number):
            raise self.refuse(name, rule)
        return number

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, "must be a string")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """One string or a list of up to ``most``, none empty."""
        value = self.raw(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
            raise self.refuse(name, "must be a non-empty string or a list of them")
        self._limit(name, values, most)
        return tuple(values)

    def token_ids(self, name: str, most: int | None = None) -> tuple[int, ...]:
        value = self.raw(name)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(map(is_token_id, values)):
            raise self.refuse(name, "must be a list of token ids")
        self._limit(name, values, most)
        return tuple(values)

    def _limit(self, name: str, values: list[Any], most: int | None) -> None:
        if most is not None and len(values) > most:
            name = f"{self._prefix}{name}"
            raise RequestError(f"{name} must have at most {most} items, got {len(values)}", name)

    def nested(self, name: str) -> Fields:
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "must be an object")
        return Fields(value or {}, f"{self._prefix}{name}.")

    def unknown(self) -> list[str]:
        """Names that nobody has asked for, the first :data:`MAX_UNKNOWN` of them."""
        return sorted(islice((name for name in self._body if name not in self._seen), MAX_UNKNOWN))


def is_token_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _refuse_constant(name: str) -> NoReturn:
    """Python's json reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no JSON number")


def _is_unicode(value: object) -> bool:
    """False where a string holds a lone surrogate, which JSON can write and UTF-8 cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    """A JSON value's type in words (the value itself may be megabytes)."""
    names = {dict: "an object", list: "a list", str: "a string", type(None): "nothing"}
    return names.get(type(value), "a number")
