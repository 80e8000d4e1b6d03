"""Scrapes as text, turned into series: what a /metrics page said, and when.

A recorded series is plain exposition text, each scrape preceded by ``# scrape_unix_ms N``. Damaged input is
the normal case (a file cut off mid-line, a scrape that failed): what can be read is read, what cannot is
named in ``notes``, and a half scrape is dropped whole, since counters that stop at different times would
look like requests that vanished.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servers.errors import UserError
from servers.input_file import GZIP, gunzipped, read_input
from servers.kinds import LABELS
from servers.metrics.page import PageReader, SeriesKey, sample_name
from servers.metrics.range_functions import Times, Values

SEPARATOR = re.compile(r"^# scrape_unix_ms[ \t]+(\S*)[ \t\r]*$", re.MULTILINE)


class ExpositionError(UserError):
    """Input that holds nothing to diagnose. The message says what was wrong and what to do."""


@dataclass(frozen=True)
class Series:
    """One time series: its labels, and its samples in order of time."""

    labels: Mapping[str, str]
    times: Times
    values: Values


@dataclass(frozen=True)
class Recording:
    """The series of several scrapes, by sample name; ``times`` are the scrapes' instants (unix ms)."""

    series: Mapping[str, Sequence[Series]]
    times: Times
    notes: tuple[str, ...]
    since_start: bool = False
    """Of one scrape: counters and histograms are said to have been 0 a moment before, so that growth is what
    they counted since the server's start, and rates mean nothing."""


_MOMENT_MS = 1000
ONE_SCRAPE = (
    "one scrape: counters and histograms are since the server's start, gauges of that moment; rates are not "
    "known, and a trouble of the last minutes may not show. Two scrapes a minute apart say more"
)


def read_series_text(path: Path) -> tuple[str, list[str]]:
    """The text of a ``.prom`` or ``.prom.gz`` file (told by its first bytes). Raises ExpositionError."""
    try:
        raw = read_input(path)
        raw, complaint = gunzipped(raw) if raw[:2] == GZIP else (raw, "")
    except OSError as error:
        raise ExpositionError(f"{path}: cannot be read ({error.strerror or error})") from None
    if complaint and not raw:
        raise ExpositionError(f"{path}: damaged gzip data ({complaint}); nothing could be read")
    if not raw.strip():
        raise ExpositionError(f"{path}: the file is empty")
    notes = [f"{path.name}: damaged gzip data ({complaint}); read up to there"] if complaint else []
    if b"\x00" in raw[:4096]:
        raise ExpositionError(f"{path}: binary data, neither exposition text nor gzip")
    return raw.decode("utf-8", errors="replace"), notes


def split_scrapes(text: str) -> list[tuple[int, str]]:
    """(unix ms, exposition text) of every scrape in a recorded series; of a page without such a line, the one
    that it is, at no known time. Raises ExpositionError."""
    marks = list(SEPARATOR.finditer(text)) if "# scrape_unix_ms" in text else []
    if not marks:
        return [(_MOMENT_MS, text)]
    scrapes = []
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        if mark[1].isdecimal() and len(mark[1]) < 18:
            scrapes.append((int(mark[1]), text[mark.end() : following.start() if following else None]))
    if not scrapes:
        raise ExpositionError(f"'# scrape_unix_ms {marks[0][1]}' is not a time in milliseconds")
    return scrapes


def record(scrapes: Iterable[tuple[int, str]], notes: Iterable[str] = ()) -> Recording:
    """Parse scrapes into series. Raises ExpositionError when none of them is of use, or one of several."""
    said = list(notes)
    parsed: dict[int, dict[SeriesKey, float]] = {}
    bad_lines = seen = 0
    names: set[str] = set()
    reader = PageReader()
    for unix_ms, text in scrapes:
        seen += 1
        page = reader.read(text)
        bad_lines += page.unreadable
        if page.samples:
            parsed[unix_ms] = dict(page.samples)
        elif not names:
            names.update(filter(None, map(sample_name, text.split("\n"))))
    if not parsed:
        example = f" (it has names such as {', '.join(sorted(names)[:3])})" if names else ""
        raise ExpositionError(f"no {LABELS} metric in {seen} scrape(s){example}")
    if bad_lines:
        said.append(f"{bad_lines} line(s) could not be read and were left out")
    if seen > len(parsed):
        said.append(f"{seen - len(parsed)} of {seen} scrapes held no server metric or repeated a time")
    _drop_incomplete(parsed, said)
    if seen == 1:
        return _since_start(*parsed.popitem(), said)
    if len(parsed) < 2:
        raise ExpositionError("only one usable scrape: rates need two or more")
    return Recording(_columns(parsed), np.array(sorted(parsed), dtype=np.int64), tuple(said))


def _since_start(at: int, samples: Mapping[SeriesKey, float], notes: Sequence[str]) -> Recording:
    series: dict[str, list[Series]] = {}
    for (name, labels), value in samples.items():
        grown = name.endswith(("_total", "_sum", "_count", "_bucket"))
        moments, values = ([at - _MOMENT_MS, at], [0.0, value]) if grown else ([at], [value])
        column = Series(dict(labels), np.array(moments, dtype=np.int64), np.array(values))
        series.setdefault(name, []).append(column)
    times = np.array([at - _MOMENT_MS, at], dtype=np.int64)
    return Recording(series, times, (*notes, ONE_SCRAPE), since_start=True)


Pages = dict[int, set[SeriesKey]]
"""Which series one instance had, by the time of the scrape."""


def _drop_incomplete(parsed: dict[int, dict[SeriesKey, float]], notes: list[str]) -> None:
    """Remove what an instance said in scrapes that lack series which it has in the scrapes on either side.

    Where most of its scrapes do, they are kept, and the metrics with holes are removed: counters that end at
    different times would contradict each other.
    """
    left_out: set[int] = set()
    for instance, pages in _pages(parsed).items():
        times = sorted(pages)
        lacking = {at: missing for at in times if (missing := _expected(pages, times, at) - pages[at])}
        if len(lacking) <= len(times) // 2:
            left_out |= lacking.keys()
            gone = {at: pages[at] for at in lacking}
        else:
            holes = {_metric_of(key[0]) for missing in lacking.values() for key in missing}
            gone = {at: {key for key in pages[at] if _metric_of(key[0]) in holes} for at in times}
            where = f" of {instance}" if instance else ""
            notes.append(
                f"{len(lacking)} of {len(times)} scrapes{where} lack series that others have; "
                f"{len(holes)} metric(s) with holes left out"
            )
        for at, keys in gone.items():
            for key in keys:
                del parsed[at][key]
    for at in [at for at, samples in parsed.items() if not samples]:
        del parsed[at]
    if left_out:
        notes.append(f"{len(left_out)} incomplete scrape(s) left out")


def _pages(parsed: Mapping[int, Mapping[SeriesKey, float]]) -> dict[str, Pages]:
    """By instance."""
    instances: dict[SeriesKey, str] = {}
    found: dict[str, Pages] = {}
    for at, samples in parsed.items():
        for key in samples:
            if (instance := instances.get(key)) is None:
                instance = instances[key] = next((v for name, v in key[1] if name == "instance"), "")
            found.setdefault(instance, {}).setdefault(at, set()).add(key)
    return found


def _expected(pages: Pages, times: Sequence[int], time: int) -> set[SeriesKey]:
    """What the scrapes on either side of one have in common."""
    index = bisect_left(times, time)
    beside = times[1:3] if index == 0 else [times[index - 1], *times[index + 1 : index + 2]]
    return set.intersection(*(pages[other] for other in beside)) if beside else set()


def _metric_of(sample: str) -> str:
    """The metric of a sample name: a histogram's buckets, sum and count stand or fall together."""
    return re.sub(r"_(?:bucket|sum|count)$", "", sample)


def _columns(parsed: Mapping[int, Mapping[SeriesKey, float]]) -> dict[str, list[Series]]:
    columns: dict[SeriesKey, tuple[list[int], list[float]]] = {}
    for time in sorted(parsed):
        for key, value in parsed[time].items():
            times, values = columns.setdefault(key, ([], []))
            times.append(time)
            values.append(value)
    series: dict[str, list[Series]] = {}
    for (name, labels), (times, values) in columns.items():
        column = Series(dict(labels), np.array(times, dtype=np.int64), np.array(values))
        series.setdefault(name, []).append(column)
    return series
