"""One page of /metrics: its samples, and what the catalogue's metrics come to over all engines."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from servers.kinds.vllm import pool_tokens
from servers.metrics import catalog

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
            own = [
                value for (sample, _), value in self.samples.items() if sample == name and 0 <= value <= MOST
            ]
            if own:
                return combine(own)
        return None

    def labels(self, key: str) -> list[Mapping[str, str]]:
        """The labels of each series of a metric, such as ``cache_config``."""
        names = catalog.METRICS[key].names
        return [dict(labels) for sample, labels in self.samples if sample in names]

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
        self._known: dict[str, SeriesKey] = {}

    def read(self, text: str) -> Page:
        """A last line without its line feed is left out: "12" may be the start of "123.0". NaN and infinite
        values count as absent. Of a duplicated series the last sample counts.
        """
        samples: dict[SeriesKey, float] = {}
        names, known, begins, bad = self._names, self._known, _LINE_NAME.match, 0
        for line in text.replace("\r\n", "\n").split("\n")[:-1]:
            match = begins(line)
            if match is None or match[0] not in names:
                continue
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
