"""A prescription on the user's own command: both sides from it, nothing touched that was there before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from synthetic_server import Server
from typer.testing import CliRunner, Result

from doctor.diagnosis.diagnose import diagnose
from doctor.metrics.sources import Scrapes
from doctor.proof.experiment_target import packaged
from vtune_cli import app

FAKE = Path(__file__).parents[2] / "fake_server.py"
LOAD = ("--workload", "random", "--input-len", "64", "--output-len", "32", "--concurrency", "8")
SIMULATED = ("--target", "simulated:h100", "--model", packaged("shape", "8b"), "--flags", "--max-num-seqs 2")


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "verify", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``vtune doctor --format json`` writes of a capped server."""
    queue = {"queue_time": {8.0: 10}, "ttft": {8.1: 10}}
    capped = Server(running=2, waiting=6, kv=0.1, histograms=queue)
    file = tmp_path_factory.mktemp("doctor") / "findings.json"
    found = diagnose(Scrapes(capped.scrapes()), {"max_num_seqs": 2})
    file.write_text(json.dumps(found.to_json()))
    return file


def simulated(finding: str, *more: str) -> Result:
    return verify(finding, *SIMULATED, *LOAD, "--num-requests", "60", "--pairs", "2", *more)


def test_the_files_own_prescription_is_tried(findings: Path, tmp_path: Path) -> None:
    done = simulated(str(findings), "--out", str(tmp_path))
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1:3] == [
        "  before: vllm serve 'an 8B Llama' --max-num-seqs 2",
        "  after:  vllm serve 'an 8B Llama' --max-num-seqs 8",
    ]
    assert "verified in simulation: waiting mean -100 %" in done.stdout
    saved = json.loads((tmp_path / "canary.json").read_text())
    assert (saved["schema"], saved["verdict"], saved["pairs"]) == ("vtune.canary/1", "verified", 2)


def test_a_cure_that_does_nothing_is_refuted() -> None:
    done = simulated("seq-cap", "--cure", "--max-num-batched-tokens 4096", "--format", "json")
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, "refuted")


def test_servers_are_started_from_any_command_and_ended() -> None:
    before = set(psutil.Process().children(recursive=True))
    command = f"{sys.executable} {FAKE} bundled {{flags}} --port {{port}} --time-scale 0.2"
    done = verify("seq-cap", "--cure", "--max-num-seqs 16", "--flags", "--max-num-seqs 1", "--target",
                  command, *LOAD, "--num-requests", "24", "--pairs", "2", "--format", "json")  # fmt: skip
    assert done.exit_code in (0, 3), done.stderr  # a busy machine may limit the client, which is said
    canary: dict[str, Any] = json.loads(done.stdout)
    assert canary["pairs"] == 2
    assert "--max-num-seqs 1 " in canary["before"] + " "
    assert "--max-num-seqs 16 " in canary["after"] + " "
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_server_that_runs_already_is_left_alone() -> None:
    done = verify("seq-cap", "--cure", "--max-num-seqs 16", "--target", "http://127.0.0.1:9", *LOAD,
                  "--num-requests", "4")  # fmt: skip
    assert done.exit_code == 2
    assert "starts servers of its own and leaves running ones alone" in done.stderr


def test_a_side_that_does_not_start_is_named() -> None:
    done = verify("seq-cap", "--cure", "--max-num-seqs 0", *SIMULATED, *LOAD, "--num-requests", "4")
    assert (done.exit_code, "with the cure: bad_flag" in done.stderr) == (2, True), done.stderr


def written(tmp_path: Path, findings: list[dict[str, Any]]) -> str:
    file = tmp_path / "f.json"
    file.write_text(json.dumps({"findings": findings}))
    return str(file)


WORDS = {"id": "overload", "prescriptions": [{"set": {}, "text": "scale out"}]}
TYPED = {"id": "seq-cap", "prescriptions": [{"set": {"max_num_seqs": 2}}]}


@pytest.mark.parametrize(
    ("findings", "suffix", "more", "complaint"),
    [
        ([], "", (), "holds no finding, so there is nothing to try"),
        ([WORDS], "", (), "its cure is no flag (scale out); say one with --cure"),
        ([WORDS], "#seq-cap", (), "no finding 'seq-cap'; it has overload"),
        ([TYPED], "", ("--prescription", "3"), "has 1 prescriptions, not 3"),
        ([TYPED], "", (), "the command has these flags already"),
    ],
)
def test_a_file_that_holds_nothing_to_try_is_explained(
    tmp_path: Path, findings: list[dict[str, Any]], suffix: str, more: tuple[str, ...], complaint: str
) -> None:
    done = simulated(written(tmp_path, findings) + suffix, *more)
    assert (done.exit_code, complaint in done.stderr) == (2, True), done.stderr


def test_what_is_no_finding_is_explained(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert "not what vtune doctor --format json writes" in simulated(str(tmp_path / "x.json")).stderr
    assert "is neither a file nor a playbook" in simulated("seq-cup").stderr
    assert "say which flags to try" in simulated("seq-cap").stderr
