"""Output speed of the bundled engine beside a real vLLM on the same CPU, same model, same client, in one run.

    python -m benchmarks.peers.engine_vs_vllm --vllm VENV/bin/vllm [--int8] [--rounds 3] [--json FILE]

All servers are up and loaded in turn (ABBA), closed loop, random prompts of 256 tokens, 64 tokens out, bf16,
ignore_eos, prompts never repeated. vLLM runs at its best CPU setting: worker threads on both cores
(``VLLM_CPU_OMP_THREADS_BIND=0-N OMP_NUM_THREADS=N+1``); its default keeps one core back. Leave the machine
alone meanwhile: the load average before and after is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.models.bundled import fetch_bundled
from loadgen.measure.stats import Summary
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.workload import preset
from loadgen.target import OpenTarget
from loadgen.targets.server import ServerTarget

METRICS = ("throughput", "ttft_p50", "tpot_p50", "itl_p99")
FLAGS = {"max_model_len": 4096}


def vllm_at_its_best(program: str, model: Path) -> ServerTarget:
    """vLLM on every core, with room for its KV pool, offline."""
    cores = os.cpu_count() or 1
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "OMP_NUM_THREADS": str(cores),
        "PATH": f"{Path(program).parent}:{os.environ['PATH']}",
    }
    return ServerTarget(f"{program} serve {model} {{flags}} --port {{port}}", name="vllm", env=env)


@contextlib.contextmanager
def servers_of(vllm: str, int8: bool) -> Iterator[dict[str, OpenTarget]]:
    """The servers, up: ours, ours in int8 where asked for, vLLM."""
    model = fetch_bundled()
    targets: list[tuple[ServerTarget, Mapping[str, Any]]] = [(ServerTarget.bundled(str(model)), FLAGS)]
    if int8:
        ours = ServerTarget.bundled(str(model), name="int8")
        targets.append((ours, {**FLAGS, "quantization": "int8_per_channel"}))
    targets.append((vllm_at_its_best(vllm, model), FLAGS))
    with contextlib.ExitStack() as stack:
        servers: dict[str, OpenTarget] = {}
        for target, flags in targets:
            servers[target.name] = stack.enter_context(target.open(flags))
            print(f"{target.name} ready after {servers[target.name].start_seconds:.1f} s", flush=True)
        yield servers


def measure(
    servers: dict[str, OpenTarget], concurrency: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Metric values of every run, by server: ABBA, another seed each round, the same one for both."""
    values: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in servers}
    workload = preset("random", max_model_len=4096, vocab_size=49_152, input_len=256, output_len=64)
    for number in range(rounds):
        order = list(servers) if number % 2 == 0 else list(reversed(servers))
        schedule = workload.schedule(
            seed=1000 * concurrency + number,
            arrival=ClosedLoop(concurrency),
            num_requests=concurrency * (3 if concurrency > 1 else 6),
        )
        for name in order:
            summary = Summary(servers[name].run(schedule))
            if summary.value("failed"):
                raise SystemExit(
                    f"{name}: {summary.value('failed'):.0f} requests failed; nothing is reported"
                )
            for metric in METRICS:
                values[name][metric].append(summary.value(metric))
            print(
                f"  c={concurrency} round {number + 1}: {name} {values[name]['throughput'][-1]:.1f} tok/s",
                flush=True,
            )
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", required=True, help="the vllm program of an environment with vllm-cpu 0.32")
    parser.add_argument("--int8", action="store_true", help="ours with --quantization int8_per_channel, too")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each server (default 3)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 1], help="requests in flight")
    parser.add_argument("--json", type=Path, help="write every value here")
    options = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f}")
    results = {}
    with servers_of(options.vllm, options.int8) as servers:
        for concurrency in options.concurrency:
            results[concurrency] = measure(servers, concurrency, options.rounds)
    print(f"load average after: {os.getloadavg()[0]:.2f}\n")
    names = [name for name in servers if name != "vllm"]
    columns = "".join(f"{name:>10}{'ratio':>7}" for name in names)
    print(f"{'concurrency':>11}  {'metric':<11}{'vllm':>10}{columns}   (medians)")
    for concurrency, by_server in results.items():
        for metric in METRICS:
            middle = {name: statistics.median(values[metric]) for name, values in by_server.items()}
            scale, unit = (1, "tok/s") if metric == "throughput" else (1000, "ms")
            row = f"{middle['vllm'] * scale:>10.1f}"
            for name in names:
                ratio = middle[name] / middle["vllm"] if middle["vllm"] else math.nan
                row += f"{middle[name] * scale:>10.1f}{ratio:>7.2f}"
            print(f"{concurrency:>11}  {metric:<11}{row}   {unit}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
