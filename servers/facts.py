"""What each release of a server takes and exposes, as its wheel says: ``facts.json``, made by ``make facts``.

A table has, by name, a row for each span of releases in which the fact did not change: its first release, its
last (None: the newest has it still), and the fact.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("facts.json")
Version = tuple[int, ...]
HIDDEN = "show_hidden_metrics"
"""In a condition of a metric: it is exposed with ``--show-hidden-metrics-for-version`` alone."""


@dataclass(frozen=True)
class Flag:
    """``kind``: as in :mod:`servers.flags.words`. ``default``: None also where it is not a constant."""

    options: tuple[str, ...]
    kind: str
    default: Any = None
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Metric:
    """``when``: the conditions in the source that it is made under; () for one that is always there."""

    type: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    when: tuple[str, ...] = ()

    @property
    def hidden(self) -> bool:
        return any(HIDDEN in condition for condition in self.when)


@dataclass(frozen=True)
class Releases:
    """Of one kind of server. ``metrics``: names without the suffixes of counters and histograms."""

    releases: tuple[str, ...]
    flags: Mapping[str, tuple[tuple[str, str | None, Flag], ...]]
    metrics: Mapping[str, tuple[tuple[str, str | None, Metric], ...]]

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

    def flags_at(self, version: str) -> Mapping[str, Flag]:
        """By name, of that release."""
        each = ((name, self.flag(name, version)) for name in self.flags)
        return {name: flag for name, flag in each if flag is not None}

    def metrics_at(self, version: str) -> Mapping[str, Metric]:
        """By name, of that release."""
        at = self.nearest(version)
        if at not in self._metrics:
            each = ((name, _at(spans, at)) for name, spans in self.metrics.items())
            self._metrics[at] = {name: metric for name, metric in each if metric is not None}
        return self._metrics[at]

    @cached_property
    def _metrics(self) -> dict[Version, Mapping[str, Metric]]:
        """Each made once: where a version is not known, all releases are asked."""
        return {}


@cache
def version_of(text: str) -> Version:
    """``0.32.0+cpu`` -> (0, 32, 0), ``0.9.0.1`` -> (0, 9, 0, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0]))


@cache
def releases_of(kind: str) -> Releases | None:
    """Of a kind of server by its name; None for one that has no wheels."""
    return _all().get(kind)


@cache
def _all() -> Mapping[str, Releases]:
    import msgspec

    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Releases])


def _at(spans: tuple[tuple[str, str | None, Any], ...], version: Version) -> Any:
    for first, last, fact in spans:
        if version_of(first) <= version and (last is None or version <= version_of(last)):
            return fact
    return None
