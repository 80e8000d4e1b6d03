"""The text of metrics that are read again and again: only the lines that changed are written anew.

prometheus_client builds every line of ``/metrics`` from its parts each time, which takes milliseconds. A
simulation is scraped every second of its virtual time, hundreds of times as often as a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from prometheus_client.utils import floatToGoString

from engine.metrics.families import Labels, MetricFamily

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Exposition:
    """What prometheus_client would write of ``families``, without the times of their creation."""

    def __init__(self, families: Sequence[MetricFamily]) -> None:
        self._children = [child for family in families for _, child in family.children]
        self._heads = list(chain.from_iterable(map(_heads, families)))
        self._seen: list[float | None] = [None] * len(self._heads)
        self._lines = [""] * len(self._heads)

    def render(self) -> str:
        """The text as of now."""
        seen, lines = self._seen, self._lines
        numbers = chain.from_iterable([child.read() for child in self._children])
        for row, (number, head) in enumerate(zip(numbers, self._heads, strict=True)):
            if number != seen[row]:
                seen[row] = number
                lines[row] = f"{head} {floatToGoString(number)}\n"
        return "".join(lines)


def _heads(family: MetricFamily) -> Iterator[str]:
    """What precedes each number of a family: the labelled name, and before the first one the comments."""
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    before = f"# HELP {name} {family.text}\n# TYPE {name} {family.kind}\n"
    for labels, child in family.children:
        for suffix, more in child.lines():
            yield f"{before}{name}{suffix}{_labelled({**labels, **more})}"
            before = ""


def _labelled(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{labels[name].translate(_ESCAPES)}"' for name in sorted(labels)) + "}"
