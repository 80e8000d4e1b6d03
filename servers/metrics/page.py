"""One page of /metrics: its samples, and what the catalogue's metrics come to over all engines."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from prometheus_client.parser import text_string_to_metric_families

from servers.kinds import plain
from servers.kinds.vllm import pool_tokens
from servers.metrics import catalog
from servers.metrics.identity import roles_of_total

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
"""Sample name and its labels, sorted."""

MOST = 1e12
"""Requests, tokens and blocks that a server may have: what says more, or less than none, says nothing."""
_LINE_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


@dataclass(frozen=True)
class Page:
    """``samples``: those that were asked for; ``unreadable``: lines of theirs that could not be read."""

    samples: Mapping[SeriesKey, float]
    unreadable: int = 0

    def figure(self, key: str) -> float | None:
        """A gauge or counter of the catalogue, over all engines; None where the page does not say."""
        metric = catalog.METRICS[key]
        combine = max if metric.combine == "max" else sum
        for name in metric.names:
            series = [
                (meant, value)
                for labels, value in self._series.get(name, ())
                if (meant := metric.labels(name, labels)) is not None
            ]
            roles = roles_of_total(series)
            own: dict[object, float] = {}
            for labels, value in series:
                if 0 <= value <= MOST and roles.count(labels):
                    once = roles.once(labels)
                    own[once] = max(value, own.get(once, 0.0))
            if own:
                return combine(own.values())
        return None

    @cached_property
    def _series(self) -> Mapping[str, Sequence[tuple[Mapping[str, str], float]]]:
        """By the server's own names."""
        found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for (sample, labels), value in self.samples.items():
            found.setdefault(plain(sample), []).append((dict(labels), value))
        return found

    def labels(self, key: str) -> list[Mapping[str, str]]:
        """The labels of each series of a metric, such as ``cache_config``."""
        names = catalog.METRICS[key].names
        return [labels for name in names for labels, _ in self._series.get(name, ())]

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV pools of all engines hold; None where the page does not say."""
        pools = [pool for labels in self.labels("cache_config") if (pool := pool_tokens(labels))]
        whole = sum(pools) if pools else self.figure("kv_tokens")
        return int(whole) if whole and whole <= MOST else None


class PageReader:
    """Reads pages, one after the other: names and labels are parsed once per series, not once per page.

    ``keys``: the catalogue's metrics that are read; None: all.
    """

    def __init__(self, keys: Collection[str] | None = None) -> None:
        self._names = catalog.sample_names(None if keys is None else frozenset(keys))
        self._spelled: set[str] = set()
        self._others: set[str] = set()
        self._known: dict[str, SeriesKey] = {}

    def read(self, text: str) -> Page:
        """A last line without its line feed is left out: "12" may be the start of "123.0". NaN and infinite
        values count as absent. Of a duplicated series the last sample counts.
        """
        samples: dict[SeriesKey, float] = {}
        wanted, others, known, begins, bad = self._spelled, self._others, self._known, _LINE_NAME.match, 0
        for line in text.replace("\r\n", "\n").split("\n")[:-1]:
            match = begins(line)
            if match is None:
                continue
            if (name := match[0]) not in wanted:
                if name in others or plain(name) not in self._names:
                    others.add(name)
                    continue
                wanted.add(name)
            at = line.rfind("}") + 1 or match.end()
            try:
                key = known.get(line[:at]) or known.setdefault(line[:at], _series_key(line))
                value = float(line[at:].split()[0])
            except (ValueError, IndexError):
                bad += 1
                continue
            if math.isfinite(value):
                samples[key] = value
            else:
                samples.pop(key, None)
        return Page(samples, bad)


def sample_name(line: str) -> str:
    """The name that a line begins with; "" for a comment or rubbish."""
    match = _LINE_NAME.match(line)
    return match[0] if match else ""


def _series_key(line: str) -> SeriesKey:
    """Name and labels of one sample line, through prometheus-client's parser. Raises ValueError."""
    try:
        (family,) = text_string_to_metric_families(line + "\n")
        (sample,) = family.samples
    except (KeyError, IndexError, TypeError) as error:  # what the parser raises on some garbled lines
        raise ValueError(str(error)) from None
    return sample.name, tuple(sorted(sample.labels.items()))
