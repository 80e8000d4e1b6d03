"""Problems for tuners: a server, a load, an SLO, and the values that each knob may take.

What no memory plan knows is a region in which servers run out of memory: see :func:`runs_out_of_memory`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tuner.noise import SCALE, TABLE_AXES, TABLE_SETTING
from engine.config import GIB
from engine.sim.devices import DEVICES
from loadgen.targets.simulated import PREFIX, gpu_defaults
from servers.slo.objective import Slo, parse_slo
from tuner.job.job import Job

TOKENS, SEQS, MEMORY = "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization"
THRESHOLD, DRAFTS = "long_prefill_token_threshold", "num_speculative_tokens"
SPECULATION = "speculative_config"
Key = tuple[int, int, float, int, int]
"""Tokens, sequences, utilization, threshold, drafts: what a simulated config is told apart by."""


@dataclass(frozen=True)
class Problem:
    """One search: a server, a load, an SLO, and the values that each knob may take."""

    name: str
    target: str
    model: str
    workload: str
    slo_text: str
    axes: Mapping[str, Sequence[int | float]]
    rate: float | None = None
    concurrency: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Flags that stay as they are."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The baseline, beside the device's own defaults."""
    scale: float | None = None
    """Of prompt lengths."""
    wrong: str = "coefficients"
    """How the wrong prior is wrong: "coefficients", or the target that it speaks of instead."""
    start_seconds: float = 45.0
    run_seconds: float = 40.0
    budget: float = 4500.0
    """Seconds for all of a search. A start and a run as above are what it affords some 45 times."""

    @property
    def slo(self) -> Slo:
        return parse_slo(self.slo_text)

    @property
    def baseline(self) -> dict[str, Any]:
        return {MEMORY: 0.92, THRESHOLD: 0, **gpu_defaults(self.target), **self.fixed, **self.defaults}

    @property
    def job(self) -> Job:
        """As ``vtune optimize`` would have it."""
        vary: dict[str, tuple[Any, ...] | None] = {
            name: tuple(values) for name, values in self.axes.items() if name != DRAFTS
        }
        if DRAFTS in self.axes:
            vary[SPECULATION] = None
        return Job(
            slo=self.slo_text,
            target=self.target,
            model=self.model,
            flags=self.baseline,
            workload=self.workload,
            rate=self.rate,
            concurrency=self.concurrency,
            budget=self.budget,
            run_seconds=self.run_seconds,
            fix=("all",),
            vary=vary,
        )

    def configs(self) -> Iterator[dict[str, Any]]:
        """Every config of the space, as flags."""
        for values in itertools.product(*self.axes.values()):
            yield self.flags(dict(zip(self.axes, values, strict=True)))

    def flags(self, chosen: Mapping[str, int | float]) -> dict[str, Any]:
        """``chosen`` by axis, as a server is started with it."""
        flags: dict[str, Any] = {name: value for name, value in chosen.items() if name != DRAFTS}
        if drafts := chosen.get(DRAFTS, 0):
            flags[SPECULATION] = {"method": "ngram", DRAFTS: drafts}
        return {**self.baseline, **flags}

    def key(self, flags: Mapping[str, Any]) -> Key:
        """Two configs with the same key do the same. A threshold that no step reaches is as good as none."""
        speculation = flags.get(SPECULATION) or {}
        tokens, threshold = flags[TOKENS], flags.get(THRESHOLD) or 0
        drafts = speculation.get(DRAFTS, 0)
        return (
            tokens,
            flags[SEQS],
            flags.get(MEMORY, 0.92),
            threshold if threshold < tokens else 0,
            int(min(self.axes.get(DRAFTS, (0,)), key=lambda known: abs(known - drafts))),
        )


CPU = "simulated:cpu"
GPU_AXES: Mapping[str, Sequence[int | float]] = {
    TOKENS: (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384),
    SEQS: (32, 64, 128, 256, 512, 1024),
    MEMORY: (0.8, 0.85, 0.9, 0.92, 0.95),
    THRESHOLD: (0, 512, 2048),
}
BATCH_AXES: Mapping[str, Sequence[int | float]] = {
    TOKENS: (512, 1024, 2048, 4096, 8192, 16_384),
    SEQS: (16, 24, 32, 48, 64, 80, 96, 128, 256, 1024),
    MEMORY: (0.8, 0.85, 0.9, 0.92, 0.95),
    THRESHOLD: (0, 1024),
}
SPECULATIVE_AXES: Mapping[str, Sequence[int | float]] = {
    TOKENS: (1024, 2048, 4096, 8192),
    SEQS: (8, 12, 16, 32, 128, 1024),
    MEMORY: (0.85, 0.9, 0.92, 0.95),
    DRAFTS: (0, 1, 2, 3, 4, 5),
}
CPU_AXES: Mapping[str, Sequence[int | float]] = {
    TOKENS: (64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048),
    SEQS: (4, 8, 16, 32, 64, 128),
    MEMORY: (0.8, 0.92, 0.95),
    THRESHOLD: (0, 64, 128, 256),
}
PROBLEMS = (
    Problem("chat itl 8B on H100", "simulated:h100", "8B", "chat", "itl", GPU_AXES, rate=24.0),
    Problem(
        "chat ttft 8B on H100 small start", "simulated:h100", "8B", "chat", "ttft", GPU_AXES, rate=26.0,
        defaults={TOKENS: 2048, SEQS: 64}, wrong="simulated:a100",
    ),
    Problem(
        "batch throughput 8B on L40S", "simulated:l40s", "8B", "batch", "throughput", BATCH_AXES,
        concurrency=112, wrong="simulated:h100", run_seconds=60.0, budget=6000.0,
    ),
    Problem(
        "mixed goodput 8B on H100", "simulated:h100", "8B", "mixed",
        "ttft_p95<2s,itl_p99<50ms", GPU_AXES, rate=14.0,
    ),
    Problem(
        "mixed itl 8B on L40S", "simulated:l40s", "8B", "mixed", "itl", GPU_AXES, rate=1.6,
        wrong="simulated:h100", run_seconds=100.0, budget=7500.0,
    ),
    Problem(
        "rag goodput 70B on 4 H100", "simulated:h100", "70B", "rag",
        "ttft_p95<4s,itl_p99<120ms", GPU_AXES, rate=1.2, fixed={"tensor_parallel_size": 4},
        start_seconds=90.0, run_seconds=120.0, budget=10_000.0,
    ),
    Problem(
        "chat throughput 70B on 8 H100 drafts", "simulated:h100", "70B", "chat", "throughput",
        SPECULATIVE_AXES, concurrency=24, fixed={"tensor_parallel_size": 8}, wrong="simulated:a100",
        start_seconds=90.0, run_seconds=20.0, budget=5000.0,
    ),
    Problem(
        "mixed itl small model on a CPU", CPU, "bundled", "mixed", "itl", CPU_AXES, rate=1.6,
        scale=0.1, defaults={TOKENS: 128, SEQS: 32}, start_seconds=4.0, run_seconds=20.0, budget=1200.0,
    ),
)  # fmt: skip
MEASURED = Problem(
    "mixed itl measured on the bundled engine", "bundled", "bundled", "mixed", "itl", TABLE_AXES,
    rate=TABLE_SETTING.rate, scale=SCALE, defaults={TOKENS: 256, SEQS: 64},
    start_seconds=4.7, run_seconds=8.0, budget=500.0,
)  # fmt: skip
"""Its table was measured, a run per config (``noise.py``); its priors are the simulator's."""


def runs_out_of_memory(problem: Problem, key: Key) -> bool:
    """What a server takes beside the plan's, against what gpu_memory_utilization leaves.

    Workspaces of kernels grow with the tokens of a step, the sampler's with its sequences, and memory
    fragments; the figures are of the size that users report.
    """
    tokens, seqs, memory, _, drafts = key
    if problem is MEASURED:
        return False
    if problem.target == CPU:
        return 20e6 + 40e3 * tokens + 0.3e6 * seqs > (1 - memory) * 2 * GIB
    device = DEVICES[problem.target.removeprefix(PREFIX)]
    hidden = 1.5 * GIB + 250e3 * tokens + 2e6 * seqs * (1 + 0.25 * drafts)
    return hidden > (1 - memory) * device.memory_bytes
