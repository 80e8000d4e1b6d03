"""What changed between two windows: causes first, nothing that is only chance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import needs_recordings, series_path
from synthetic_server import Server
from typer.testing import CliRunner, Result

from doctor.diagnosis.diff import Difference, DiffSide, as_lines, difference
from doctor.diagnosis.judged_objectives import judged_objectives
from doctor.metrics.sources import Scrapes
from vtune_cli import app

BASE = Server()
LONGER = replace(
    BASE,
    waiting=9,
    running=2,
    kv=0.02,
    counters={"prefix_hits": 1200},
    histograms={"prompt_length": {900.0: 20}, "ttft": {1.2: 20}},
    config={"num_gpu_blocks": "2049"},
    labels={"engine": "0", "model_name": "other"},
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("doctor", "diff", *arguments), catch_exceptions=False)


def compared(a: Server, b: Server, flags: dict[str, int] | None = None) -> Difference:
    sides = [DiffSide(Scrapes(server.scrapes(), name), flags) for server, name in ((a, "a"), (b, "b"))]
    return difference(sides[0], sides[1], judged_objectives(None))


def test_the_same_load_has_not_changed() -> None:
    found = compared(BASE, replace(BASE, histograms={"ttft": {0.124: 10}}))
    assert (found.changes, found.came, found.went) == ((), (), ())
    assert "Nothing changed beyond chance." in as_lines(found)


def test_changes_are_ranked_causes_before_effects() -> None:
    found = compared(BASE, LONGER, {"max_num_seqs": 2})
    names = [change.name for change in found.changes]
    assert names[0] == "model"
    assert "GPU blocks" in names
    order = [
        names.index(name) for name in ("prompt_tokens_mean", "prefix_hit_rate", "waiting_mean", "ttft_p50")
    ]
    assert order == sorted(order)
    assert found.came[0][0] == "seq-cap"
    text = as_lines(found)
    assert "New finding: seq-cap" in text
    assert "prompt_tokens_mean: 200 tokens -> 900 tokens (+350 %)" in text
    assert "prefix_hit_rate: 0 % -> 60 %" in text
    assert "No longer found: seq-cap" in as_lines(compared(LONGER, BASE, {"max_num_seqs": 2}))


@pytest.mark.parametrize(("high", "refuted"), [(1.5, True), (0.35, False)])
def test_a_cure_that_a_second_recording_refutes_is_withdrawn(high: float, refuted: bool) -> None:
    spiky = [
        replace(
            BASE,
            histograms={
                "itl": {0.03: 970, level: 30},
                "prefill_length": {100.0: 9, 4000.0: 1},
                "prompt_length": {100.0: 9, 4000.0: 1},
                "prefill_time": {0.1: 9, 1.5: 1},
            },
        )
        for level in (1.5, high)
    ]
    budgets = ({"max_num_batched_tokens": 4096}, {"max_num_batched_tokens": 512})
    sides = [
        DiffSide(Scrapes(server.scrapes(), "s"), flags) for server, flags in zip(spiky, budgets, strict=True)
    ]
    found = difference(sides[0], sides[1], judged_objectives(None))
    assert any("--max-num-batched-tokens" in text for text in found.refuted) is refuted
    assert ("withdrawn" in as_lines(found)) is refuted


def test_an_engine_that_is_gone_is_told() -> None:
    def fleet(*names: str) -> list[tuple[int, str]]:
        pages = [replace(BASE, labels={**BASE.labels, "instance": name}).scrapes() for name in names]
        return [(parts[0][0], "".join(text for _, text in parts)) for parts in zip(*pages, strict=True)]

    sides = [DiffSide(Scrapes(fleet(*names))) for names in (("x:1", "y:1"), ("x:1", "z:1"))]
    found = difference(sides[0], sides[1], judged_objectives(None))
    assert {(change.engine, change.before) for change in found.changes} == {
        ("y:1", "there"),
        ("z:1", "not there"),
    }


@needs_recordings
def test_two_recordings_of_a_real_server() -> None:
    a, b = str(series_path("healthy-steady")), str(series_path("seq-cap"))
    document = json.loads(run(a, b, "--flags-b", "vllm serve m --max-num-seqs 2", "--format", "json").stdout)
    assert document["schema"] == "vtune.doctor-diff/1"
    assert document["findings"]["came"][0]["id"] == "seq-cap"
    largest = {change["kind"]: change["name"] for change in reversed(document["changes"])}
    assert largest["load"] == "waiting_mean"
    assert run(a, a).stdout.endswith("Nothing changed beyond chance.\n")
    assert "## Latency" in run(a, b, "--format", "markdown").stdout


def test_two_windows_of_one_recording(tmp_path: Path) -> None:
    pages = [BASE.page(n, 0.0) for n in range(1, 61)] + [LONGER.page(n, 0.0) for n in range(61, 121)]
    path = tmp_path / "night.prom"
    start = 1_700_000_000_000
    path.write_text("".join(f"# scrape_unix_ms {start + 5000 * n}\n{page}" for n, page in enumerate(pages)))
    text = run(str(path), "--window-a", "-10m..-5m5s", "--window-b", "-4m55s..").stdout
    assert text == ""  # durations have one unit
    text = run(str(path), "--window-a", "-600s..-305s", "--window-b", "-295s..").stdout
    assert "prompt_tokens_mean: 200 tokens -> 900 tokens" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to compare"),
        (["a.prom"], "need --window-a and --window-b"),
        (["--prometheus", "http://a", "--window-a", "14:05"], "write from..until"),
        (["a.prom", "b.prom"], "a.prom: cannot be read"),
    ],
)
def test_wrong_use_of_diff_is_said_in_words(arguments: list[str], complaint: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, complaint in result.stderr) == (2, True)


def test_an_engine_is_found_again_where_another_scrapes_it() -> None:
    """Job and pod are others than before; what the server says of itself is the same."""

    def fleet(waiting: float, **labels: str) -> DiffSide:
        servers = [
            replace(BASE, waiting=waiting * rank, labels={**BASE.labels, "engine": str(rank), **labels})
            for rank in range(2)
        ]
        pages = [
            (parts[0][0], "".join(text for _, text in parts))
            for parts in zip(*(server.scrapes() for server in servers), strict=True)
        ]
        return DiffSide(Scrapes(pages, "fleet"), {})

    earlier, later = fleet(0, job="a", pod="x"), fleet(30, job="b", pod="y")
    found = difference(earlier, later, judged_objectives(None))
    told = [(change.name, change.engine) for change in found.changes]
    assert ("waiting_mean", "fleet engine 1") in told
    assert not [name for name, engine in told if engine == "fleet engine 0"]
