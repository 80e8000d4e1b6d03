"""A recording as another release would show it: names, buckets and what it never had, by the facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from servers.facts import Metric, releases_of
from servers.kind import ServerKind
from servers.kinds import find_family
from servers.metrics.catalog import METRICS, bare, plain
from servers.metrics.exposition import Recording, Series
from servers.metrics.range_functions import Values

Table = dict[str, list[Series]]


def exposed(kind: ServerKind, version: str) -> dict[str, dict[str, Metric]]:
    """By key of the catalogue, the names that a release exposes unasked, with their facts."""
    releases = releases_of(kind.name)
    assert releases is not None, f"there are no wheels of {kind.label}"
    told = releases.metrics_at(version)
    one = "V0" if releases.nearest(version) < (0, 8) else "V1"
    found: dict[str, dict[str, Metric]] = {}
    for key, names in kind.metrics.items():
        for name in names:
            fact = told.get(bare(METRICS[key], name))
            if fact is not None and not fact.hidden and not (one == "V1" and "V0" in fact.when):
                found.setdefault(key, {})[name] = fact
    return found


def translated(recording: Recording, kind: ServerKind, version: str) -> Recording:
    """What a server of ``kind`` and ``version`` would have shown of the same load.

    ``recording``: of vLLM's newest release, or of the bundled engine, which has its names. Quantities that
    another release counts in another way are derived: a hit rate from hits and queries, an accepted length
    from drafts. Bucket counts at bounds that were not recorded are interpolated.
    """
    own = _by_key(recording)
    own |= {key: made for key, derive in _DERIVED.items() if (made := derive(own))}
    series: dict[str, Sequence[Series]] = {}
    for key, names in exposed(kind, version).items():
        for name, fact in names.items():
            for suffix, columns in own.get(key, {}).items():
                told = _rebucketed(columns, fact.buckets) if suffix == "_bucket" else columns
                series.setdefault(name + suffix, [_labelled(each, kind) for each in told])
    return Recording(series, recording.times, recording.notes)


def _by_key(recording: Recording) -> dict[str, Table]:
    """Key -> suffix of the sample name -> series; of several names of a quantity the newest."""
    family = find_family({plain(name) for name in recording.series})
    assert family is not None, "a recording of a known server"
    found: dict[str, Table] = {}
    for key, names in family[0].metrics.items():
        for name in names:
            table = {
                suffix: list(recording.series[name + suffix])
                for suffix in ("", "_sum", "_count", "_bucket")
                if name + suffix in recording.series
            }
            if table:
                found[key] = table
                break
    return found


def _labelled(series: Series, kind: ServerKind) -> Series:
    kept = {name: value for name, value in series.labels.items() if kind.name != "sglang" or name != "engine"}
    return replace(series, labels=kept)


def _rebucketed(columns: Sequence[Series], bounds: Sequence[float]) -> list[Series]:
    """The cumulated counts at other bounds; as they are where a release does not tell its bounds."""
    if not bounds:
        return list(columns)
    groups: dict[tuple[tuple[str, str], ...], dict[float, Series]] = {}
    for series in columns:
        labels = tuple(sorted((n, v) for n, v in series.labels.items() if n != "le"))
        groups.setdefault(labels, {})[float(series.labels["le"])] = series
    made = []
    for labels, by_bound in groups.items():
        finite = sorted(bound for bound in by_bound if np.isfinite(bound))
        counts = np.array([by_bound[bound].values for bound in finite])
        known = [0.0, *finite]
        below = np.vstack([np.zeros(counts.shape[1]), counts])
        last = by_bound[np.inf]
        for bound in bounds:
            values = np.array([np.floor(np.interp(bound, known, column)) for column in below.T])
            made.append(Series({**dict(labels), "le": f"{float(bound):g}"}, last.times, values))
        made.append(last)
    return made


def _ratio(top: Values, bottom: Values) -> Values:
    """Growth over growth between scrapes, 0 before the first and where nothing grew."""
    over, under = np.diff(top, prepend=top[:1]), np.diff(bottom, prepend=bottom[:1])
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)


def _hit_rate(own: Mapping[str, Table]) -> Table:
    if not {"prefix_hits", "prefix_queries"} <= own.keys():
        return {}
    hits, queries = own["prefix_hits"][""][0], own["prefix_queries"][""][0]
    return {"": [replace(hits, values=_ratio(hits.values, queries.values))]}


def _accept_length(own: Mapping[str, Table]) -> Table:
    if not {"accepted_tokens", "drafts"} <= own.keys():
        return {}
    accepted, drafts = own["accepted_tokens"][""][0], own["drafts"][""][0]
    return {"": [replace(drafts, values=1 + _ratio(accepted.values, drafts.values))]}


def _pool(own: Mapping[str, Table]) -> Table:
    for config in own.get("cache_config", {}).get("", ()):
        blocks, size = config.labels.get("num_gpu_blocks", ""), config.labels.get("block_size", "")
        if blocks.isdecimal() and size.isdecimal():
            engine = own["running"][""][0]
            tokens = np.full_like(engine.values, float(blocks) * float(size))
            return {"": [replace(engine, values=tokens)]}
    return {}


_DERIVED: Mapping[str, Callable[[Mapping[str, Table]], Table]] = {
    "cache_hit_rate": _hit_rate,
    "accept_length": _accept_length,
    "kv_tokens": _pool,
}
"""What no recording of vLLM has, from what it has."""
