"""A benchmark's result, of ``vllm bench serve`` or another tool, as a source: latencies and rates only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from doctor.metrics.evaluators import Group
from doctor.metrics.sources import Observation, Source
from doctor.metrics.stated import StatedEvaluator
from loadgen.foreign.read import read_results
from loadgen.foreign.result import STATISTICS, ForeignError, StatedResult
from servers.errors import SourceError
from servers.kinds import SGLANG, VLLM

_LATENCIES = (("ttft", "ttft"), ("itl", "inter_chunk"), ("tpot", "tpot"), ("e2e", "e2e"))
"""Our signals, and the stated metrics. The servers' own ITL, too, is the gap between two chunks."""


class BenchmarkResult(Source):
    """A result file. Its facts (requests, failures, rate reached) say whether it can be relied on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        """Repeats of one load are judged by their means; of several loads, the last. Raises SourceError."""
        runs, notes = self._runs()
        facts = _facts(runs)
        values = dict(_means(runs))
        if "bench_requests" in facts:
            values |= dict.fromkeys(("first_tokens", "finished", "served_total"), facts["bench_requests"])
        group = Group.of(model_name=runs[0].model)
        evaluator = StatedEvaluator(self.name, group, "a benchmark's result does not hold it", values)
        kind = SGLANG if any(run.server == "sglang" for run in runs) else VLLM
        seconds = facts.get("bench_seconds", 0.0)
        return Observation(self.name, evaluator, runs[0].tool, seconds, kind, notes, facts=facts)

    def _runs(self) -> tuple[list[StatedResult], tuple[str, ...]]:
        """Those of the last load, and what is to be said of them."""
        try:
            results = read_results(self.path)
        except ForeignError as error:
            raise SourceError(f"--bench {error}") from None
        runs = [run for run in results if run.asked == results[-1].asked]
        if any(run.seconds is not None and run.seconds <= 0 for run in runs):
            raise SourceError(f"--bench {self.path}: a duration of 0 s; nothing was measured")
        said = [f"{len(runs)} results of one load: judged by their means"] * (len(runs) > 1)
        if len(runs) < len(results):
            said.append(
                f"only the last of several loads is judged ({runs[0].asked}); "
                f"the others are in vtune bench report {self.path}"
            )
        return runs, (*said, *dict.fromkeys(line for run in runs for line in (*run.faults, *run.limits)))


class WithBenchmark(Source):
    """A server's metrics, beside the result of the benchmark that ran meanwhile."""

    def __init__(self, metrics: Source, result: BenchmarkResult) -> None:
        self.name, self._metrics, self._result = metrics.name, metrics, result

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        """The metrics' signals, and the result's facts. Raises SourceError."""
        told, seen = self._result.observe(window, slo), self._metrics.observe(window, slo)
        notes = [f"{told.name}: {note}" for note in told.notes]
        return replace(seen, notes=(*seen.notes, *notes), facts={**seen.facts, **told.facts})


def _means(runs: Sequence[StatedResult]) -> Iterator[tuple[str, float]]:
    """Our signals; what one of the runs does not state is left out."""
    stated = {f"{ours}_{name}": f"{theirs}_{name}" for ours, theirs in _LATENCIES for name in STATISTICS}
    stated |= {"request_rate": "request_rate", "generation_rate": "throughput"}
    figures = {ours: [run.value(theirs) for run in runs] for ours, theirs in stated.items()}
    figures["prompt_tokens_mean"] = [run.prompt_tokens or math.nan for run in runs]
    figures["output_tokens_mean"] = [run.output_tokens or math.nan for run in runs]
    yield from ((name, fmean(values)) for name, values in figures.items() if all(map(math.isfinite, values)))


def _total(runs: Sequence[StatedResult], what: Callable[[StatedResult], float | None]) -> float | None:
    """None where a run does not state it."""
    counts = [count for run in runs if (count := what(run)) is not None]
    return sum(counts) if len(counts) == len(runs) else None


def _facts(runs: Sequence[StatedResult]) -> dict[str, float]:
    counts = {
        "bench_requests": _total(runs, lambda run: run.completed),
        "bench_failed": _total(runs, lambda run: run.failed),
        "bench_seconds": _total(runs, lambda run: run.seconds),
        "bench_rate_share": min(run.rate_share for run in runs),
    }
    return {name: count for name, count in counts.items() if count is not None}
