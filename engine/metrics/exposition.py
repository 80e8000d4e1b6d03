"""The text of metrics that are read again and again: only what has changed is written anew.

prometheus_client builds every line of ``/metrics`` from its parts each time, some milliseconds. A simulation
is scraped every second of its virtual time, hundreds of times as often as a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.utils import floatToGoString
from prometheus_client.values import MutexValue

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Exposition:
    """What prometheus_client would write of ``families``, without the moments of their creation.

    The families have all their children when this is made; none comes or goes afterwards.
    """

    def __init__(self, families: Sequence[MetricWrapperBase]) -> None:
        self._values = list(chain.from_iterable(map(_values, families)))
        self._heads = list(chain.from_iterable(map(_heads, families)))
        self._seen: list[float | None] = [None] * len(self._heads)
        self._lines = [""] * len(self._heads)

    def render(self) -> str:
        """The text as of now."""
        seen, lines = self._seen, self._lines
        numbers = chain.from_iterable(map(_read, self._values))
        for row, (number, head) in enumerate(zip(numbers, self._heads, strict=True)):
            if number != seen[row]:
                seen[row] = number
                lines[row] = f"{head} {floatToGoString(number)}\n"
        return "".join(lines)


def _heads(family: MetricWrapperBase) -> Iterator[str]:
    """What stands before each number of a family: the labelled name, and the comments before the first."""
    name = f"{family._name}_total" if isinstance(family, Counter) else family._name
    before = f"# HELP {name} {family._documentation}\n# TYPE {name} {family._type}\n"
    for values, child in family._metrics.items():
        labels = dict(zip(family._labelnames, values, strict=True))
        if isinstance(child, Histogram):
            for bound in child._upper_bounds:
                yield f"{before}{name}_bucket{_labelled({**labels, 'le': floatToGoString(bound)})}"
                before = ""
            yield f"{name}_count{_labelled(labels)}"
            yield f"{name}_sum{_labelled(labels)}"
        else:
            yield f"{before}{name}{_labelled(labels)}"
        before = ""


def _labelled(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{labels[name].translate(_ESCAPES)}"' for name in sorted(labels)) + "}"


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
