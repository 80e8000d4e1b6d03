"""The text of metrics that are read again and again: only what has changed is written anew.

prometheus_client builds every line of ``/metrics`` from its parts each time, some milliseconds. A simulation
is scraped every second of its virtual time, hundreds of times as often as a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

from prometheus_client import Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.utils import floatToGoString
from prometheus_client.values import MutexValue

_CREATED = re.compile(r"(# (HELP|TYPE) )?[\w:]+_created[ {]")


class Exposition:
    """What prometheus_client would write of ``families``, without the moments of their creation.

    The families have all their children when this is made; none comes or goes afterwards.
    """

    def __init__(self, families: Sequence[MetricWrapperBase]) -> None:
        text = generate_latest(_Families(families)).decode()
        self._values = list(chain.from_iterable(map(_values, families)))
        self._heads = list(_heads(text))
        self._seen: list[float | None] = [None] * len(self._heads)
        self._lines = [""] * len(self._heads)

    def render(self) -> str:
        """The text as of now."""
        seen, lines = self._seen, self._lines
        numbers = chain.from_iterable(_read(values) for values in self._values)
        for row, (number, head) in enumerate(zip(numbers, self._heads, strict=True)):
            if number != seen[row]:
                seen[row] = number
                lines[row] = f"{head} {floatToGoString(number)}\n"
        return "".join(lines)


class _Families:
    """A registry of some families."""

    def __init__(self, families: Sequence[MetricWrapperBase]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return chain.from_iterable(family.collect() for family in self._families)


def _heads(text: str) -> Iterator[str]:
    """What stands before each number: the labelled name, and comments before that."""
    comments = ""
    for line in text.splitlines(keepends=True):
        if _CREATED.match(line):
            continue
        if line.startswith("#"):
            comments += line
        else:
            yield comments + line.rpartition(" ")[0]
            comments = ""


def _values(family: MetricWrapperBase) -> Iterator[tuple[MutexValue, ...]]:
    """Where the numbers of a family's children are kept, a tuple a child: of a histogram its sum, and its
    buckets."""
    for child in family._metrics.values():
        if isinstance(child, Histogram):
            yield child._sum, *child._buckets
        else:
            assert isinstance(child, Counter | Gauge)
            yield (child._value,)


def _read(values: tuple[MutexValue, ...]) -> Sequence[float]:
    """The numbers of a child in the order of its lines."""
    if len(values) == 1:
        return (values[0].get(),)
    total, *buckets = [value.get() for value in values]
    cumulative = list(accumulate(buckets))
    return (*cumulative, cumulative[-1], total)
