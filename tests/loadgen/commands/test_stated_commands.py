"""``vtune bench report`` and ``compare`` on results of other tools, in every format."""

import json
from pathlib import Path
from typing import Any

import pytest
from stated_files import AIPERF, GUIDELLM, VLLM, VLLM_TABLE
from typer.testing import CliRunner, Result

from vtune_cli import app


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def saved(path: Path, *documents: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return path


def test_a_report_shows_what_is_stated_and_says_what_is_not(tmp_path: Path) -> None:
    result = bench("report", saved(tmp_path / "append.json", VLLM, {**VLLM, "duration": 300.0}))
    assert result.exit_code == 0, result.output
    for text in ("vllm bench serve", "356 s", "393.02", "run 1: reached 0.254 of 20 req/s", "ITL per chunk"):
        assert text in result.output
    assert "nothing tells whether its client kept up" in result.output


@pytest.mark.parametrize("format", ["json", "markdown", "csv", "junit", "bencher"])
def test_every_format_has_the_figures(format: str, tmp_path: Path) -> None:
    result = bench(
        "report", saved(tmp_path / "guide.json", GUIDELLM), "--format", format, "--slo", "ttft_p95<1s"
    )
    assert result.exit_code == 0, result.output
    assert ("360 ms" if format in ("markdown", "junit") else "0.36") in result.output
    if format in ("json", "bencher"):
        assert len(json.loads(result.output)["results" if format == "json" else "GuideLLM, run 1"]) >= 2


def test_bounds_are_held_against_what_is_stated(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    path.write_text(VLLM_TABLE)
    missed = bench("report", path, "--slo", "ttft_p99<2s,itl_p99<50ms")
    assert missed.exit_code == 1
    assert "missed vllm bench serve: ttft_p99 <= 2 s: 356 s" in missed.output
    assert (
        "cannot tell, it states tpot_mean, tpot_p50, tpot_p99, inter_chunk_mean, inter_chunk_p99"
        in missed.output
    )
    assert bench("report", path, "--slo", "tpot_p99<30ms").exit_code == 0


def test_figures_alone_have_no_page(tmp_path: Path) -> None:
    result = bench("report", saved(tmp_path / "a.json", AIPERF), "--html", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "figures without requests" in result.output


def test_folders_of_repeats_are_gated(tmp_path: Path) -> None:
    for side, factor in (("old", 1.0), ("new", 1.5)):
        for number in range(4):
            ttft = 1000 * factor * (1 + number / 100)
            saved(tmp_path / side / f"{number}.json", {**VLLM, "p99_ttft_ms": ttft})
    result = bench("compare", tmp_path / "old", tmp_path / "new", "--gate", "--metrics", "ttft_p99,tpot_p50")
    assert result.exit_code == 1, result.output
    assert "Regression: 4 and 4 runs, as stated by vllm bench serve" in result.output
    same = bench("compare", tmp_path / "old", tmp_path / "old", "--gate", "--fail-on-inconclusive")
    assert same.exit_code == 0, same.output
    out = tmp_path / "out"
    assert bench("compare", tmp_path / "old", tmp_path / "new", "--out", out).exit_code == 0
    assert "as stated by vllm bench serve" in (out / "comparison.html").read_text()


def test_an_unknown_file_is_refused_by_name(tmp_path: Path) -> None:
    result = bench("report", saved(tmp_path / "x.json", {"chat_id": 3}))
    assert result.exit_code == 2
    assert "x.json: neither vtune's records nor a result of" in " ".join(result.output.split())
