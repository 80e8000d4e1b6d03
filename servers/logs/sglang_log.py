"""SGLang's log: its arguments, what it made of them, a line for every prefill batch and one for every 40th
decode step, and a warning for every time that it takes requests back.

The lines of 2024 begin with a time of day and those since with a date; between them fields came and went, so
that each is read by its name.
"""

from __future__ import annotations

import calendar
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from servers.logs.log_facts import LogFacts, page, pairs

_STAMP = (
    r"\[(?:(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[ T])?(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"
    r"(?:[.,]\d+)?(?P<ranks>(?: [A-Z]+\d+)*)\]"
)
_BATCH = re.compile(_STAMP + r".*?\b(?P<kind>Prefill|Decode) batch(?: \[\d+\])?[.,] (?P<fields>.*)")
_RETRACTED = re.compile(_STAMP + r".*#retracted_reqs: (?P<requests>\d+)")
_ARGUMENTS = re.compile(_STAMP + r".*server_args=ServerArgs\((?P<arguments>.*)")
_RESOLVED = re.compile(r"\bmax_total_num_tokens=\d+.*")
_WEIGHTS = re.compile(r"Load weight end\. elapsed=([\d.]+) s")
_READY = re.compile(_STAMP + r".*The server is fired up and ready to roll")
_RANK = re.compile(r"\bDP(\d+)\b")
_OURS = re.compile(
    r"(?:Prefill|Decode) batch(?: \[\d+\])?[.,] #|server_args=ServerArgs\(|max_total_num_tokens=\d"
    r"|#retracted_reqs: \d"
)
_USAGES = ("token usage", "full token usage", "swa token usage", "mamba usage")
"""Of its pools; the fullest binds."""
_RESULT = {
    "max_total_num_tokens": "max_total_tokens",
    "chunked_prefill_size": "chunked_prefill_size",
    "max_running_requests": "max_running_requests",
    "context_len": "context_length",
}
"""What it made of its arguments, and whose value that is."""
_DAY_MS = 86_400_000
_IDLE_MS = 10_000
"""A server with nothing to do writes nothing. A batch that finds no request running ends such a silence."""
_MOST_PAGES = 2000


def wrote(text: str) -> bool:
    """Whether a line of this log is one of SGLang's."""
    return _OURS.search(text) is not None


def parse_log(text: str) -> LogFacts:
    """Take the facts out of a log's text; of a restarted server the last start counts."""
    arguments: dict[str, Any] = {}
    began: int | None = None
    durations: dict[str, float] = {}
    clock, batches = _Clock(), _Batches()
    for line in text.splitlines():
        if match := _BATCH.search(line):
            batches.add(clock.ms(match), match)
        elif match := _RETRACTED.search(line):
            batches.retract(clock.ms(match), match["ranks"], int(match["requests"]))
        elif match := _ARGUMENTS.search(line):
            arguments, began, durations = pairs(match["arguments"]), clock.ms(match), {}
        elif match := _RESOLVED.search(line):
            said = pairs(match[0])
            arguments |= {name: said[theirs] for theirs, name in _RESULT.items() if theirs in said}
        elif match := _WEIGHTS.search(line):
            durations["load_seconds"] = float(match[1])
        elif began is not None and (match := _READY.search(line)):
            whole = (clock.ms(match) - began) / 1000
            durations["startup_seconds"] = max(0.0, whole - durations.get("load_seconds", 0.0))
    pool = arguments.pop("max_total_tokens", None)
    return LogFacts(
        flags=arguments,
        complete=began is not None,
        kv_cache_tokens=pool if isinstance(pool, int) else None,
        durations=durations,
        scrapes=tuple(batches.scrapes()),
    )


class _Clock:
    """Lines' times as unix ms, as if in UTC; those without a date follow each other from 1970 on."""

    def __init__(self) -> None:
        self._day, self._last = 0, 0

    def ms(self, match: re.Match[str]) -> int:
        hours, minutes, seconds = (int(match[part]) for part in "hms")
        if match["year"] is not None:
            date = (int(match["year"]), int(match["month"]), int(match["day"]))
            return calendar.timegm((*date, hours, minutes, seconds, 0, 0, 0)) * 1000
        now = self._day + 1000 * (3600 * hours + 60 * minutes + seconds)
        if now < self._last - _DAY_MS // 2:  # past midnight
            self._day += _DAY_MS
            now += _DAY_MS
        self._last = now
        return now


_PROMPT, _CACHED = "sglang:prompt_tokens_total", "sglang:cached_tokens_total"
_GENERATED, _RETRACTIONS = "sglang:generation_tokens_total", "sglang:num_retracted_requests_total"
_COUNTERS = (_PROMPT, _CACHED, _GENERATED, _RETRACTIONS)


@dataclass
class _Engine:
    """What is known of one data-parallel rank so far."""

    ranks: str
    """As its batch lines name it: what other ranks of its tensor-parallel group say is the same once more."""
    seen: int
    decoded: int | None = None
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Event:
    """A moment (unix ms) of one engine: its gauges, and what its counters gained."""

    at: int
    engine: str
    gauges: Mapping[str, float]
    gained: Mapping[str, float] = field(default_factory=dict)


class _Batches:
    """Collects what lines say at irregular times, and gives it as scrapes at regular ones."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._events: list[_Event] = []
        self._retracted: list[tuple[int, str, int]] = []

    def add(self, at: int, match: re.Match[str]) -> None:
        """One batch line; one that was cut off says nothing."""
        said = _fields(match["fields"])
        usage = [said[name] for name in _USAGES if name in said]
        if not usage or not said.keys() >= {"#running-req", "#queue-req"}:
            return
        number = rank[1] if (rank := _RANK.search(match["ranks"])) else "0"
        engine = self._engines.setdefault(number, _Engine(match["ranks"], at))
        if engine.ranks != match["ranks"]:
            return
        decoding = match["kind"] == "Decode"
        gained = _decoded(at, engine, said) if decoding else self._prefilled(at, number, engine, said)
        engine.gauges |= {
            "sglang:num_running_reqs": said["#running-req"] + said.get("#new-seq", 0.0),
            "sglang:num_queue_reqs": said["#queue-req"],
            "sglang:token_usage": max(usage),
        }
        if "accept len" in said:
            engine.gauges["sglang:spec_accept_length"] = said["accept len"]
        engine.seen = at
        self._events.append(_Event(at, number, dict(engine.gauges), gained))

    def _prefilled(
        self, at: int, number: str, engine: _Engine, said: Mapping[str, float]
    ) -> dict[str, float]:
        """It counts as running who decodes beside it; its own (#new-seq) come on top."""
        if said["#running-req"] == 0 and at - engine.seen > _IDLE_MS and engine.gauges:
            none = {"sglang:num_running_reqs": 0.0, "sglang:num_queue_reqs": 0.0}
            self._events.append(_Event(engine.seen + 1000, number, {**engine.gauges, **none}))
        cached = said.get("#cached-token", 0.0)
        return {_PROMPT: said.get("#new-token", 0.0) + cached, _CACHED: cached}

    def retract(self, at: int, ranks: str, requests: int) -> None:
        """Requests taken back; every rank of a tensor-parallel group says so."""
        self._retracted.append((at, ranks, requests))

    def scrapes(self) -> Iterable[tuple[int, str]]:
        """Once a second, or less often where the log is long: what gauges were on average since the last
        scrape, and what counters had come to."""
        owners = {engine.ranks: number for number, engine in self._engines.items()}
        events = self._events + [
            _Event(at, owners[ranks], {}, {_RETRACTIONS: float(requests)})
            for at, ranks, requests in self._retracted
            if ranks in owners
        ]
        events.sort(key=lambda event: event.at)
        if len(events) < 2:
            return
        first, last = events[0].at, events[-1].at
        step = max(1000, -(-(last - first) // _MOST_PAGES))
        gauges: dict[str, Mapping[str, float]] = {}
        counters = {number: dict.fromkeys(_COUNTERS, 0.0) for number in self._engines}
        ahead = deque(events)
        for moment in range(first, last + step, step):
            met: dict[str, list[Mapping[str, float]]] = {}
            while ahead and ahead[0].at <= moment:
                event = ahead.popleft()
                for name, gain in event.gained.items():
                    counters[event.engine][name] += gain
                if event.gauges:
                    met.setdefault(event.engine, []).append(event.gauges)
                    gauges[event.engine] = event.gauges
            means = {number: _mean(met.get(number, [known])) for number, known in gauges.items()}
            yield moment, "".join(page(number, {**own, **counters[number]}) for number, own in means.items())


def _decoded(at: int, engine: _Engine, said: Mapping[str, float]) -> dict[str, float]:
    """The throughput is the tokens since the last such line over the time since, whatever came between."""
    seconds = 0.0 if engine.decoded is None else max(0, at - engine.decoded) / 1000
    engine.decoded = at
    return {_GENERATED: seconds * said.get("gen throughput (token/s)", 0.0)}


def _mean(seen: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each gauge that the last of them has."""
    values = {name: [one[name] for one in seen if name in one] for name in seen[-1]}
    return {name: sum(own) / len(own) for name, own in values.items()}


def _fields(text: str) -> dict[str, float]:
    """``#running-req: 40, token usage: 0.76, …`` by name, as far as the values are numbers."""
    found = {}
    for part in text.split(", "):
        name, _, value = part.partition(": ")
        try:
            found[name.strip()] = float(value.strip(" ,%"))
        except ValueError:
            continue
    return found
