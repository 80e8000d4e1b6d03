"""The fewest GPUs that hold an SLO, held against every fleet of a grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.commands.options import Load
from loadgen.commands.simulation import simulate
from loadgen.commands.sizing import Fleet, Sizing, conclusions, rows, size
from loadgen.measure.estimator import run_value
from loadgen.measure.stats import Summary
from loadgen.sim.accuracy import latency_error
from servers.slo.bounds import parse_bounds
from vtune_cli import app

MODEL = str(Path(__file__).parents[3] / "playbooks" / "shape-8b.json")
BOUNDS = parse_bounds("ttft_p95<50ms,itl_p99<15ms")


def fleet(width: int, replicas: int) -> Any:
    load = Load(rate=160.0, num_requests=250, workload="chat")
    flags = {"tensor_parallel_size": width, "max_model_len": 8192}
    return simulate("simulated:h100", MODEL, flags, load, replicas=replicas).records


def test_it_is_the_fewest_of_a_grid_that_is_simulated_in_full() -> None:
    grid = {}
    for width, most in ((1, 5), (2, 2), (4, 1)):
        for replicas in range(1, most + 1):
            summary = Summary(fleet(width, replicas))
            held = all(b.violation(run_value(summary, b.metric)) <= 0 for b in BOUNDS)
            grid[width, replicas] = held and not summary.value("failed")
    assert set(grid.values()) == {True, False}, "the load tells fleets apart"
    expected = min((w * n, n, w) for (w, n), held in grid.items() if held)
    found = size(Sizing(fleet, BOUNDS, widths=(1, 2, 4), most=5))
    assert found.best is not None
    assert (found.best.gpus, found.best.replicas, found.best.width) == expected
    assert len(found.tried) < len(grid)


class Known(Sizing):
    """Fleets whose TTFT is known: one second for a GPU, shared by all."""

    def _fleet(self, width: int, replicas: int) -> Fleet | None:
        if width == 8:
            self.refused[width] = "it has no eight"
            return None
        told = {"ttft_p95": 1.0 / (width * replicas)}
        return self.tried.setdefault((width, replicas), Fleet(width, replicas, told, 0, 100.0))


@pytest.mark.parametrize(
    ("bound", "widths", "most", "best"),
    [
        ("ttft_p95<1s", (1, 2), 64, (1, 1)),
        ("ttft_p95<110ms", (1,), 64, (1, 10)),
        ("ttft_p95<110ms", (2, 4), 64, (2, 5)),
        ("ttft_p95<130ms", (1, 8), 64, (1, 8)),
        ("ttft_p95<130ms", (1, 4), 64, (4, 2)),
        ("ttft_p95<20ms", (1,), 64, (1, 50)),
        ("ttft_p95<10ms", (1, 8), 64, None),
        ("ttft_p95<1s", (8,), 64, None),
    ],
)
def test_doubling_and_bisection(bound: str, widths: Any, most: int, best: Any) -> None:
    found = size(Known(fleet, parse_bounds(bound), widths=widths, most=most))
    assert (found.best and (found.best.width, found.best.replicas)) == best


def test_the_interval_is_what_slower_and_faster_latencies_need() -> None:
    found = size(Known(fleet, parse_bounds("ttft_p95<105ms"), widths=(1,), error=0.25))
    assert [f and f.gpus for f in (found.faster, found.best, found.slower)] == [8, 10, 12]
    words = " ".join(conclusions(found, 2.5))
    assert "Fewest GPUs that hold the SLO: 10 GPUs (10 replicas of 1 GPU)" in words
    assert "25 % shorter or longer" in words
    assert "8 GPUs to 12 GPUs" in words
    assert "Cost: 69.4 per million output tokens" in words
    assert [row[-1] for row in rows(found) if row[1] == "10"] == ["held, the fewest"]


def test_a_device_that_was_never_compared_has_no_interval() -> None:
    assert latency_error("simulated:h100") > 0
    assert latency_error("simulated:h200") > 0
    assert latency_error("simulated:steps.json") == 0
    found = size(Known(fleet, parse_bounds("ttft_p95<105ms"), widths=(1,)))
    assert "no interval" in " ".join(conclusions(found, None))


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    words = ["simulate", "--size", "--target", "simulated:h100", "--model", MODEL, "--rate", "20",
             "--num-requests", "60", "--price", "2", "--out", str(tmp_path), "--format", "json"]  # fmt: skip
    done = CliRunner().invoke(app, [*words, "--slo", "ttft_p95<2s"])
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "size.json").read_text())
    assert told["best"]["gpus"] == 1
    assert told["estimate"] is True
    assert told["price_per_million_output_tokens"] > 0
    assert (tmp_path / "size.md").read_text().startswith("ESTIMATE") or "ESTIMATE" in (
        tmp_path / "size.md"
    ).read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size"], "--size needs --slo"),
        (["--size", "--slo", "ttft_p95<1s", "--replicas", "2"], "leave --replicas out"),
        (["--slo", "ttft_p95<1s"], "go with --size"),
        (["--price", "2"], "go with --size"),
        (["--size", "--slo", "ttft_p95<1s", "--price", "-1"], "positive"),
    ],
)
def test_what_does_not_go_together_is_said(words: list[str], said: str) -> None:
    base = ["simulate", "--target", "simulated:h100", "--model", MODEL, "--rate", "1", "--num-requests", "9"]
    done = CliRunner().invoke(app, [*base, *words])
    assert done.exit_code == 2
    assert said in " ".join((done.output + str(done.exception)).split())
