"""``simulated:DEVICE`` as a target, and ``vtune simulate`` over it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_8b
import pytest
from typer.testing import CliRunner

import engine.sim.server
import vtune_cli
from engine.core import make_scheduler
from loadgen.measure.record import Records
from loadgen.measure.stats import Summary
from loadgen.plan.arrivals import ClosedLoop, Poisson
from loadgen.plan.workload import Length, RequestClass, Schedule, Workload, preset
from loadgen.target import StartFailed
from loadgen.targets.simulated import SimulatedTarget, SimulatedTargetError

CONFIG = {**llama_8b.CONFIG, "_name_or_path": "some/llama-8b"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture
def target(model: str) -> SimulatedTarget:
    return SimulatedTarget("simulated:h100", model)


def load(rate: float = 20.0, count: int = 60, workload: str = "chat") -> Schedule:
    return preset(workload, max_model_len=8192).schedule(seed=1, arrival=Poisson(rate), num_requests=count)


def run(target: SimulatedTarget, schedule: Schedule, **flags: Any) -> Records:
    with target.open(flags) as server:
        return server.run(schedule)


def test_priorities_of_classes_are_heeded_by_the_policy_that_asks_for_them(target: SimulatedTarget) -> None:
    """Many short requests behind a few long ones: with priorities the short ones do not wait for them."""
    classes = [("S", 80.0, 100, 50, 0), ("B", 20.0, 6000, 100, 9)]
    workload = Workload("w", tuple(RequestClass(n, w, Length(i), Length(o), p) for n, w, i, o, p in classes))
    schedule = workload.schedule(seed=1, arrival=Poisson(40.0), num_requests=200)
    fcfs, ranked = (
        Summary(run(target, schedule, max_num_seqs=8, scheduling_policy=policy)).value("ttft_p90", "S")
        for policy in ("fcfs", "priority")
    )
    assert ranked < fcfs / 4


def test_a_run_has_the_records_of_a_real_one(target: SimulatedTarget, tmp_path: Path) -> None:
    schedule = load()
    records = run(target, schedule)
    assert records.schedule_sha256 == schedule.sha256
    for request, planned in zip(records.requests, schedule.requests, strict=True):
        assert request.ok
        assert request.intended == round(planned.intended * 1e9)
        assert request.completion_tokens == planned.max_tokens == len(request.chunk_at)
        assert request.prompt_tokens == len(planned.prompt_token_ids or ())
    assert "90% of the data sheet's FLOP/s" in records.environment["estimate"]
    records.save(tmp_path / "x.json")
    assert Records.load(tmp_path / "x.json") == records


def test_the_same_run_gives_the_same_records(target: SimulatedTarget) -> None:
    assert run(target, load()) == run(target, load())


def test_a_step_takes_what_the_roofline_says(target: SimulatedTarget) -> None:
    lone = preset("random", max_model_len=8192, input_len=16, output_len=20)
    schedule = lone.schedule(seed=0, arrival=ClosedLoop(1), num_requests=1, warmup=0)
    (request,) = run(target, schedule).requests
    times = target.simulation({}).times
    floor = times.host + times.launch + times.weights
    gaps = [(b - a) / 1e9 for a, b in pairwise(request.chunk_at)]
    assert min(gaps) == pytest.approx(floor, rel=0.02)


def test_flags_change_what_they_should(target: SimulatedTarget) -> None:
    schedule = load(rate=40, count=150, workload="mixed")
    small, large = (Summary(run(target, schedule, max_num_batched_tokens=n)) for n in (1024, 16_384))
    assert small.value("itl_p99") < large.value("itl_p99") / 2


def test_a_prompt_that_is_too_long_fails_and_says_why(model: str) -> None:
    records = run(SimulatedTarget("simulated:h100", model), load(), max_model_len=300)
    failed = [r for r in records.requests if not r.ok]
    assert failed
    assert all("context is 300 tokens" in r.detail for r in failed)


LOADS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "open": ({}, {"arrival": Poisson(30)}, {}, 1),
    "closed": ({"max_num_seqs": 12}, {"arrival": ClosedLoop(16)}, {}, 1),
    "hang-ups": ({"max_num_seqs": 8}, {"arrival": Poisson(60)}, {"timeout": 1.5}, 1),
    "cut off": ({"max_num_seqs": 8}, {"arrival": Poisson(60)}, {"drain": 0.5}, 1),
    "fleet": ({"max_num_seqs": 8}, {"arrival": Poisson(60)}, {}, 3),
    "preemptions": ({"num_gpu_blocks_override": 520, "max_model_len": 8000}, {"arrival": Poisson(90)}, {}, 1),
}


@pytest.mark.parametrize("case", LOADS.values(), ids=LOADS)
def test_steps_taken_together_leave_the_records_of_single_ones(
    case: tuple[Any, ...], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, arrival, options, replicas = case
    schedule = preset("chat", max_model_len=8192).schedule(seed=3, num_requests=60, **arrival)

    def measured() -> tuple[Any, ...]:
        fleet = SimulatedTarget("simulated:h100", model, replicas=replicas)
        with fleet.open(flags) as server:
            return server.run(schedule, **options), server.parts, server.scrape()

    together = measured()
    monkeypatch.setattr(engine.sim.server, "_make_scheduler", make_scheduler)
    assert together == measured()


def test_they_do_so_where_what_steps_take_was_measured(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "times.json"
    spread = [[0.012, [0.9, 1.0, 1.6]], [0.05, [0.95, 1.1]]]
    delivery = [[3, [0.0, 0.002]], [9, [0.0, 0.0, 0.003, 0.03]]]
    times = {"launch": 0.01, "entry": 0.001, "spread": spread, "delivery": delivery}
    saved.write_text(json.dumps(times))
    schedule = preset("chat", max_model_len=8192).schedule(seed=3, num_requests=40, arrival=ClosedLoop(12))

    def measured(seed: int = 0) -> Records:
        target = SimulatedTarget(f"simulated:{saved}", model, seed=seed)
        with target.open({"device_memory": 40 << 30}) as server:
            return server.run(schedule)

    together = measured()
    assert together != measured(seed=1)
    monkeypatch.setattr(engine.sim.server, "_make_scheduler", make_scheduler)
    assert together == measured()
    gaps = {round((b - a) / 1e6) for request in together.requests for a, b in pairwise(request.chunk_at)}
    assert min(gaps) == 0
    assert max(gaps) > 40


@pytest.mark.parametrize(
    ("device", "flags", "reason"),
    [
        ("l40s", {"max_num_batched_tokens": 1 << 19}, "out_of_memory"),
        ("l40s", {"gpu_memory_utilization": 0.37}, "kv_cache_too_small"),
        ("h100", {"max_num_seqs": 64, "max_num_batched_tokens": 32}, "bad_flag"),
        ("h100", {"max_num_seqs": "many"}, "bad_flag"),
        ("h100", {"expert_placement_strategy": "linear"}, "bad_flag"),
    ],
)
def test_a_config_that_would_not_start_is_refused(
    model: str, device: str, flags: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(StartFailed) as failed, SimulatedTarget(f"simulated:{device}", model).open(flags):
        pass
    assert failed.value.reason == reason


def test_the_clock_counts_simulated_seconds(target: SimulatedTarget) -> None:
    before = target.clock()
    records = run(target, load(rate=10.0, count=100))
    took = target.clock() - before
    assert took >= max(r.end for r in records.requests) / 1e9
    assert took < 60


def test_scrapes_are_a_second_apart_and_count_what_was_served(target: SimulatedTarget) -> None:
    records = run(target, load(rate=10.0, count=60))
    stamps = [at for at, _ in records.scrapes]
    assert stamps == sorted(set(stamps))
    assert {b - a for a, b in pairwise(stamps[1:-1])} == {1000}
    finished = [_sum(text, "vllm:request_success_total") for _, text in records.scrapes]
    assert finished[-1] - finished[0] == 61, "the warm-up is one"


def _sum(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + "{"))


def test_a_fleet_is_its_replicas(model: str) -> None:
    fleet = SimulatedTarget("simulated:h100", model, replicas=3, routing="length-pooled")
    with fleet.open({}) as server:
        records = server.run(load(rate=40, count=100, workload="mixed"))
        parts = server.parts
    assert sum(len(part.requests) for part in parts) == len(records.requests) == 100
    assert all(part.scrapes for part in parts)
    lengths = [{(r.prompt_tokens or 0) > 500 for r in part.requests} for part in parts]
    assert lengths[0] == {False}, "the short ones have a replica to themselves"


def test_step_times_of_a_file_are_those_of_the_bundled_engine(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "times.json"
    saved.write_text(json.dumps({"launch": 0.05, "source": "made up"}))
    target = SimulatedTarget(f"simulated:{saved}", model)
    assert "made up" in target.estimate
    flags = {"device_memory": 40 << 30}
    assert run(target, load(count=5), **flags).requests[0].chunk_at[0] >= 50_000_000


@pytest.mark.parametrize("name", ["h900", "missing.json"])
def test_an_unknown_device_is_refused(model: str, name: str) -> None:
    with pytest.raises(SimulatedTargetError, match=name):
        SimulatedTarget(f"simulated:{name}", model)


def vtune(*words: str) -> Any:
    return CliRunner().invoke(vtune_cli.app, ["simulate", *words])


def test_the_command_reports_as_bench_run_does_and_says_that_it_is_an_estimate(model: str) -> None:
    words = ("--target", "simulated:h100", "--model", model, "--rate", "20", "--num-requests", "40")
    text = vtune(*words)
    assert text.exit_code == 0, text.output
    assert text.stdout.startswith("ESTIMATE")
    for part in ("KV cache:", "assumed", "TTFT", "output tok/s", "verdict"):
        assert part in text.stdout
    assert "x real time" in text.stderr
    data = json.loads(vtune(*words, "--format", "json").stdout)
    assert data["estimate"] is True
    assert data["classes"]["all"]["completed"]["value"] == 40
    assert vtune(*words, "--format", "markdown").stdout.startswith("**ESTIMATE")


def test_the_command_shows_a_fleets_replicas_and_writes_each(model: str, tmp_path: Path) -> None:
    ran = vtune(
        *("--target", "simulated:h100", "--model", model, "--rate", "20", "--num-requests", "40"),
        *("--replicas", "2", "--routing", "random", "--out", str(tmp_path / "out")),
    )
    assert ran.exit_code == 0, ran.output
    assert "2 replicas, random routing" in ran.stdout
    parts = [Records.load(tmp_path / "out" / f"replica-{n}.json") for n in range(2)]
    assert sum(len(part.requests) for part in parts) == 40
    assert (tmp_path / "out" / "report.html").exists()


def test_the_command_replays_a_trace(model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "\n".join(f"{n / 10},{100 + n},{20 + n % 5}" for n in range(30))
    trace.write_text(f"time,prompt,output\n{rows}\n")
    ran = vtune(
        *("--target", "simulated:a100", "--model", model, "--trace", str(trace)),
        *("--json", str(tmp_path / "records.json")),
        *("--trace-columns", "time=time:s,prompt=prompt,output=output"),
    )
    assert ran.exit_code == 0, ran.output
    requests = Records.load(tmp_path / "records.json").requests
    assert [(r.planned_prompt, r.completion_tokens) for r in requests[:2]] == [(100, 20), (101, 21)]
    assert len(requests) == 30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "h100"), "simulated:h100"),
        (("--target", "simulated:h900"), "Known are a100-40"),
        (("--target", "simulated:h100", "--model", "/nowhere"), "/nowhere"),
        (("--target", "simulated:h100", "--flags", "--tensor-parallel-size 3"), "attention heads"),
        (("--target", "simulated:l40s", "--flags", "--gpu-memory-utilization 0.37"), "KV blocks"),
    ],
)
def test_the_command_says_what_is_wrong(model: str, words: tuple[str, ...], said: str) -> None:
    ran = vtune("--model", model, "--rate", "20", "--num-requests", "5", *words)
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_simulating_imports_no_torch(model: str) -> None:
    code = (
        "import sys\nfrom loadgen.targets.simulated import SimulatedTarget\n"
        "from loadgen.commands.simulation import simulate\nfrom loadgen.commands.options import Load\n"
        f"simulate('simulated:h100', {model!r}, '', Load(rate=20.0, num_requests=10))\n"
        "print(sorted({'torch', 'tokenizers', 'transformers', 'starlette'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
