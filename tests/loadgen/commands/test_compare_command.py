"""``vtune bench compare``: saved runs and live servers, every format, and the gate's exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import records
from mock_sse_server import MockServer, running
from typer.testing import CliRunner

from loadgen.commands.compare_command import CompareFormat, split_metrics
from loadgen.measure.record import Records
from vtune_cli import app

FAKE = Path(__file__).parents[2] / "fake_server.py"


def vtune(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "compare", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


def save(folder: Path, runs: list[Records]) -> Path:
    for number, run in enumerate(runs):
        replace(run, start_unix_ms=number).save(folder / f"run-{number:03d}.json")
    return folder


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Eight runs of a config, eight more of it, and eight of one that is 40 % slower."""
    same = [save(tmp_path / name, [records(seed + shift) for seed in range(8)]) for name, shift in
            (("a", 0), ("again", 50))]  # fmt: skip
    slow = save(tmp_path / "slow", [records(seed + 90, gap=14.0) for seed in range(8)])
    return same[0], same[1], slow


METRICS = ("--metrics", "itl_p50,throughput")


def test_the_gate_passes_the_same_config_and_fails_a_slower_one(sides: tuple[Path, Path, Path]) -> None:
    a, again, slow = sides
    code, out, _ = vtune(a, again, *METRICS, "--gate", "--fail-on-inconclusive")
    assert (code, out.splitlines()[-1]) == (0, "No regression: 8 pairs, both servers up, loaded in turn")
    code, out, _ = vtune(a, slow, *METRICS, "--gate")
    assert code == 1
    assert "regress" in out
    assert "+40 %" in out
    assert vtune(a, slow, *METRICS)[0] == 0
    assert "improve" in vtune(slow, a, *METRICS, "--gate")[1]


def test_two_pairs_decide_nothing_and_say_so(tmp_path: Path) -> None:
    a = save(tmp_path / "a", [records(1), records(2)])
    b = save(tmp_path / "b", [records(3, gap=10.3), records(4, gap=10.7)])
    assert vtune(a, b, *METRICS, "--gate")[0] == 0
    assert vtune(a, b, *METRICS, "--gate", "--fail-on-inconclusive")[0] == 4


def test_a_run_that_its_client_spoilt_is_invalid_whatever_the_gate(tmp_path: Path) -> None:
    a = save(tmp_path / "a", [records(1)])
    b = save(tmp_path / "b", [replace(records(2), verdict="client_limited", reasons=("late",))])
    code, out, _ = vtune(a, b, *METRICS)
    assert code == 3
    assert "Invalid: 1 pairs" in out
    assert "late" in out


@pytest.mark.parametrize("format", list(CompareFormat))
def test_every_format_is_printed_and_written(
    sides: tuple[Path, Path, Path], tmp_path: Path, format: CompareFormat
) -> None:
    out = tmp_path / "out"
    code, text, _ = vtune(*sides[:2], *METRICS, "--format", format.value, "--out", out)
    assert code == 0
    assert text.strip()
    if format in (CompareFormat.JSON, CompareFormat.GITHUB, CompareFormat.BENCHER):
        json.loads(text)
    written = {path.name: path.read_text().strip() for path in out.iterdir() if path.is_file()}
    assert set(written) == {
        "comparison.json", "comparison.md", "comparison.csv", "comparison.xml",
        "github-action-benchmark.json", "bencher.json", "comparison.html",
    }  # fmt: skip
    assert format is CompareFormat.TEXT or text.strip() in written.values()
    code, again, _ = vtune(out / "a", out / "b", *METRICS, "--format", format.value)
    assert (code, again) == (0, text)


def test_runs_of_different_schedules_are_not_compared(tmp_path: Path) -> None:
    a = save(tmp_path / "a", [records(1)])
    b = save(tmp_path / "b", [replace(records(1), schedule_sha256="0" * 64)])
    code, _, err = vtune(a, b)
    assert code == 2
    assert "sent the same schedule" in err


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("itl_p50,speed", "unknown figure 'speed'"),
        ("itl_p50{class=vip}", "no class 'vip'"),
        ("", "no metric"),
    ],
)
def test_unknown_metrics_are_named(sides: tuple[Path, Path, Path], metrics: str, message: str) -> None:
    code, _, err = vtune(*sides[:2], "--metrics", metrics)
    assert code == 2
    assert message in err


def test_commas_in_braces_are_not_between_metrics() -> None:
    assert split_metrics("a_p50, b_p95{class=x,y},c") == ["a_p50", "b_p95{class=x,y}", "c"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(MockServer()) as port:
        yield f"http://127.0.0.1:{port}"


def test_two_servers_are_started_and_loaded_in_turn(tmp_path: Path) -> None:
    fake = f"{sys.executable} {FAKE} bundled --port 8000"
    load = [
        "--workload",
        "random",
        "--input-len",
        "8",
        "--output-len",
        "6",
        "--concurrency",
        "2",
        "--num-requests",
        "30",
    ]
    metrics = ("--pairs", 2, "--metrics", "failed,throughput", "--out", tmp_path)
    code, out, err = vtune(fake, f"{fake} --max-num-seqs 1", *load, *metrics)
    assert code in (0, 3), err  # 3: the machine was too busy for the client to keep time
    assert [line.split(" (")[0] for line in err.splitlines()] == [
        "pair 1, A", "pair 1, B", "pair 2, B", "pair 2, A",
    ]  # fmt: skip
    assert len(list((tmp_path / "a").glob("pair-*.json"))) == 2
    assert "failed" in out


@pytest.mark.parametrize(
    ("a", "message"),
    [
        ("no-such-program --x", "there is no program"),
        ("", "names no program"),
        ("http://127.0.0.1:9", "server A"),
    ],
)
def test_a_side_that_does_not_come_up_is_named(a: str, message: str, url: str) -> None:
    code, _, err = vtune(a, url, "--concurrency", 1, "--num-requests", 1)
    assert code == 2
    assert message in err


def test_a_load_must_be_given_for_live_servers(url: str) -> None:
    code, _, err = vtune(url, url)
    assert code == 2
    assert "give --rate" in err


def test_a_server_is_not_compared_with_itself(url: str) -> None:
    code, _, err = vtune(url, url, "--concurrency", 1, "--num-requests", 1)
    assert code == 2
    assert "are one server" in err
