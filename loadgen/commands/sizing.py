"""The fewest GPUs that hold an SLO under a load: ``vtune simulate --size``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from loadgen.measure.estimator import run_value
from loadgen.measure.stats import Summary
from loadgen.output import report
from loadgen.target import StartFailed
from servers.slo.bounds import LATENCIES, Bound, family_of, format_value, metric_label

if TYPE_CHECKING:
    from loadgen.measure.record import Records

WIDTHS = (1, 2, 4, 8)
"""Tensor parallel sizes that are tried where the flags give none."""
MAX_REPLICAS = 256
"""Replicas that are tried at most."""
SECONDS_PER_HOUR = 3600.0
TOKENS = 1_000_000
"""Of which the price is told."""


@dataclass(frozen=True)
class Fleet:
    """One that was simulated. ``figures``: by the bound's name; ``throughput``: output tokens/s."""

    width: int
    """GPUs per replica (tensor parallel)."""
    replicas: int
    figures: Mapping[str, float]
    failed: int
    throughput: float

    @property
    def gpus(self) -> int:
        return self.width * self.replicas

    def holds(self, bounds: Sequence[Bound], slower: float = 1.0) -> bool:
        """Whether it would hold every bound if all latencies were ``slower`` times what was simulated, and
        no request fails."""
        return not self.failed and all(
            bound.violation(self.figures[bound.name] * (slower if _is_latency(bound) else 1.0)) <= 0
            for bound in bounds
        )

    def price(self, per_hour: float) -> float:
        """Of a million output tokens, at ``per_hour`` for a GPU."""
        return per_hour * self.gpus * TOKENS / (SECONDS_PER_HOUR * self.throughput)


@dataclass
class Sizing:
    """Searches the fewest replicas of every width by doubling and bisection; each fleet is simulated once.

    ``simulate``: (width, replicas) -> records; raises StartFailed. ``error``: share by which simulated
    latencies may be off, 0 where that is not known.
    """

    simulate: Callable[[int, int], Records]
    bounds: Sequence[Bound]
    widths: Sequence[int] = WIDTHS
    most: int = MAX_REPLICAS
    error: float = 0.0
    tried: dict[tuple[int, int], Fleet] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    """Why replicas of a width do not start."""

    def fewest(self, slower: float = 1.0) -> Fleet | None:
        """The fleet with the fewest GPUs that holds every bound, and of those with the fewest replicas; None
        where none of at most ``most`` replicas does."""
        best: Fleet | None = None
        for width in self.widths:
            most = self.most if best is None else best.gpus // width
            best = self._of_width(width, most, slower) or best
        return best

    def _of_width(self, width: int, most: int, slower: float) -> Fleet | None:
        """Of at most so many replicas; more of them are taken to be no worse."""
        few, many = 0, 1
        while many <= most and (fleet := self._fleet(width, many)):
            if fleet.holds(self.bounds, slower):
                break
            few, many = many, most + 1 if many == most else min(2 * many, most)
        else:
            return None
        while many - few > 1:
            middle = (few + many) // 2
            fleet = self._fleet(width, middle)
            assert fleet is not None, "one that starts alone starts beside others"
            few, many = (few, middle) if fleet.holds(self.bounds, slower) else (middle, many)
        return self.tried[width, many]

    def _fleet(self, width: int, replicas: int) -> Fleet | None:
        if width in self.refused:
            return None
        if (width, replicas) not in self.tried:
            try:
                records = self.simulate(width, replicas)
            except StartFailed as failure:
                self.refused[width] = failure.detail
                return None
            summary = Summary(records)
            figures = {b.name: run_value(summary, b.metric, b.cls) for b in self.bounds}
            self.tried[width, replicas] = Fleet(
                width, replicas, figures, int(summary.value("failed")), summary.value("throughput")
            )
        return self.tried[width, replicas]


@dataclass(frozen=True)
class Size:
    """The answer. ``best``: None where no fleet holds the SLO; ``faster`` and ``slower``: the fewest GPUs if
    all latencies were shorter or longer by ``error`` (a factor of 1 + error)."""

    best: Fleet | None
    faster: Fleet | None
    slower: Fleet | None
    error: float
    bounds: tuple[Bound, ...]
    tried: tuple[Fleet, ...]
    refused: Mapping[int, str]


def size(search: Sizing) -> Size:
    """Raises what the simulation raises, but StartFailed."""
    best = search.fewest()
    faster = search.fewest(1 / (1 + search.error)) if search.error else best
    slower = search.fewest(1 + search.error) if search.error else best
    tried = sorted(search.tried.values(), key=lambda fleet: (fleet.width, fleet.replicas))
    return Size(best, faster, slower, search.error, tuple(search.bounds), tuple(tried), dict(search.refused))


def conclusions(found: Size, price: float | None) -> Iterator[str]:
    """What the fleets say, in sentences."""
    for width, why in found.refused.items():
        yield f"{_gpus(width)} per replica: does not start: {why}"
    if found.best is None:
        most = max((fleet.replicas for fleet in found.tried), default=0)
        yield f"No fleet of up to {most} replicas holds the SLO" + (
            ": no replica starts" if not found.tried else ""
        )
        return
    best = found.best
    yield f"Fewest GPUs that hold the SLO: {_words(best)}"
    if found.error:
        low, high = (_gpus(f.gpus) if f else "more than was tried" for f in (found.faster, found.slower))
        yield (
            f"Were every latency {100 * found.error:.0f} % shorter or longer, as in 90 % of published runs "
            f"on such GPUs: {low if low == high else f'{low} to {high}'}"
        )
    else:
        yield "How far such a simulation is off is not known: no interval"
    if price is not None and best.throughput > 0:
        yield f"Cost: {best.price(price):.3g} per million output tokens, at {price:g} per GPU and hour"


def _words(fleet: Fleet) -> str:
    replicas = "1 replica" if fleet.replicas == 1 else f"{fleet.replicas} replicas"
    return f"{_gpus(fleet.gpus)} ({replicas} of {_gpus(fleet.width)})"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def rows(found: Size) -> list[tuple[str, ...]]:
    """Headings, then a row per fleet that was simulated."""
    head = ("TP", "replicas", "GPUs", *(metric_label(bound.name) for bound in found.bounds), "failed",
            "output tok/s", "SLO")  # fmt: skip
    return [head, *(_row(fleet, found) for fleet in found.tried)]


def _row(fleet: Fleet, found: Size) -> tuple[str, ...]:
    figures = (format_value(bound.metric, fleet.figures[bound.name]) for bound in found.bounds)
    verdict = "held" if fleet.holds(found.bounds) else "missed"
    counts = (str(n) for n in (fleet.width, fleet.replicas, fleet.gpus))
    mark = f"{verdict}, the fewest" if fleet is found.best else verdict
    return (*counts, *figures, str(fleet.failed), report.number(fleet.throughput), mark)


def print_size(found: Size, price: float | None, file: IO[str]) -> None:
    console = report.wide_console(file)
    console.print("ESTIMATE: nothing was measured", style="bold yellow" if console.is_terminal else None)
    console.print(f"SLO: {', '.join(map(str, found.bounds))}")
    heads, *table = rows(found)
    console.print(report.text_table(heads, table, left=0))
    for line in conclusions(found, price):
        console.print(line, soft_wrap=True)


def size_markdown(found: Size, price: float | None) -> str:
    from loadgen.output.page import render

    heads, *table = rows(found)
    lines = ["ESTIMATE: nothing was measured", *conclusions(found, price)]
    return render("table.md.j2", heads=heads, rows=table, lines=lines)


def size_json(found: Size, price: float | None) -> dict[str, Any]:
    """Latencies in seconds; ``gpus_low`` and ``gpus_high``: null where more are needed than were tried."""

    def described(fleet: Fleet | None) -> dict[str, Any] | None:
        if fleet is None:
            return None
        return {
            "tensor_parallel_size": fleet.width,
            "replicas": fleet.replicas,
            "gpus": fleet.gpus,
            "figures": dict(fleet.figures),
            "failed": fleet.failed,
            "throughput": fleet.throughput,
            "held": fleet.holds(found.bounds),
        }

    answer = {
        "estimate": True,
        "slo": [str(bound) for bound in found.bounds],
        "best": described(found.best),
        "error": found.error or None,
        "gpus_low": found.faster.gpus if found.faster else None,
        "gpus_high": found.slower.gpus if found.slower else None,
        "tried": [described(fleet) for fleet in found.tried],
        "refused": {str(width): why for width, why in found.refused.items()},
    }
    if price is not None and found.best and found.best.throughput > 0:
        answer["price_per_million_output_tokens"] = found.best.price(price)
    return answer


def _is_latency(bound: Bound) -> bool:
    return family_of(bound.metric) in LATENCIES
