"""The exact gate: the same engine gives the same counters, and a change of any of them is named."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.measure.counters import Counters, CountersError, differences
from vtune_cli import app

LOAD = ["--workload", "random", "--input-len", 40, "--output-len", 6, "--rate", 4, "--num-requests", 6]
FLAGS = "vtune serve bundled --max-num-batched-tokens 64 --max-num-seqs 4 --num-gpu-blocks-override 24"
FLAGS += " --max-model-len 256"


def vtune(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "counters", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counters") / "base.json"
    code, _, err = vtune(*LOAD, "--flags", FLAGS, "--out", path)
    assert code == 0, err
    return path


def test_two_runs_count_the_same_and_the_gate_passes(counted: Path, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    code, out, err = vtune(*LOAD, "--flags", FLAGS, "--baseline", counted, "--junit", report)
    assert (code, err) == (0, "the same as the baseline\n")
    assert 'failures="0"' in report.read_text()
    counters = Counters.load(counted)
    assert counters.requests == 6
    assert counters.output_tokens == 36
    assert counters.scheduled_tokens >= 6 * 40 + 6 * 5
    assert counters.most_running <= 4
    assert f"steps                {counters.steps}" in out


def test_another_scheduler_is_told_by_its_steps_and_exits_with_one(counted: Path, tmp_path: Path) -> None:
    """The baseline is doctored: what it says of one counter is not what the engine does."""
    data = json.loads(counted.read_text())
    data["steps"] -= 1
    data["preemptions"] += 2
    doctored = tmp_path / "old.json"
    doctored.write_text(json.dumps(data))
    code, _, err = vtune(*LOAD, "--flags", FLAGS, "--baseline", doctored)
    assert code == 1
    assert f"DIFFERENT steps: {data['steps']} before, {data['steps'] + 1} now" in err
    assert f"DIFFERENT preemptions: {data['preemptions']} before" in err
    code, out, _ = vtune(*LOAD, "--flags", FLAGS, "--baseline", doctored, "--format", "json")
    assert code == 1
    assert [d["name"] for d in json.loads(out)["differences"]] == ["steps", "preemptions"]


def test_the_output_is_compared_only_in_one_environment(counted: Path) -> None:
    now = Counters.load(counted)
    other = replace(now, output_sha256="0" * 64)
    assert [d.name for d in differences(other, now)] == ["output_sha256"]
    elsewhere = replace(other, environment={"machine": "another"})
    assert differences(elsewhere, now) == []


def test_with_speculation_counters_are_compared_in_one_environment_only(counted: Path) -> None:
    """What is drafted depends on the text, and the text on how the machine rounds."""
    now = replace(Counters.load(counted), flags={"speculative_config": {"method": "ngram"}})
    elsewhere = replace(now, environment={"machine": "another"})
    assert differences(now, now) == []
    with pytest.raises(CountersError, match="depend on the text"):
        differences(elsewhere, now)


def test_counters_of_another_workload_are_not_compared(counted: Path) -> None:
    now = Counters.load(counted)
    with pytest.raises(CountersError, match="steps_per_second was 10"):
        differences(replace(now, steps_per_second=10.0), now)
    code, _, err = vtune(*LOAD, "--flags", FLAGS, "--seed", 3, "--baseline", counted)
    assert code == 2
    assert "schedule_sha256 was" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{}", "schema is None"),
        ('{"schema": "vtune.counters/1"}', "damaged"),
        ('{"schema": "vtune.counters/9"}', "this version reads"),
    ],
)
def test_a_baseline_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    code, _, err = vtune(*LOAD, "--baseline", path)
    assert code == 2
    assert message in err
    code, _, err = vtune(*LOAD, "--baseline", tmp_path / "nowhere.json")
    assert code == 2
    assert "No such file" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--flags", "vtune serve bundled --max-num-seqs 0"], "--max-num-seqs 0"),
        (["--flags", "vtune serve bundled --tensor-parallel-size 2"], "--tensor-parallel-size: the bundled"),
        (["--flags", "vtune serve /nowhere"], "/nowhere"),
    ],
)
def test_what_the_engine_refuses_is_said(arguments: list[str], message: str) -> None:
    code, _, err = vtune(*LOAD, *arguments)
    assert code == 2
    assert message in err


def test_without_the_engine_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = vtune(*LOAD)
    assert code == 2
    assert "pip install 'vtune-llm[engine]'" in err
