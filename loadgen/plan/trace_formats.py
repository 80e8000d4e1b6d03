"""Readers of recorded traffic: Azure's, Mooncake's and BurstGPT's files, ours, and tables with named columns.

A wrong row is an error that names file, line and column. Times with a unit are asked for, never guessed:
milliseconds read as seconds make a load a thousand times too light.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from loadgen.plan.traces import Trace, TraceError, TraceRow, class_of

SCHEMA = "vtune.trace/1"
SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "n")
"""Settings that a trace may carry into the requests."""
_MAX_TOKENS = 10_000_000
_MOST_BLOCKS = 1_000_000


@dataclass(frozen=True)
class Columns:
    """Which columns of a table (or keys of its JSON lines) mean what, and how its times are written."""

    time: str
    prompt: str
    output: str
    cls: str | None = None
    blocks: str | None = None
    unit: str = "s"
    """s, ms, us, ns, or datetime."""
    block_tokens: int = 0
    skip_empty: bool = False
    """Rows without output are failed requests in this format: leave them out."""

    @classmethod
    def parse(cls, text: str) -> Columns:
        """``time=ts:ms,prompt=in_tokens,output=out_tokens[,class=kind]``. Raises TraceError."""
        pairs = dict(re.findall(r"\s*(\w+)\s*=\s*([^,]+?)\s*(?:,|$)", text))
        unknown = set(pairs) - {"time", "prompt", "output", "class", "blocks", "block_tokens"}
        if unknown or not {"time", "prompt", "output"} <= set(pairs):
            raise TraceError(
                f"--trace-columns {text!r}: write e.g. time=TIMESTAMP:ms,prompt=input,output=generated, and "
                "where there are, class=NAME and blocks=NAME,block_tokens=512"
            )
        name, _, unit = pairs["time"].rpartition(":")
        if not name or unit not in (*SECONDS_PER_UNIT, "datetime"):
            raise TraceError(
                f"--trace-columns: time={pairs['time']} names no unit; write time=NAME:ms, or "
                f"with another of {', '.join(SECONDS_PER_UNIT)}, datetime"
            )
        tokens = pairs.get("block_tokens", "0")
        if not tokens.isdecimal() or ("blocks" in pairs) != (int(tokens) > 0):
            raise TraceError("--trace-columns: blocks=NAME and block_tokens=N go together")
        return cls(
            name, pairs["prompt"], pairs["output"], pairs.get("class"), pairs.get("blocks"), unit, int(tokens)
        )


TRACE_FORMATS = {
    "azure": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", unit="datetime"),
    "mooncake": Columns(
        "timestamp", "input_length", "output_length", blocks="hash_ids", unit="ms", block_tokens=512
    ),
    "burstgpt": Columns("Timestamp", "Request tokens", "Response tokens", cls="Log Type", skip_empty=True),
    "vtune": Columns("at", "prompt_tokens", "output_tokens", cls="class", blocks="blocks", block_tokens=1),
}


def read_trace(path: Path, columns: Columns | None = None) -> Trace:
    """The trace in ``path``: CSV, or JSON lines where its first character is ``{``.

    Without ``columns`` the format is told by the header or the keys. Raises TraceError.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise TraceError(f"cannot read the trace {path}: {reason}") from None
    lines = _json_lines(path, text) if text.lstrip().startswith("{") else _csv_lines(path, text)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: the trace is empty")
    block_tokens = None
    if first.values.get("schema") is not None:
        block_tokens = _own_header(first)
        columns = TRACE_FORMATS["vtune"]
        lines = iter(lines)
    else:
        lines = _chain(first, lines)
    columns = columns or _recognised(path, first.values)
    if block_tokens is not None:
        columns = replace(columns, block_tokens=block_tokens)
    return _trace(path, lines, columns)


@dataclass(frozen=True, slots=True)
class _Line:
    """One row, and where it stands for messages."""

    path: Path
    number: int
    values: Mapping[str, Any]

    def error(self, column: str, problem: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.number}, column {column!r}: {problem}")

    def get(self, column: str) -> Any:
        value = self.values.get(column)
        if value is None or value == "":
            raise self.error(column, "missing" if column not in self.values else "empty")
        return value

    def integer(self, column: str, at_least: int) -> int:
        value = self.get(column)
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int):
            raise self.error(column, f"{_shown(value)} is no whole number")
        if not at_least <= number <= _MAX_TOKENS:
            raise self.error(column, f"{number} is not within {at_least} and {_MAX_TOKENS:,}")
        return number

    def time(self, column: str, unit: str) -> float:
        """Seconds since some beginning."""
        value = self.get(column)
        if unit == "datetime":
            return _timestamp(self, column, value)
        try:
            number = float(value) if isinstance(value, str | int | float) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise self.error(column, f"{_shown(value)} is no number of {unit}")
        return number * SECONDS_PER_UNIT[unit]

    def ids(self, column: str) -> tuple[int, ...]:
        value = self.values.get(column)
        if value is None:
            return ()
        if isinstance(value, str):  # a CSV cell: ids with blanks between
            value = [int(part) if part.isdecimal() else part for part in value.split()]
        if not isinstance(value, list) or len(value) > _MOST_BLOCKS:
            raise self.error(column, f"{_shown(value)} is no list of block ids")
        for part in value:
            if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < 1 << 63:
                raise self.error(column, f"{_shown(part)} is no block id (a whole number, not negative)")
        return tuple(value)


def _trace(path: Path, lines: Iterable[_Line], columns: Columns) -> Trace:
    rows: list[TraceRow] = []
    empty, last, sorted_already = 0, -math.inf, True
    for line in lines:
        if columns.skip_empty and line.integer(columns.output, 0) == 0:
            empty += 1
            continue
        row = _row(line, columns)
        sorted_already &= row.arrival >= last
        last = row.arrival
        rows.append(row)
    if not rows:
        raise TraceError(f"{path}: the trace holds no request")
    if not sorted_already:
        rows.sort(key=lambda row: row.arrival)
    begin = rows[0].arrival
    notes = [f"{empty} failed requests left out"] * bool(empty) + ["put in order of time"] * (
        not sorted_already
    )
    shifted = tuple(replace(row, arrival=row.arrival - begin) for row in rows)
    return Trace(path.name, shifted, columns.block_tokens if columns.blocks else 0, tuple(notes))


def _row(line: _Line, columns: Columns) -> TraceRow:
    prompt = line.integer(columns.prompt, 1)
    kind = line.values.get(columns.cls) if columns.cls else None
    if kind is not None and not isinstance(kind, str | int):
        raise line.error(str(columns.cls), f"{_shown(kind)} is no name")
    return TraceRow(
        arrival=line.time(columns.time, columns.unit),
        prompt_tokens=prompt,
        output_tokens=line.integer(columns.output, 1),
        cls=str(kind) if kind not in (None, "") else class_of(prompt),
        blocks=line.ids(columns.blocks) if columns.blocks else (),
        sampling=_sampling(line),
    )


def _sampling(line: _Line) -> tuple[tuple[str, Any], ...]:
    """The settings under ``sampling``, which only our own format has."""
    given = line.values.get("sampling")
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise line.error("sampling", f"{_shown(given)} is no object")
    for name, value in given.items():
        if name not in SAMPLING:
            raise line.error("sampling", f"{_shown(name)} is unknown; known: {', '.join(SAMPLING)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise line.error("sampling", f"{name} is {_shown(value)}, no number")
    return tuple(sorted(given.items()))


def _timestamp(line: _Line, column: str, value: Any) -> float:
    """ISO date and time with any number of fractional digits (Azure writes seven)."""
    match = re.fullmatch(r"(.+?)(\.\d+)?(Z|[+-]\d\d:?\d\d)?", str(value).strip())
    try:
        whole = datetime.fromisoformat(match[1] + (match[3] or "")) if match else None
    except ValueError:
        whole = None
    if whole is None or match is None:
        raise line.error(column, f"{_shown(value)} is no date and time, e.g. 2023-11-16 18:15:46.6805900")
    seconds = (whole - datetime(2000, 1, 1, tzinfo=whole.tzinfo)).total_seconds()
    return seconds + float(match[2] or 0)


def _recognised(path: Path, values: Mapping[str, Any]) -> Columns:
    for columns in TRACE_FORMATS.values():
        if {columns.time, columns.prompt, columns.output} <= set(values):
            return columns
    raise TraceError(
        f"{path}: no known kind of trace; its columns are {', '.join(map(str, values)) or 'none'}. "
        "Name them: --trace-columns time=NAME:ms,prompt=NAME,output=NAME"
    )


def _own_header(line: _Line) -> int:
    """The block size of a trace that ``vtune bench record`` wrote."""
    if line.values["schema"] != SCHEMA:
        raise line.error("schema", f"{_shown(line.values['schema'])}, but this version reads {SCHEMA}")
    return line.integer("block_tokens", 1)


def _json_lines(path: Path, text: str) -> Iterator[_Line]:
    for number, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            values = json.loads(content)
        except (json.JSONDecodeError, RecursionError) as error:
            at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise TraceError(f"{path}, line {number}{at}: no JSON object ({_shown(content)})") from None
        if not isinstance(values, dict):
            raise TraceError(f"{path}, line {number}: no JSON object ({_shown(content)})")
        yield _Line(path, number, values)


def _csv_lines(path: Path, text: str) -> Iterator[_Line]:
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
            yield _Line(path, reader.line_num, dict(zip(heads, map(str.strip, cells), strict=True)))
    except csv.Error as error:
        raise TraceError(f"{path}, line {reader.line_num}: {error}") from None


def _chain(first: _Line, rest: Iterator[_Line]) -> Iterator[_Line]:
    yield first
    yield from rest


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
