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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from servers.facts import releases_of
from servers.kinds import KINDS
from servers.metrics.catalog import ELSEWHERE, METRICS, bare

Labels = Mapping[str, str]
Sample = tuple[Labels, float]
"""The labels of a series and its last value; of a histogram those of its counts."""

POOLS = ("kv_usage", "running", "waiting")
"""Gauges of one scheduler and its KV pool: the first that there is tells engines apart by its labels."""
PEERS = ("cluster", "namespace", "model_name", "engine_type")
"""Engines that agree in these share their load. SGLang's ``engine_type``: ``prefill``, ``decode`` or both."""

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
"""Values of a label under which a whole stands beside its parts. What lacks the label is a part as well,
such as the requests without an adapter, unless it is the sum of the others."""
_SAME = 0.01
"""Share by which a sum may be off: a page is written while requests come and go."""


@dataclass(frozen=True)
class Roles:
    """Of one metric's labels those that tell no engines apart.

    ``wholes``: where a whole stands beside its parts, or beside the engines, a label, its value for the
    whole, and whether the whole counts or the others do.
    """

    parts: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    wholes: tuple[tuple[str, str, bool], ...] = ()

    def count(self, labels: Labels) -> bool:
        return all((labels.get(name, "") == value) is alone for name, value, alone in self.wholes)

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

    ``needed``: those of these labels that all of its series have: what lacks one is no engine, but a router
    that counts for its servers. ``within``: labels that tell the engines of one server apart and that some
    metrics lack; ``shared``: those metrics, which a server has once for all of its engines.
    """

    roles: Mapping[str, Roles] = field(default_factory=dict)
    pool: str = POOLS[0]
    apart: tuple[str, ...] = ("engine", "instance", "model_name")
    needed: frozenset[str] = frozenset()
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
        return Identity(roles, self.pool, apart, self.needed)


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


def identity_of(seen: Mapping[str, Sequence[Sample]]) -> Identity:
    """``seen``: by key of the catalogue."""
    carried = {
        key: _names(samples) - _OF_VALUES
        for key, samples in seen.items()
        if samples and key not in ELSEWHERE and METRICS[key].kind != "info"
    }
    if not carried:
        return Identity()
    pool = next((key for key in POOLS if key in carried), next(iter(carried)))
    apart = {name for name in carried[pool] if not _copy(name)} - {*stated_parts(pool), *_PARTS}
    inner = {name for name in apart if any(name not in names for names in carried.values())}
    within = {name for name in inner if len({labels.get(name, "") for labels, _ in seen[pool]} - {""}) > 1}
    apart -= inner - within
    bare = {
        name
        for key, names in carried.items()
        for name in names - apart - _PARTS
        if not _copy(name) and not _summed(seen[key], name, names)
    }
    return Identity(
        {key: _roles(seen[key], names, apart, bare) for key, names in carried.items()},
        pool,
        tuple(sorted(apart)),
        frozenset(name for name in apart - within if all(labels.get(name) for labels, _ in seen[pool])),
        tuple(sorted(within)),
        frozenset(key for key, names in carried.items() if not within <= names),
    )


def is_rank(label: str) -> bool:
    """Whether a label tells the data-parallel ranks of one server apart."""
    return _RANK.fullmatch(label) is not None


def roles_of_total(samples: Sequence[Sample]) -> Roles:
    """Of one metric, where all engines are added up: nothing tells them apart."""
    names = _names(samples) - _OF_VALUES
    bare = {name for name in names - _PARTS if not _summed(samples, name, names)}
    return _roles(samples, names, (), bare)


def _names(samples: Sequence[Sample]) -> set[str]:
    return {name for labels, _ in samples for name, value in labels.items() if value}


def _copy(label: str) -> bool:
    return _COPY.fullmatch(label) is not None and not is_rank(label)


def _roles(
    samples: Sequence[Sample], names: Collection[str], apart: Collection[str], bare: Collection[str]
) -> Roles:
    """``bare``: labels that a part lacks, such as the requests without an adapter."""
    copies = tuple(sorted(filter(_copy, names)))
    parts = tuple(sorted(name for name in names if name not in apart and name not in copies))
    wholes = []
    for name in (*parts, *sorted(apart)):
        beside = _beside(samples, name, copies)
        for value in _WHOLES[1:] if name in bare else _WHOLES:
            if any(value in own for own in beside):
                wholes.append((name, value, name in parts))
                break
    return Roles(parts, copies, tuple(wholes))


def _summed(samples: Sequence[Sample], label: str, names: Collection[str]) -> bool:
    """Whether what lacks a label is the sum of what has it, wherever both are."""
    for own in _beside(samples, label, tuple(filter(_copy, names))):
        if "" in own:
            parts = sum(value for name, value in own.items() if name)
            if abs(own[""] - parts) > _SAME * parts:
                return False
    return True


def _beside(samples: Sequence[Sample], label: str, copies: tuple[str, ...]) -> list[dict[str, float]]:
    """Values by what ``label`` says, of series that agree in all else; where one of them may be a whole."""
    if {labels.get(label, "") for labels, _ in samples}.isdisjoint(_WHOLES):
        return []
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    rest = Roles((label,), copies)
    for labels, value in samples:
        own = found.setdefault(rest.engine(labels), {})
        name = labels.get(label, "")
        own[name] = max(value, own.get(name, value))
    return [own for own in found.values() if len(own) > 1]
