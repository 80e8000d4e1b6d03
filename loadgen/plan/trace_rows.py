"""The rows of a recorded trace as its file has them: CSV, JSON lines or a JSON list. A wrong one is named."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from loadgen.plan.traces import TraceError

_MAX_TOKENS = 10_000_000
_MOST_BLOCKS = 1_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """One row, and where it stands for messages."""

    path: Path
    place: str
    """``line 3`` or ``item 3``."""
    values: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, those within objects as ``usage.prompt_tokens``."""
        return tuple(_names(self.values))

    def error(self, column: str, problem: str) -> TraceError:
        """An error that says where it is."""
        return TraceError(f"{self.path}, {self.place}, column {column!r}: {problem}")

    def find(self, column: str) -> Any:
        """Its value, None where there is none; ``usage.prompt_tokens`` looks into an object."""
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for key in column.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def get(self, column: str) -> Any:
        """Its value. Raises TraceError where there is none."""
        value = self.find(column)
        if value is None or value == "":
            raise self.error(column, "missing" if column not in self.values else "empty")
        return value

    def integer(self, column: str, at_least: int) -> int:
        """A number of tokens. Raises TraceError."""
        value = self.get(column)
        number = value
        if isinstance(value, str):
            try:
                number = int(value) if value.strip().isdecimal() else float(value)
            except ValueError:
                number = None
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int):
            raise self.error(column, f"{shown(value)} is no whole number")
        if not at_least <= number <= _MAX_TOKENS:
            raise self.error(column, f"{number} is not within {at_least} and {_MAX_TOKENS:,}")
        return number

    def number(self, column: str, unit: str) -> float:
        """A time in ``unit``, which messages name. Raises TraceError."""
        value = self.get(column)
        try:
            number = float(value) if isinstance(value, str | int | float) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise self.error(column, f"{shown(value)} is no number of {unit}")
        return number

    def date(self, column: str) -> datetime:
        """An ISO date and time with any number of fractional digits (Azure writes seven). Raises
        TraceError."""
        value = self.get(column)
        for text in (value, _tidied(value)) if isinstance(value, str) else ():
            try:
                return datetime.fromisoformat(text)
            except ValueError:
                continue
        raise self.error(column, f"{shown(value)} is no date and time, e.g. 2023-11-16 18:15:46.6805900")

    def ids(self, column: str) -> tuple[int, ...]:
        """The block ids; none where the column is empty. Raises TraceError."""
        value = self.find(column)
        if value is None:
            return ()
        if isinstance(value, str):  # a CSV cell: ids with blanks between
            value = [int(part) if part.isdecimal() else part for part in value.split()]
        if not isinstance(value, list) or len(value) > _MOST_BLOCKS:
            raise self.error(column, f"{shown(value)} is no list of block ids")
        for part in value:
            if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < 1 << 63:
                raise self.error(column, f"{shown(part)} is no block id (a whole number, not negative)")
        return tuple(value)


def rows_of(path: Path, text: str) -> Iterator[Line]:
    """JSON lines, a JSON list, or CSV, as the first character of ``text`` says. Raises TraceError."""
    return {"{": _json_lines, "[": _json_list}.get(text.lstrip()[:1], _csv_lines)(path, text)


def _json_lines(path: Path, text: str) -> Iterator[Line]:
    for number, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            values = json.loads(content)
        except (json.JSONDecodeError, RecursionError) as error:
            at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise TraceError(f"{path}, line {number}{at}: no JSON object ({shown(content)})") from None
        if not isinstance(values, dict):
            raise TraceError(f"{path}, line {number}: no JSON object ({shown(content)})")
        yield Line(path, f"line {number}", values)


def _json_list(path: Path, text: str) -> Iterator[Line]:
    try:
        items = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: no JSON ({error})") from None
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise TraceError(f"{path}, item {number}: no JSON object ({shown(item)})")
        yield Line(path, f"item {number}", item)


def _csv_lines(path: Path, text: str) -> Iterator[Line]:
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        heads = [head.strip() for head in next(reader, [])]
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(heads):
                raise TraceError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells under {len(heads)} columns"
                )
            yield Line(path, f"line {reader.line_num}", dict(zip(heads, map(str.strip, cells), strict=True)))
    except csv.Error as error:
        raise TraceError(f"{path}, line {reader.line_num}: {error}") from None


def _tidied(date: str) -> str:
    """``UTC`` and an offset after a blank, as ISO has them."""
    return re.sub(r"\s+(?=[+-][\d:]+$)", "", re.sub(r"\s*(?:UTC|GMT)$", "Z", date.strip()))


def shown(value: Any) -> str:
    """A value for a message, cut."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _names(values: Mapping[str, Any], under: str = "") -> list[str]:
    names = []
    for name, value in values.items():
        names += _names(value, f"{under}{name}.") if isinstance(value, dict) else [f"{under}{name}"]
    return names
