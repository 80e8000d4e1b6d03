"""Which series belong to which engine: what the labels of each metric tell apart.

- *Parts of a whole* are added up: ``finished_reason``, ``priority``. Where a series of the whole stands
  beside them (``priority=""``), it alone counts.
- *Copies* say the same thing more than once, and one of them counts: the ranks of one engine's parallel
  group, the replicas of a Prometheus.
- *Engines* are judged each by itself: everything else, such as ``engine``, ``dp_rank``, ``worker_addr``, and
  what a scrape configuration adds (``instance``, ``job``, ``namespace``, ``pod``, ``cluster``).

The facts of the releases know the parts of many metrics. What they do not know is read off the series: an
engine has one KV pool, so a label of the pool's usage tells engines apart, and a label that other metrics
have beside those tells parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from servers.facts import releases_of
from servers.kinds import KINDS
from servers.metrics.catalog import ELSEWHERE, METRICS, bare

Labels = Mapping[str, str]

POOLS = ("kv_usage", "running", "waiting")
"""Gauges of one scheduler and its KV pool: the first that there is tells engines apart by its labels."""
PEERS = ("cluster", "namespace", "model_name")
"""Engines that agree in these share their load."""

PLACE = ("cluster", "namespace", "job", "pod")
"""Labels by which a scrape configuration says where an engine runs, for people."""

_OF_VALUES = frozenset({"le", "quantile", "__name__"})
_RANK = re.compile(r"(?:.*_)?(?:dp|data_parallel|engine|replica)_rank|engine")
"""Own labels of a server by which it tells its engines apart: a data-parallel rank has a scheduler and a pool
of its own."""
_COPY = re.compile(r"(?:.*_)?rank|pid|(?:.*prometheus|receive|thanos|rule|_)_replica_*")
"""Ranks of tensor, pipeline, expert and context parallelism run in step under one scheduler. SGLang's do so
under ``--enable-metrics-for-all-schedulers``. ``pid``: prometheus-client's, of a server of several
processes."""
_PARTS = frozenset({"priority"})
"""Parts that the releases' source makes at run time (``sglang.srt.metrics``)."""
_WHOLES = ("", "all", "total")
"""Values of a part's label under which the whole is exposed beside its parts."""


@dataclass(frozen=True)
class Roles:
    """Of one metric's labels those that tell no engines apart.

    ``whole``: label and value of the series that count, where a whole stands beside its parts.
    """

    parts: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()

    def count(self, labels: Labels) -> bool:
        return all(labels.get(name, "") == value for name, value in self.whole)

    def once(self, labels: Labels) -> tuple[tuple[str, str], ...]:
        """What copies of one series agree in."""
        return tuple(sorted((n, v) for n, v in labels.items() if v and n not in self.copies))

    def engine(self, labels: Labels) -> tuple[tuple[str, str], ...]:
        """What tells the engine of a series from others."""
        dropped = {*self.parts, *self.copies, *_OF_VALUES}
        return tuple(sorted((name, value) for name, value in labels.items() if value and name not in dropped))


@dataclass(frozen=True)
class Identity:
    """``roles``: by key of the catalogue. ``pool``: the gauge that tells engines apart, by ``apart``.

    ``within``: labels that tell the engines of one server apart and that some metrics lack; ``shared``: those
    metrics, which a server has once for all of its engines.
    """

    roles: Mapping[str, Roles] = field(default_factory=dict)
    pool: str = POOLS[0]
    apart: tuple[str, ...] = ("engine", "instance", "model_name")
    within: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()

    def of(self, key: str) -> Roles:
        return self.roles.get(key) or Roles(stated_parts(key))

    def spread(self, keys: Collection[str]) -> bool:
        """Whether a figure of these metrics is known of a whole server alone."""
        return not self.shared.isdisjoint(keys)

    def of_servers(self) -> Identity:
        """With the engines of a server added up."""
        roles = {
            key: replace(own, parts=tuple(sorted({*own.parts, *self.within})))
            for key, own in self.roles.items()
        }
        apart = tuple(name for name in self.apart if name not in self.within)
        return Identity(roles, self.pool, apart)


@cache
def stated_parts(key: str) -> tuple[str, ...]:
    """The labels that some release gives a metric itself, and that tell parts."""
    releases = [known for kind in KINDS if (known := releases_of(kind)) is not None]
    names = {bare(METRICS[key], name) for name in METRICS[key].names}
    found = {
        label
        for known in releases
        for name in names & known.metrics.keys()
        for _, _, metric in known.metrics[name]
        for label in metric.labels
    }
    return tuple(sorted(name for name in found - {"model_name"} if not is_rank(name) and not _copy(name)))


def identity_of(seen: Mapping[str, Sequence[Labels]]) -> Identity:
    """``seen``: by key of the catalogue the labels of each series; of a histogram those of its counts."""
    carried = {
        key: {name for labels in series for name, value in labels.items() if value} - _OF_VALUES
        for key, series in seen.items()
        if series and key not in ELSEWHERE and METRICS[key].kind != "info"
    }
    if not carried:
        return Identity()
    pool = next((key for key in POOLS if key in carried), next(iter(carried)))
    apart = {name for name in carried[pool] if not _copy(name)} - {*stated_parts(pool), *_PARTS}
    inner = {name for name in apart if any(name not in names for names in carried.values())}
    within = {name for name in inner if len({labels.get(name, "") for labels in seen[pool]} - {""}) > 1}
    apart -= inner - within
    return Identity(
        {key: _roles(seen[key], names, apart) for key, names in carried.items()},
        pool,
        tuple(sorted(apart)),
        tuple(sorted(within)),
        frozenset(key for key, names in carried.items() if not within <= names),
    )


def is_rank(label: str) -> bool:
    """Whether a label tells the data-parallel ranks of one server apart."""
    return _RANK.fullmatch(label) is not None


def roles_of_total(series: Sequence[Labels]) -> Roles:
    """Of one metric, where all engines are added up: nothing tells them apart."""
    return _roles(series, {name for labels in series for name, value in labels.items() if value}, ())


def _copy(label: str) -> bool:
    return _COPY.fullmatch(label) is not None and not is_rank(label)


def _roles(series: Sequence[Labels], names: Collection[str], apart: Collection[str]) -> Roles:
    copies = tuple(sorted(filter(_copy, names)))
    parts = tuple(sorted(name for name in names if name not in apart and name not in copies))
    return Roles(parts, copies, tuple(_wholes(series, parts, copies)))


def _wholes(
    series: Sequence[Labels], parts: Sequence[str], copies: Sequence[str]
) -> Iterable[tuple[str, str]]:
    for part in parts:
        beside: dict[tuple[tuple[str, str], ...], set[str]] = {}
        own = Roles((part,), tuple(copies))
        for labels in series:
            beside.setdefault(own.engine(labels), set()).add(labels.get(part, ""))
        for value in _WHOLES:
            if any(value in values and len(values) > 1 for values in beside.values()):
                yield part, value
                break
