"""A load that makes a server take steps of all kinds, so that a simulation learns what they take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadgen.measure.record import Records, RequestRecord
from loadgen.measure.stats import elsewhere
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.workload import Length, RequestClass, Schedule, Workload
from loadgen.target import OpenTarget

FLAGS = {
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "enable_per_request_metrics": True,
}
"""Of the server: so that everything fits into a step that may."""
FEW_TOKENS, MANY_TOKENS = 200, 500
"""Shorter prompts than the first tell what a request takes, longer ones than the second what a token does."""
_SEED = 900


@dataclass(frozen=True)
class Wave:
    """A closed loop of ``count`` requests; lengths in tokens."""

    concurrency: int
    count: int
    output: int
    prompts: Sequence[tuple[int, float, int]]
    """(mean, spread, weight)."""
    output_spread: float = 0.0

    def schedule(self, seed: int, vocab_size: int) -> Schedule:
        classes = tuple(
            RequestClass(
                f"{mean} tokens", weight, Length(mean, spread), Length(self.output, self.output_spread)
            )
            for mean, spread, weight in self.prompts
        )
        workload = Workload("calibration", classes, vocab_size)
        arrival = ClosedLoop(self.concurrency)
        return workload.schedule(seed=seed, arrival=arrival, num_requests=self.count, warmup=0)


WARM_UP = Wave(4, 8, 8, [(64, 0.0, 1)])
FEW = (
    Wave(1, 3, 32, [(40, 0.0, 1)]),
    Wave(2, 4, 32, [(60, 0.0, 1)]),
    Wave(4, 8, 32, [(80, 0.0, 1)]),
    Wave(8, 16, 32, [(100, 0.0, 1)]),
)
"""At the beginning and at the end, as a second of a shared machine may be unlike the next."""
WAVES = (
    *FEW,
    Wave(12, 24, 24, [(150, 0.0, 1)]),
    Wave(16, 24, 24, [(60, 0.0, 1)]),
    Wave(32, 48, 24, [(40, 0.0, 1)]),
    Wave(16, 16, 80, [(200, 0.0, 1)], output_spread=0.95),
    Wave(32, 32, 130, [(24, 0.0, 1)], output_spread=0.95),
    Wave(1, 30, 3, [(130, 0.8, 8), (350, 0.3, 1), (700, 0.0, 1), (1500, 0.0, 1)]),
    Wave(6, 9, 24, [(600, 0.0, 1)]),
    Wave(10, 30, 24, [(32, 0.5, 3), (200, 0.5, 2), (900, 0.3, 1)]),
    *FEW,
)
"""Decodes of few and many, and of every number as answers end one by one; short and long prompts, apart and
mixed: some 40 s on the bundled model."""


def run(server: OpenTarget, vocab_size: int) -> Iterator[Records]:
    """Load ``server``, one wave after the other; the first warms it up."""
    for number, wave in enumerate((WARM_UP, *WAVES)):
        yield server.run(wave.schedule(_SEED + number, vocab_size))


def entry(runs: Sequence[Records]) -> tuple[float, float]:
    """What a request takes outside of the engine: seconds, and seconds a token of its prompt. Medians, of a
    server with ``--enable-per-request-metrics``.

    By those that came alone: others wait for the step that is under way when they come, which is no time of
    their own.
    """
    alone = [request for run in runs if run.concurrency == 1 for request in run.requests if request.ok]
    base = max(statistics.median(elsewhere(r) for r in alone if _prompt(r) <= FEW_TOKENS), 0.0)
    slopes = [(elsewhere(r) - base) / _prompt(r) for r in alone if _prompt(r) >= MANY_TOKENS]
    return base, max(statistics.median(slopes), 0.0)


def delivery(runs: Sequence[Records], steps: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """How many outputs steps had, and how many seconds later than at best these came to the client.

    ``steps``: how many outputs each had, and when it ended, on a clock of its own; of all ``runs``, in order.
    An output is a chunk, and chunks come in the order of the steps; runs with more of one are left out.
    """
    late: list[tuple[int, float]] = []
    coming = iter(steps)
    for run in runs:
        arrivals = sorted(at for request in run.requests for at in request.chunk_at)
        waits, taken = [], 0
        while taken < len(arrivals) and (step := next(coming, None)):
            outputs, ended = step
            if outputs and taken + outputs <= len(arrivals):
                waits.append((outputs, arrivals[taken + outputs // 2] / 1e9 - ended))
            taken += outputs
        if taken == len(arrivals):
            least = min(wait for _, wait in waits)
            late += [(outputs, wait - least) for outputs, wait in waits]
    return late


def _prompt(request: RequestRecord) -> int:
    return request.prompt_tokens or 0
