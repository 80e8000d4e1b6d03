"""What each release of a server takes and exposes, as its wheel says: ``facts.json``, made by ``make facts``.

A table has, by name, a row for each span of releases in which the fact did not change: its first release, its
last (None: the newest has it still), and the fact.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import msgspec

Version = tuple[int, ...]
HIDDEN = "show_hidden_metrics"
"""In a condition of a metric: it is exposed with ``--show-hidden-metrics-for-version`` alone."""


class Flag(msgspec.Struct, frozen=True):
    """``kind``: as in :mod:`servers.flags.words`. ``default``: None also where it is not a constant."""

    options: tuple[str, ...]
    kind: str
    default: Any = None
    choices: tuple[Any, ...] = ()


class Metric(msgspec.Struct, frozen=True):
    """``when``: the conditions in the source that it is made under; () for one that is always there."""

    type: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    when: tuple[str, ...] = ()

    @property
    def hidden(self) -> bool:
        return any(HIDDEN in condition for condition in self.when)


class Releases(msgspec.Struct, frozen=True, dict=True):
    """Of one kind of server. ``metrics``: names without the suffixes of counters and histograms."""

    releases: tuple[str, ...]
    flags: Mapping[str, tuple[tuple[str, str | None, Flag], ...]]
    metrics: Mapping[str, tuple[tuple[str, str | None, Metric], ...]]
    logs: Mapping[str, tuple[tuple[str, str | None, Mapping[str, Any]], ...]]

    @cached_property
    def versions(self) -> tuple[Version, ...]:
        return tuple(map(version_of, self.releases))

    def nearest(self, version: str) -> Version:
        """The release that ``version`` is, or the last before it; the first for what is older than all.

        A build of a clone without tags calls itself ``0.1.dev1+g…``: it is taken for the newest.
        """
        if "dev" in version and version_of(version) < self.versions[0]:
            return self.versions[-1]
        return self.versions[max(0, bisect_right(self.versions, version_of(version)) - 1)]

    def flag(self, name: str, version: str) -> Flag | None:
        """None: that release has no such flag."""
        return _at(self.flags.get(name, ()), self.nearest(version))

    def metric(self, name: str, version: str) -> Metric | None:
        return _at(self.metrics.get(name, ()), self.nearest(version))

    def metrics_at(self, version: str) -> dict[str, Metric]:
        return dict(self._each(self.nearest(version)))

    def _each(self, version: Version) -> Iterator[tuple[str, Metric]]:
        for name, spans in self.metrics.items():
            if (metric := _at(spans, version)) is not None:
                yield name, metric


def version_of(text: str) -> Version:
    """``0.32.0+cpu`` -> (0, 32, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


@cache
def releases_of(kind: str) -> Releases | None:
    """Of a kind of server by its name; None for one that has no wheels."""
    return _all().get(kind)


@cache
def _all() -> Mapping[str, Releases]:
    text = files("servers").joinpath("facts.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Releases])


def _at(spans: tuple[tuple[str, str | None, Any], ...], version: Version) -> Any:
    for first, last, fact in spans:
        if version_of(first) <= version and (last is None or version <= version_of(last)):
            return fact
    return None
