"""How fast simulated time passes, and whether steps taken together are the same as single ones.

    python -m benchmarks.engine.simulator [--sched-sim VENV/bin/python] [--rounds 3] [--quick] [--json FILE]

An 8B Llama on the H100's data sheet, through ``SimulatedTarget``: scheduler, block pool with prefix caching,
metrics each second, client, records, verdict. ``--sched-sim`` names the interpreter of an environment with
``pip install sched-sim``; it gets the same requests, by turns, in a process of its own, and simulates an H100
of the same model with the same token budget. What each models is printed below the table.

The trace with prefix caching is short: once its blocks have all been used, sched-sim takes minutes for what
took it seconds.

Seconds are of processor time (both are one thread), the least of the rounds; ``wall`` stands beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import engine.sim.server
from benchmarks.engine.shapes import shape
from engine.core import make_scheduler
from loadgen.measure.record import Records
from loadgen.plan.arrivals import Arrival, ClosedLoop, Constant, Poisson
from loadgen.plan.workload import Length, RequestClass, Schedule, Workload, preset
from loadgen.targets.simulated import SimulatedTarget

CONTEXT = 32_768
BUDGET = 8192
PEER = Path(__file__).parents[1] / "peers" / "sched_sim_side.py"
HF = shape("8B", CONTEXT, _name_or_path="Llama-3.1-8B")
MODELLED = """\
ours       vLLM V1's scheduler, rule for rule: chunked prefill, prefix cache by block hash, preemption,
           max_num_seqs. Block tables. Roofline with attention, host time and launch. A client's queues,
           time-outs and drain. vLLM's Prometheus metrics each second, a record a request with every token.
sched-sim  A token budget over waiting and running; its chunked policy does not limit sequences. A count of
           blocks. Roofline without attention FLOPs or host time. Percentiles at the end."""


@dataclass(frozen=True)
class Case:
    name: str
    schedule: Schedule
    seqs: int
    shared: bool = True
    """Whether sched-sim can be given the same: it has no closed loop."""
    prefix_caching: bool = True


@dataclass(frozen=True)
class Timing:
    """Of one run: seconds simulated, spent by the processor, and on the wall; output tokens."""

    simulated: float
    cpu: float
    wall: float
    tokens: int

    @property
    def speed(self) -> float:
        return self.simulated / self.cpu


def cases(quick: bool) -> list[Case]:
    loads = {f"{n} running": together(n, 250 if quick else 1000) for n in (64, 256)}
    loads["1024 running"] = together(1024, 200 if quick else 400, prompt=32)
    trace = "trace: chat, 20 req/s"
    closed = chat(ClosedLoop(256), 400 if quick else 2000)
    return [
        Case("256 running, chat, closed loop", closed, 256, shared=False),
        *(Case(name, load, 1024) for name, load in loads.items()),
        Case(f"{trace}, 300 requests", chat(Poisson(20), 300), 1024),
        *(
            Case(f"{name}, no prefix caching", load, 1024, prefix_caching=False)
            for name, load in {**loads, trace: chat(Poisson(20), 300 if quick else 3000)}.items()
        ),
    ]


def together(count: int, output: int, prompt: int = 512) -> Schedule:
    """``count`` requests that come at once; their answers end one by one. All of it fits into the memory."""
    decode = Workload("decode", (RequestClass("decode", 1, Length(prompt), Length(output, 0.5)),))
    return decode.schedule(seed=0, arrival=Constant(1e6), num_requests=count, warmup=0)


def chat(arrival: Arrival, count: int) -> Schedule:
    return preset("chat", max_model_len=CONTEXT).schedule(
        seed=0, arrival=arrival, num_requests=count, warmup=0
    )


def ours(target: SimulatedTarget, case: Case) -> tuple[Timing, Records]:
    before, wall, cpu = target.clock(), time.perf_counter(), time.process_time()
    flags = {"max_num_batched_tokens": BUDGET, "max_num_seqs": case.seqs}
    with target.open({**flags, "enable_prefix_caching": case.prefix_caching}) as server:
        records = server.run(case.schedule)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    tokens = sum(r.completion_tokens or 0 for r in records.requests)
    assert all(r.ok for r in records.requests)
    return Timing(target.clock() - before, cpu, wall, tokens), records


def singly(target: SimulatedTarget, case: Case) -> tuple[Timing, Records]:
    """:func:`ours`, with a look at each request in each step."""
    usual = engine.sim.server._make_scheduler
    engine.sim.server._make_scheduler = make_scheduler
    try:
        return ours(target, case)
    finally:
        engine.sim.server._make_scheduler = usual


def theirs(python: str, case: Case) -> Timing:
    requests = [[r.intended, r.prompt_token_ids, r.max_tokens] for r in case.schedule.requests]
    given = {"requests": requests, "budget": BUDGET, "sequences": case.seqs}
    given |= {"prefix_caching": case.prefix_caching}
    done = subprocess.run([python, PEER], input=json.dumps(given), capture_output=True, text=True, check=True)
    return Timing(**json.loads(done.stdout))


def measure(target: SimulatedTarget, case: Case, rounds: int, peer: str | None) -> dict[str, list[Timing]]:
    """By turns: ours, step by step, theirs."""
    timings: dict[str, list[Timing]] = {"ours": [], "single steps": [], "sched-sim": []}
    for _ in range(rounds):
        together, records = ours(target, case)
        single, same = singly(target, case)
        if records != same:
            raise SystemExit(f"{case.name}: single steps leave other records")
        timings["ours"].append(together)
        timings["single steps"].append(single)
        if peer and case.shared:
            timings["sched-sim"].append(theirs(peer, case))
    return timings


def rows(name: str, timings: dict[str, list[Timing]]) -> list[str]:
    lines = []
    best = {who: min(runs, key=lambda run: run.cpu) for who, runs in timings.items() if runs}
    for who, run in best.items():
        against = "" if who == "ours" else f"{best['ours'].speed / run.speed:6.1f} x"
        lines.append(
            f"{name:40}{who:14}{run.simulated:10.1f} s{run.cpu:9.2f} s{run.wall:9.2f} s{run.speed:9.0f} x"
            f"{run.tokens / run.cpu:13,.0f}{against:>12}"
        )
        name = ""
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sched-sim", metavar="PYTHON", help="interpreter that has sched-sim")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a fifth of the load, one round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        json.dump(HF, config)
        config.flush()
        target = SimulatedTarget("simulated:h100", config.name)
    print(
        f"{'load':40}{'simulator':14}{'simulated':>12}{'cpu':>11}{'wall':>11}{'real time':>11}"
        f"{'tokens/cpu s':>13}{'ours ahead':>12}"
    )
    ours(target, Case("to import everything", together(8, 10), 256))
    found = {}
    for case in cases(options.quick):
        timings = measure(target, case, 1 if options.quick else options.rounds, options.sched_sim)
        found[case.name] = {who: [asdict(run) for run in runs] for who, runs in timings.items()}
        print("\n".join(rows(case.name, timings)), flush=True)
    print(f"\nours and single steps: equal records, metrics of each second included\n\n{MODELLED}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
