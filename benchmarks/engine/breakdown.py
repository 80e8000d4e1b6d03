"""Where the time of an engine step goes, and how much of the machine's roofline its products reach.

    python -m benchmarks.engine.breakdown [--quick] [--quantization int8_per_channel] [--no-server]

The bundled model, prompts of random tokens. First in one process, step by step: what threads spend on linear
layers, head, attention and row-wise operations (norms, activation, rotary embedding, quantisation) is counted
by the kernels themselves and divided by the threads; ``waiting`` is the rest of their time. Then what a
server adds: the CPU time of its HTTP process for each step under a closed loop.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.roofline import Roofline, measure_roofline
from benchmarks.loadgen.own_server import own_server
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kernels.native import NativeLayers
from engine.kernels.native_library import Spent
from engine.request import Request, SamplingParams
from loadgen.measure.stats import Summary
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.workload import preset

PROMPT, OUTPUT = 256, 64
COLUMNS = (
    "linear",
    "head",
    "attention",
    "row-wise",
    "waiting",
    "inputs",
    "sampling",
    "scheduling",
    "the rest",
)


@dataclass(frozen=True)
class Part:
    """Seconds of one step, by column; and the tokens and rows of logits that it computed."""

    tokens: int
    rows: int
    total: float
    seconds: dict[str, float]


class Probe:
    """An engine whose steps are measured."""

    def __init__(self, quantization: str | None) -> None:
        config = EngineConfig(max_model_len=4096, quantization=quantization)  # type: ignore[arg-type]
        self.core = EngineCore(config)
        runner: Any = self.core.runner
        self.decoder = runner._decoder
        self.layers: NativeLayers = self.decoder.fused
        if not isinstance(self.layers, NativeLayers):
            raise SystemExit("needs the C++ kernels")
        self.layers.spent = Spent()
        self._clock = {"seconds": 0.0}
        self._timed: dict[str, float] = defaultdict(float)
        for owner, name, column in (
            (self.decoder, "fused", "layers"),
            (self.decoder, "logits", "head"),
            (runner, "_inputs", "inputs"),
            (runner, "_emit", "sampling"),
            (self.core.scheduler, "schedule", "scheduling"),
            (self.core.scheduler, "update", "scheduling"),
            (self.core.metrics, "observe", "scheduling"),
        ):
            self._time(owner, name, column)
        self._ticks_per_second = _ticks_per_second()
        self._threads = len(os.sched_getaffinity(0))

    def _time(self, owner: Any, name: str, column: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self._timed[column] += time.perf_counter() - started

        setattr(owner, name, timed)

    def steps(self, concurrency: int) -> Iterator[Part]:
        """Every step of as many requests, which arrive together."""
        chooser = random.Random(concurrency)
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        for number in range(concurrency):
            prompt = [chooser.randrange(100, 49_000) for _ in range(PROMPT)]
            self.core.add(Request(f"{concurrency}-{number}-{time.monotonic_ns()}", prompt, sampling))
        while self.core.has_unfinished:
            yield self._step()

    def _step(self) -> Part:
        spent = self.layers.spent = Spent()
        self._timed.clear()
        started = time.perf_counter()
        plan, output = self.core.step()
        total = time.perf_counter() - started
        each = self._ticks_per_second * self._threads
        seconds = {
            "linear": spent.linear / each,
            "attention": spent.attention / each,
            "row-wise": spent.row_wise / each,
            **{name: self._timed[name] for name in ("head", "inputs", "sampling", "scheduling")},
        }
        seconds["waiting"] = self._timed["layers"] - sum(
            seconds[name] for name in ("linear", "attention", "row-wise")
        )
        seconds["the rest"] = total - sum(seconds.values())
        return Part(plan.num_scheduled_tokens, len(output.outputs), total, seconds)


def _ticks_per_second() -> float:
    """Of the processor's clock that the kernels count with: the nominal one, as the kernel found it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return float(line.partition(":")[2]) * 1e6
    raise SystemExit("/proc/cpuinfo tells no clock")


def median(parts: list[Part]) -> Part:
    """Of each figure the median over steps of one kind."""
    middle = {name: statistics.median(part.seconds[name] for part in parts) for name in COLUMNS}
    total = statistics.median(part.total for part in parts)
    return Part(parts[0].tokens, parts[0].rows, total, middle)


def show(probe: Probe, roofline: Roofline, kinds: dict[str, Part], int8: bool) -> None:
    config = probe.decoder.config
    heads = (config.num_heads + 2 * config.num_kv_heads + config.num_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    names = "".join(f"{name:>11}" for name in COLUMNS)
    print(f"\nms per step{'total':>18}{names}   of peak, of memory's speed")
    for kind, part in kinds.items():
        values = "".join(f"{1e3 * part.seconds[name]:>11.2f}" for name in COLUMNS)
        weights = layer * config.num_layers
        flops = 2 * weights * part.tokens / part.seconds["linear"]
        read = weights * (1 if int8 else 2) / part.seconds["linear"]
        peak = roofline.int8 if int8 else roofline.bf16
        shares = f"{flops / peak:>9.0%} {read / roofline.memory:>11.0%}"
        print(f"{kind:<19}{1e3 * part.total:>10.2f}{values}   {shares}")


@contextmanager
def cpu_seconds(pid: int, into: dict[str, float], name: str) -> Iterator[None]:
    """CPU time of a process during the body."""

    def now() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = now()
    yield
    into[name] = now() - before


def serve(concurrency: int, flags: dict[str, Any]) -> None:
    """Print what a server spends beside the engine."""
    workload = preset("random", max_model_len=4096, vocab_size=49_152, input_len=PROMPT, output_len=OUTPUT)
    schedule = workload.schedule(
        seed=1,
        arrival=ClosedLoop(concurrency),
        num_requests=concurrency * (3 if concurrency > 1 else 8),
    )
    with own_server({"max_model_len": 4096, **flags}) as server:
        before = server.metrics()
        cpu: dict[str, float] = {}
        with (
            cpu_seconds(server.pid("APIServer"), cpu, "http"),
            cpu_seconds(server.pid("EngineCore"), cpu, "engine"),
        ):
            started = time.monotonic()
            summary = Summary(server.target.run(schedule))
            seconds = time.monotonic() - started
        steps = (
            server.metrics()["vllm:iteration_tokens_total_count"]
            - before["vllm:iteration_tokens_total_count"]
        )
    print(
        f"server, {concurrency:>2} at once: {summary.value('throughput'):.1f} tok/s, TPOT "
        f"{1e3 * summary.value('tpot_p50'):.1f} ms; {1e3 * seconds / steps:.2f} ms per step, of CPU time "
        f"{1e3 * cpu['engine'] / steps:.2f} ms in the engine process, {1e3 * cpu['http'] / steps:.2f} ms in "
        "the HTTP process"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--quantization", choices=["int8_per_channel"])
    parser.add_argument("--no-server", action="store_true", help="only the engine, in this process")
    options = parser.parse_args()
    roofline = measure_roofline(len(os.sched_getaffinity(0)))
    print(roofline.describe())
    probe = Probe(options.quantization)
    list(probe.steps(1))  # touches all memory
    kinds: dict[str, list[Part]] = defaultdict(list)
    for concurrency in (1, 16):
        for _ in range(1 if options.quick else 3):
            for part in probe.steps(concurrency):
                if part.tokens == concurrency:
                    kinds[f"decode, {concurrency} requests"].append(part)
                elif part.tokens in (PROMPT, 8 * PROMPT):
                    kinds[f"prefill, {part.tokens} tokens"].append(part)
    show(
        probe,
        roofline,
        {kind: median(parts) for kind, parts in kinds.items()},
        options.quantization is not None,
    )
    if not options.no_server:
        del probe
        for concurrency in (1, 16):
            serve(concurrency, {"quantization": options.quantization} if options.quantization else {})


if __name__ == "__main__":
    main()
