"""How often the gate cries wolf, and how often it sees a slowdown: comparisons resampled from real runs.

    python -m benchmarks.loadgen.gate --runs DIR [--collect 48] [--seconds 4] [--comparisons 200]

First, real runs of the bundled engine are collected in DIR until there are ``--collect`` of them, two (A, B)
to each seed in the order AB BA, on two servers of the same config or, with ``--one``, on one. A second call
goes on where the first ended; runs that their client spoilt are made again. Then ``--comparisons`` gates of 8
pairs are drawn from them, sides swapped by a coin: once as they are (a regression is a false alarm), and once
with the latencies of side B prolonged by ``--effect`` (a regression is a find).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from loadgen.compare import Comparison, Pair, compare_runs
from loadgen.measure.record import Records, RequestRecord
from loadgen.measure.stats import Summary
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.workload import Length, RequestClass, Schedule, Workload
from loadgen.target import OpenTarget
from loadgen.targets.server import ServerTarget

FLAGS = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "disable_uvicorn_access_log": True,
}
"""Both runs of a pair send the same prompts: on one server the second would find those cached."""
CONCURRENCY = 4
PAIRS = 8
METRICS = {
    "gate": ("ttft_p50", "ttft_p95", "tpot_p50", "itl_p99", "throughput", "failed"),
    "medians": ("ttft_p50", "tpot_p50", "e2e_p50"),
    "tails": ("ttft_p95", "itl_p99", "e2e_p95"),
}
"""What ``vtune bench compare`` looks at, and its parts."""


# -- collecting ---------------------------------------------------------------------------------


def schedule(seed: int, seconds: float) -> Schedule:
    """Short chats of different lengths: equal ones fall into step in a closed loop, now in one group and
    now in two, and their TTFT has two values."""
    chat = RequestClass("chat", 1.0, Length(16, 0.5), Length(6, 0.5))
    load = Workload("short chats", (chat,))
    return load.schedule(seed=seed, arrival=ClosedLoop(CONCURRENCY), duration=seconds, num_requests=5000)


def path_of(folder: Path, seed: int, side: str) -> Path:
    return folder / f"{seed:03d}-{side}.json"


def collect(folder: Path, runs: int, seconds: float, one: bool) -> None:
    """Make what is missing of ``runs`` runs."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        (seed, side)
        for seed in range(runs // 2)
        for side in ("ab" if seed % 2 == 0 else "ba")
        if not path_of(folder, seed, side).exists()
    ]
    if not missing:
        return
    with ExitStack() as stack:
        target = ServerTarget.bundled()
        servers: dict[str, OpenTarget] = {"a": stack.enter_context(target.open(FLAGS))}
        servers["b"] = servers["a"] if one else stack.enter_context(target.open(FLAGS))
        for server in {id(server): server for server in servers.values()}.values():
            server.run(schedule(10_000, 3.0))  # the first requests of a server are slower
        for seed, side in missing:
            believed(servers[side], schedule(seed, seconds)).save(path_of(folder, seed, side))
            print(f"run {seed:03d}-{side}", file=sys.stderr, flush=True)


def believed(server: OpenTarget, load: Schedule) -> Records:
    """A run that does not call itself spoilt by its client; the last of five tries if need be."""
    for _ in range(5):
        records = server.run(load)
        if records.verdict != "client_limited" and not records.partial:
            break
        print(f"again: {'; '.join(records.reasons)}", file=sys.stderr, flush=True)
    return records


def load_pairs(folder: Path) -> list[Pair]:
    """Every seed of which both runs are there."""
    pairs = []
    for path in sorted(folder.glob("*-a.json")):
        seed = int(path.name.partition("-")[0])
        if path_of(folder, seed, "b").exists():
            pairs.append(Pair(seed, Records.load(path), Records.load(path_of(folder, seed, "b"))))
    return pairs


# -- resampling ---------------------------------------------------------------------------------


def prolonged(records: Records, factor: float) -> Records:
    """As if every latency had been ``factor`` times as long; when requests were sent stays."""

    def stretch(request: RequestRecord) -> RequestRecord:
        def at(time: int) -> int:
            return request.intended + round(factor * (time - request.intended))

        return replace(request, chunk_at=tuple(map(at, request.chunk_at)), end=at(request.end))

    return replace(records, requests=tuple(map(stretch, records.requests)))


def draws(pairs: Sequence[Pair], slower: Mapping[int, Pair], count: int, seed: int) -> Iterator[list[Pair]]:
    """``count`` samples of 8 different pairs, each swapped by a coin. ``slower``: by seed, the same pairs
    with both sides prolonged; side B is taken from them."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        sample = []
        for index in rng.choice(len(pairs), size=PAIRS, replace=False):
            pair = pairs[index]
            changed = slower[pair.seed]
            swapped = bool(rng.integers(2))
            a, b = (pair.b, changed.a) if swapped else (pair.a, changed.b)
            sample.append(Pair(pair.seed, a, b))
        yield sample


def verdicts(
    samples: Iterator[list[Pair]], metrics: Sequence[str], compare: Callable[..., Comparison] = compare_runs
) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """How often the whole comparison, and each metric of it, came to which verdict."""
    whole: Counter[str] = Counter()
    each: dict[str, Counter[str]] = {metric: Counter() for metric in metrics}
    for sample in samples:
        found = compare(sample, metrics)
        whole[found.verdict] += 1
        for row in found.rows:
            each[row.metric][row.verdict] += 1
    return whole, each


def report(pairs: Sequence[Pair], effect: float, count: int) -> bool:
    """Print both tables; whether alarms and finds are what they must be."""
    kept = {pair.seed: pair for pair in pairs}
    stretched = {
        pair.seed: Pair(pair.seed, prolonged(pair.a, 1 + effect), prolonged(pair.b, 1 + effect))
        for pair in pairs
    }
    fine = True
    for name, metrics in METRICS.items():
        for label, slower in ((f"A/A, {name}", kept), (f"{effect:+.0%}, {name}", stretched)):
            whole, each = verdicts(draws(pairs, slower, count, seed=1), metrics)
            _table(label, {"all": whole, **each}, count)
            if slower is kept:
                fine &= whole["regress"] <= 0.05 * count
            elif name == "medians":
                fine &= all(found["regress"] >= 0.9 * count for found in each.values())
    return fine


def _table(label: str, counted: Mapping[str, Counter[str]], count: int) -> None:
    names: tuple[Literal["regress", "improve", "pass", "inconclusive", "invalid"], ...]
    names = ("regress", "improve", "pass", "inconclusive", "invalid")
    print(f"{label:<16}" + "".join(f"{name:>14}" for name in names))
    for metric, found in counted.items():
        print(f"  {metric:<14}" + "".join(f"{found[name] / count:>14.1%}" for name in names))


def spread(pairs: Sequence[Pair], metric: str) -> float:
    """Standard deviation of the log ratio of a pair."""
    ratios = [np.log(Summary(pair.b).value(metric) / Summary(pair.a).value(metric)) for pair in pairs]
    return float(np.std(ratios, ddof=1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--collect", type=int, default=48, help="so many in all (default 48; 0: none)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a run (default 4)")
    parser.add_argument("--one", action="store_true", help="both sides on one server")
    parser.add_argument("--comparisons", type=int, default=200, help="of each kind (default 200)")
    parser.add_argument("--effect", type=float, default=0.1, help="injected into side B (default 0.1)")
    options = parser.parse_args()
    collect(options.runs, options.collect, options.seconds, options.one)
    pairs = load_pairs(options.runs)
    if len(pairs) < PAIRS:
        raise SystemExit(f"{options.runs} has {len(pairs)} pairs of runs: {PAIRS} are needed")
    requests = sum(len(run.requests) for pair in pairs for run in (pair.a, pair.b))
    print(f"{2 * len(pairs)} runs, {requests} requests; spread of a pair's ratio: ", end="")
    figures = sorted({metric for metrics in METRICS.values() for metric in metrics} - {"failed"})
    print(", ".join(f"{metric} {spread(pairs, metric):.1%}" for metric in figures))
    return 0 if report(pairs, options.effect, options.comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
