"""Readers of recorded traffic: Azure's, Mooncake's, Bailian's and BurstGPT's files, ours, and named columns.

A wrong row is an error that names file, line and column. A unit of time is asked for, never guessed:
milliseconds read as seconds make a load a thousand times too light. So a format counts as known by all its
columns together, and only while the times and blocks that it would mean are plausible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC
from itertools import chain
from pathlib import Path
from typing import Any

from loadgen.plan.trace_rows import Line, rows_of, shown
from loadgen.plan.traces import Trace, TraceError, TraceRow, class_of

SCHEMA = "vtune.trace/1"
SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "n")
"""Settings that a trace may carry into the requests."""


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

    @property
    def needed(self) -> frozenset[str]:
        """The columns that every row has; a class is as may be."""
        return frozenset(filter(None, (self.time, self.prompt, self.output, self.blocks)))

    @property
    def option(self) -> str:
        """What ``parse`` would read, its unit and block size open."""
        blocks = f",blocks={self.blocks},block_tokens=N" if self.blocks else ""
        return f"--trace-columns time={self.time}:UNIT,prompt={self.prompt},output={self.output}{blocks}"

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


@dataclass(frozen=True)
class TraceFormat:
    """A published kind of trace. It counts as known when it has all its columns and no other than ``more``;
    where dates prove the times, further columns do no harm."""

    name: str
    columns: Columns
    further: frozenset[str]
    """Columns that it always has beside those that are read."""
    more: frozenset[str] = frozenset()
    """Columns that some files of it have."""

    def fits(self, names: Iterable[str]) -> bool:
        """Whether a table of these columns is of this kind."""
        has, needed = set(names), self.columns.needed | self.further
        return needed <= has and (self.columns.unit == "datetime" or has <= needed | self.more)


_MOONCAKE = ("timestamp", "input_length", "output_length")
TRACE_FORMATS = (
    # https://github.com/Azure/AzurePublicDataset, LLM inference 2023 and 2024
    TraceFormat(
        "Azure's", Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", unit="datetime"), frozenset()
    ),
    # https://github.com/kvcache-ai/Mooncake, FAST25-release
    TraceFormat(
        "Mooncake's", Columns(*_MOONCAKE, blocks="hash_ids", unit="ms", block_tokens=512), frozenset()
    ),
    # https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon: Mooncake's names, but seconds
    TraceFormat(
        "Bailian's",
        Columns(*_MOONCAKE, blocks="hash_ids", unit="s", block_tokens=16),
        frozenset({"chat_id", "parent_chat_id"}),
        frozenset({"type", "turn"}),
    ),
    # https://github.com/HPMLL/BurstGPT, 1.1 and 1.2
    TraceFormat(
        "BurstGPT's",
        Columns("Timestamp", "Request tokens", "Response tokens", cls="Log Type"),
        frozenset(),
        frozenset({"Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"}),
    ),
)
_OWN = Columns("at", "prompt_tokens", "output_tokens", cls="class", blocks="blocks")
_PLAUSIBLE_RATES = (1 / 3600, 100.0)
"""Requests per second, a trace's mean. The published ones lie between 0.27 (BurstGPT) and 45 (Azure 2024)."""
_EPOCH_SECONDS = (1e9, 4.1e9)
"""2001 to 2099, since 1970."""


def read_trace(path: Path, columns: Columns | None = None) -> Trace:
    """The trace in ``path``: CSV, or JSON (lines or a list) where its first character says so.

    Without ``columns`` the format is told by the header or the keys, and by what its rows would mean. Raises
    TraceError.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise TraceError(f"cannot read the trace {path}: {reason}") from None
    rows = rows_of(path, text)
    first = next(rows, None)
    if first is None:
        raise TraceError(f"{path}: the trace is empty")
    if first.values.get("schema") is not None:
        return _trace(path, rows, replace(_OWN, block_tokens=_own_header(first)))
    rows = chain((first,), rows)
    if columns is not None:
        return _trace(path, rows, columns)
    kind = _recognised(path, first)
    trace = _trace(path, rows, kind.columns)
    doubt = _doubt(trace, kind.columns, first)
    if doubt:
        raise TraceError(
            f"{path}: it has the columns of {kind.name} traces, but {doubt}. Say what they are: "
            f"{kind.columns.option} with UNIT one of {', '.join(SECONDS_PER_UNIT)}"
        )
    return trace


class _Clock:
    """Makes seconds since some beginning of the times of one file."""

    def __init__(self, columns: Columns) -> None:
        self._column, self._unit = columns.time, columns.unit
        self._zoned: bool | None = None

    def __call__(self, line: Line) -> float:
        if self._unit != "datetime":
            return line.number(self._column, self._unit) * SECONDS_PER_UNIT[self._unit]
        date = line.date(self._column)
        zoned = date.tzinfo is not None
        if self._zoned not in (None, zoned):
            has, rows = ("has", "had none") if zoned else ("has no", "had one")
            raise line.error(self._column, f"this time {has} UTC offset, but the rows before {rows}")
        self._zoned = zoned
        return (date if zoned else date.replace(tzinfo=UTC)).timestamp()


def _trace(path: Path, lines: Iterable[Line], columns: Columns) -> Trace:
    rows: list[TraceRow] = []
    empty, last, sorted_already, clock = 0, -math.inf, True, _Clock(columns)
    for line in lines:
        row = _row(line, columns, clock)
        if row is None:
            empty += 1
            continue
        sorted_already &= row.arrival >= last
        last = row.arrival
        rows.append(row)
    notes = [f"{empty} row{'s' * (empty != 1)} of 0 tokens left out"] * bool(empty)
    if not rows:
        raise TraceError(f"{path}: the trace holds no request{''.join(f' ({note})' for note in notes)}")
    if not sorted_already:
        rows.sort(key=lambda row: row.arrival)
        notes.append("put in order of time")
    begin = rows[0].arrival
    shifted = tuple(replace(row, arrival=row.arrival - begin) for row in rows)
    return Trace(path.name, shifted, columns.block_tokens if columns.blocks else 0, tuple(notes))


def _row(line: Line, columns: Columns, clock: _Clock) -> TraceRow | None:
    """None for a row of 0 tokens: a request that failed or was cancelled, which no server can be sent."""
    prompt, output = line.integer(columns.prompt, 0), line.integer(columns.output, 0)
    if not (prompt and output):
        return None
    kind = line.find(columns.cls) if columns.cls else None
    if kind is not None and not isinstance(kind, str | int):
        raise line.error(str(columns.cls), f"{shown(kind)} is no name")
    return TraceRow(
        arrival=clock(line),
        prompt_tokens=prompt,
        output_tokens=output,
        cls=str(kind) if kind not in (None, "") else class_of(prompt),
        blocks=line.ids(columns.blocks) if columns.blocks else (),
        sampling=_sampling(line),
    )


def _sampling(line: Line) -> tuple[tuple[str, Any], ...]:
    """The settings under ``sampling``, which only our own format has."""
    given = line.values.get("sampling")
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise line.error("sampling", f"{shown(given)} is no object")
    for name, value in given.items():
        if name not in SAMPLING:
            raise line.error("sampling", f"{shown(name)} is unknown; known: {', '.join(SAMPLING)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise line.error("sampling", f"{name} is {shown(value)}, no number")
    return tuple(sorted(given.items()))


def _recognised(path: Path, first: Line) -> TraceFormat:
    known = next((kind for kind in TRACE_FORMATS if kind.fits(first.values)), None)
    if known is not None:
        return known
    names = first.names
    if names and all(re.fullmatch(r"[-+.\d]+", name) for name in names):
        raise TraceError(f"{path}: its first line holds numbers; give it a line with the columns' names")
    for kind in TRACE_FORMATS:
        columns = kind.columns
        if {columns.time, columns.prompt, columns.output} <= set(names):
            option = (columns if columns.blocks in names else replace(columns, blocks=None)).option
            units = ", ".join((*SECONDS_PER_UNIT, "datetime"))
            raise TraceError(
                f"{path}: its columns are {', '.join(names)}; {columns.time!r} has different units in "
                f"different traces, so say which: {option} with UNIT one of {units}"
            )
    raise TraceError(
        f"{path}: no known kind of trace; its columns are {', '.join(names) or 'none'}. "
        "Name them: --trace-columns time=NAME:ms,prompt=NAME,output=NAME"
    )


def _doubt(trace: Trace, columns: Columns, first: Line) -> str | None:
    """Why the format that the columns suggest is not what the rows hold, else None."""
    return _doubtful_times(trace, columns, first) or _doubtful_blocks(trace)


def _doubtful_times(trace: Trace, columns: Columns, first: Line) -> str | None:
    if columns.unit == "datetime":
        return None
    start = first.number(columns.time, columns.unit)
    for unit, seconds in SECONDS_PER_UNIT.items():
        if unit != columns.unit and _EPOCH_SECONDS[0] <= start * seconds <= _EPOCH_SECONDS[1]:
            return f"{start:.0f} in {columns.time!r} looks like {unit} since 1970, not {columns.unit}"
    if columns.unit == "ms" and any(round(row.arrival * 1000, 3) % 1 for row in trace.rows):
        return f"fractions of ms in {columns.time!r} look like another unit"
    if not math.isnan(trace.rate) and not _PLAUSIBLE_RATES[0] <= trace.rate <= _PLAUSIBLE_RATES[1]:
        return f"{trace.rate:.3g} req/s, with {columns.time!r} in {columns.unit}, is not plausible"
    return None


def _doubtful_blocks(trace: Trace) -> str | None:
    size = trace.block_tokens
    for row in trace.rows:
        fewest, most = (row.prompt_tokens // size, -(-row.prompt_tokens // size)) if size else (0, 0)
        if row.blocks and not fewest <= len(row.blocks) <= most:
            return f"{len(row.blocks)} blocks of {size} tokens do not fit a prompt of {row.prompt_tokens:,}"
    return None


def _own_header(line: Line) -> int:
    """The block size of a trace that ``vtune bench record`` wrote."""
    if line.values["schema"] != SCHEMA:
        raise line.error("schema", f"{shown(line.values['schema'])}, but this version reads {SCHEMA}")
    return line.integer("block_tokens", 1)
