"""The metrics that are read, under every name that a version of a server gave them.

Names are listed newest first; where a server exposes two at once (the deprecated one lives on for two
releases) the first counts. Pipelines spell names in ways of their own, which
:func:`servers.kinds.plain` undoes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from servers.errors import UserError
from servers.facts import Metric as Fact
from servers.facts import releases_of
from servers.kind import ServerKind
from servers.kinds import KINDS, VLLM, plain

MetricKind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True)
class Metric:
    """One quantity. ``names`` are sample names (counters end in _total); a histogram's lack the suffix.

    ``combine`` says how several series of one engine add up: requests sum, a percentage must not.
    ``where``: by name, the label and value of the series that are meant, where the name has others as well.
    """

    key: str
    kind: MetricKind
    names: tuple[str, ...]
    combine: Literal["sum", "max"] = "sum"
    where: tuple[tuple[str, str, str], ...] = ()

    def chosen_by(self, name: str) -> tuple[str, str] | None:
        """Label and value of the series that are meant among those of a name; None: all."""
        return next(((label, value) for own, label, value in self.where if own == name), None)

    def labels(self, name: str, labels: Mapping[str, str]) -> Mapping[str, str] | None:
        """A series' labels without the one that it is chosen by; None where it is not meant."""
        if (chosen := self.chosen_by(name)) is None:
            return labels
        label, value = chosen
        return {n: v for n, v in labels.items() if n != label} if labels.get(label) == value else None


def _metric(
    key: str,
    kind: MetricKind,
    *names: str,
    combine: Literal["sum", "max"] = "sum",
    where: tuple[tuple[str, str, str], ...] = (),
) -> Metric:
    """``names``: of other exporters; the servers' own stand in ``servers.kinds``."""
    own = [name for server in KINDS.values() for name in server.metrics.get(key, ())]
    return Metric(key, kind, tuple(dict.fromkeys((*own, *names))), combine, where)


BY_REASON = "vllm:num_requests_waiting_by_reason"
METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        _metric("running", "gauge"),
        _metric("waiting", "gauge"),
        _metric("queue", "gauge", where=((BY_REASON, "reason", "capacity"),)),
        _metric("deferred", "gauge", where=((BY_REASON, "reason", "deferred"),)),
        _metric("waiting_for_kv", "gauge"),
        _metric("waiting_for_grammar", "gauge"),
        _metric("kv_usage", "gauge", combine="max"),
        _metric("cache_hit_rate", "gauge", combine="max"),
        _metric("preemptions", "counter"),
        _metric("rejections", "counter"),
        _metric("prompt_tokens", "counter"),
        _metric("generation_tokens", "counter"),
        _metric("prefix_queries", "counter"),
        _metric("prefix_hits", "counter"),
        _metric("finished", "counter"),
        _metric("drafts", "counter"),
        _metric("draft_tokens", "counter"),
        _metric("accepted_tokens", "counter"),
        _metric("accept_length", "gauge", combine="max"),
        _metric("ttft", "histogram"),
        _metric("itl", "histogram"),
        _metric("tpot", "histogram"),
        _metric("e2e", "histogram"),
        _metric("queue_time", "histogram"),
        _metric("prefill_time", "histogram"),
        _metric("decode_time", "histogram"),
        _metric("prompt_length", "histogram"),
        _metric("generation_length", "histogram"),
        _metric("prefill_length", "histogram"),
        _metric("request_preemptions", "histogram"),
        _metric("iteration_tokens", "histogram"),
        _metric("cache_config", "info"),
        _metric("adapters", "info"),
        _metric("kv_tokens", "gauge"),
        _metric("gpu_busy", "gauge", "DCGM_FI_DEV_GPU_UTIL"),
        _metric("cpu_time", "counter", "node_cpu_seconds_total"),
    )
}

ANCHORS = ("running", "waiting", "kv_usage", "generation_tokens", "ttft")
"""Metrics that carry the labels of one engine; who has none of them is not a server we know."""

OPTIONAL = frozenset(
    {
        "drafts",
        "draft_tokens",
        "accepted_tokens",
        "accept_length",
        "adapters",
        "cache_config",
        "cache_hit_rate",
        "deferred",
        "kv_tokens",
        "rejections",
        "waiting_for_grammar",
        "waiting_for_kv",
    }
)
"""Metrics that a healthy server may lack: speculation's exist only while it is on, those of adapters, of
grammars, of KV transfers and of refusals where it has them."""

ELSEWHERE: dict[str, str] = {
    "gpu_busy": "DCGM exporter",
    "cpu_time": "node exporter",
}
"""Metrics of other exporters on the server's host, with the exporter's name."""

_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "counter": ("",), "info": ("",)}

MARKERS = frozenset(name for kind in KINDS.values() for name, _ in kind.families)
"""Names that tell whose metrics they are, and which version's."""


def spellings(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """By a server's own name, the names that its samples have here; a bare one before a prefixed one."""
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        found[plain(name)] = (*found.get(plain(name), ()), name)
    return found


@cache
def sample_names(keys: frozenset[str] | None = None) -> frozenset[str]:
    """The sample names of these metrics; None: every one worth parsing."""
    wanted = {
        name + suffix
        for metric in METRICS.values()
        if keys is None or metric.key in keys
        for name in metric.names
        for suffix in _SUFFIXES[metric.kind]
    }
    return frozenset(wanted | (MARKERS if keys is None else frozenset()))


def names_of(version: str) -> frozenset[str]:
    """The sample names of one vLLM version, such as "0.9.1". Raises UserError."""
    if re.match(r"v?\d+\.\d+", version.strip()) is None:
        raise UserError(f"{version!r} is no vLLM version; write e.g. 0.10.1")
    releases = releases_of(VLLM.name)
    assert releases is not None, "there are wheels of vLLM"
    exposed = _exposed(releases.metrics_at(version))
    return frozenset(
        name + suffix
        for metric in METRICS.values()
        for name in metric.names
        if bare(metric, name) in exposed
        for suffix in _SUFFIXES[metric.kind]
    )


@cache
def stated_bounds(kind: ServerKind, version: str | None = None) -> Mapping[str, tuple[float, ...]]:
    """By key, a histogram's bucket bounds in a release (None: the newest), where they are constants."""
    releases = releases_of(kind.name)
    told = releases.metrics_at(version or releases.releases[-1]) if releases else {}
    found = {}
    for key, names in kind.metrics.items():
        exposed = (told[name] for name in names if name in told and not told[name].hidden)
        if (fact := next(exposed, None)) is not None and fact.buckets:
            found[key] = fact.buckets
    return found


def bare(metric: Metric, name: str) -> str:
    """A sample name as the server's source has it: without the suffix of a counter."""
    return name.removesuffix("_total") if metric.kind == "counter" else name


def never_had(kind: ServerKind, version: str | None, present: Collection[str]) -> frozenset[str]:
    """Keys of the metrics that a server of this version cannot have: those that no release of its kind has,
    and those that this one lacks.

    ``version`` None: what all releases lack that expose just what is ``present``, among the sample names that
    are read; nothing of releases where there is no such release, or no wheel of this kind.
    """
    if not kind.metrics:
        return frozenset()  # it has another kind's
    strange = frozenset(METRICS.keys() - kind.metrics.keys() - ELSEWHERE.keys())
    releases = releases_of(kind.name)
    if releases is None:
        return strange
    own = {key: {bare(METRICS[key], name) for name in names} for key, names in kind.metrics.items()}

    def lacking(told: Mapping[str, Fact]) -> frozenset[str]:
        exposed = _exposed(told)
        return strange | {key for key, names in own.items() if names.isdisjoint(exposed)}

    if version is not None:
        return lacking(releases.metrics_at(version))
    seen = {
        bare(METRICS[key], name)
        for key, names in kind.metrics.items()
        for name in names
        if any(name + suffix in present for suffix in _SUFFIXES[METRICS[key].kind])
    }
    optional = {name for key in OPTIONAL for name in own.get(key, ())}
    always = set().union(*own.values()) - optional
    possible = [
        told
        for told in map(releases.metrics_at, releases.releases)
        if seen <= told.keys() and all(name in seen or name not in told or told[name].when for name in always)
    ]
    return frozenset.intersection(*map(lacking, possible)) if possible else strange


def _exposed(metrics: Mapping[str, Fact]) -> frozenset[str]:
    return frozenset(name for name, metric in metrics.items() if not metric.hidden)
