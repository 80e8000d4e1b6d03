"""The real scheduler's recorded decisions, reproduced row for row through ``vtune explain``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vtune_cli import app

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"
CASES = sorted(GOLDEN.glob("*/*.json"))

pytestmark = pytest.mark.skipif(not CASES, reason=f"no recordings in {GOLDEN}")


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_rows_equal_the_recording(path: Path, tmp_path: Path) -> None:
    case = json.loads(path.read_text())
    for name in ("config", "requests"):
        (tmp_path / name).write_text(json.dumps(case[name]))
    command = ["explain", "--config", str(tmp_path / "config"), "--requests", str(tmp_path / "requests")]
    result = CliRunner().invoke(app, [*command, "--format", "jsonl"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    for row, expected in zip(rows, case["expected"], strict=False):
        assert row == expected
    assert len(rows) == len(case["expected"])
    assert all(list(row) == list(expected) for row, expected in zip(rows, case["expected"], strict=True))


def test_all_recordings_are_here() -> None:
    counts = {
        folder: len(list((GOLDEN / folder).glob("*.json")))
        for folder in ("scheduler", "speculative", "edges")
    }
    assert counts == {"scheduler": 120, "speculative": 56, "edges": 23}
