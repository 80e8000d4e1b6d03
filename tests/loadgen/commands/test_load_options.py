"""Loads from the command line: traces, datasets, sweeps, and options that do not go together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import records
from mock_sse_server import MockServer, running
from typer.testing import CliRunner

from loadgen.commands.options import Load, seconds, span
from loadgen.measure.record import Records
from servers.errors import OptionError
from vtune_cli import app

BUSY = (0, 3)
"""3: the machine was too busy for the client to keep time."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(MockServer()) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 10 * i, "input_length": 20 + i, "output_length": 4, "hash_ids": [0]} for i in range(8)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def vtune(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


def test_a_trace_is_replayed_with_its_lengths_and_times(url: str, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "records.json"
    code, text, err = vtune("run", "--url", url, "--trace", trace, "--rate-scale", 2, "--json", out)
    assert code in BUSY, err
    assert "trace trace.jsonl (rate x2): 8 requests" in text
    records = Records.load(out)
    assert [r.planned_prompt for r in records.requests] == [20 + i for i in range(8)]
    assert [r.intended for r in records.requests] == [5_000_000 * i for i in range(8)]


def test_a_part_of_a_trace_is_replayed(url: str, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "records.json"
    part = ("--trace-window", "0.02s,0.06s", "--length-scale", 0.5)
    assert vtune("run", "--url", url, "--trace", trace, *part, "--json", out)[0] in BUSY
    assert [r.planned_prompt for r in Records.load(out).requests] == [11, 12, 12, 12]


def test_a_trace_beyond_the_context_says_what_to_do(url: str, trace: Path) -> None:
    code, _, err = vtune("run", "--url", url, "--trace", trace, "--max-model-len", 28)
    assert code == 2
    assert "3 of 8 requests exceed the context of 28" in err
    assert "--oversized clip" in err
    code, text, _ = vtune("run", "--url", url, "--trace", trace, "--max-model-len", 28, "--oversized", "drop")
    assert code in BUSY
    assert "3 longer than 28 tokens dropped" in text


def test_a_dataset_is_sent_as_chats(url: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 8}]
    path.write_text(json.dumps({"messages": [*said, {"role": "user", "content": "c"}]}))
    out = tmp_path / "records.json"
    code, text, err = vtune("run", "--url", url, "--dataset", path, "--concurrency", 1, "--json", out)
    assert code in BUSY, err
    assert "1 conversations, 2 requests" in text
    assert [r.cls for r in Records.load(out).requests] == ["first turn", "later turns"]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (Load(), "give --rate"),
        (Load(rate=1.0), "give --duration"),
        (Load(concurrency=1), "give --duration"),
        (Load(trace=Path("x"), dataset=Path("y")), "two sources"),
        (Load(trace=Path("x"), rate=2.0), "--rate-scale in place of --rate"),
        (Load(rate=1.0, num_requests=1, burstiness=2.0), "needs --arrival gamma"),
        (Load(rate=1.0, num_requests=1, trace_columns="a"), "--trace-columns needs --trace"),
        (Load(rate=1.0, num_requests=1, trace_window=(0.0, 1.0)), "--trace-window needs --trace"),
    ],
)
def test_options_that_do_not_go_together_are_named(load: Load, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load.check()


@pytest.mark.parametrize("text", ["", "10s", "5s,2s", "a,b", "0s,0s", "1s,inf"])
def test_a_window_has_two_ends_in_order(text: str) -> None:
    import typer

    with pytest.raises(typer.BadParameter):
        span(text)
    assert span("0s,10m") == (0.0, 600.0)
    assert seconds("1.5m") == 90.0


def test_levels_are_measured_as_given_and_every_run_is_kept(url: str, tmp_path: Path) -> None:
    arguments = ["--workload", "random", "--input-len", 8, "--output-len", 6, "--num-requests", 30]
    code, out, err = vtune(
        "sweep", "--url", url, *arguments, "--over", "concurrency", "--at", "1,2,4", "--repeats", 1,
        "--out", tmp_path, "--format", "json",
    )  # fmt: skip
    assert code in BUSY, err
    if code == 0:
        answer = json.loads(out)
        assert [level["level"] for level in answer["levels"]] == [1.0, 2.0, 4.0]
        assert answer["knee"] in (1.0, 2.0, 4.0)
        assert json.loads((tmp_path / "sweep.json").read_text()) == answer
        assert len(list(tmp_path.glob("run-*.json"))) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--num-requests", "4"], "give --slo"),
        (["--slo", "itl_p99<50ms", "--at", "1,2"], "give --slo"),
        (["--slo", "itl_p99<50ms"], "give --rate"),
        (["--slo", "itl_p99<50", "--rate", "1", "--num-requests", "4"], "needs a unit"),
        (["--at", "1,2"], "give --duration"),
    ],
)
def test_a_sweep_needs_bounds_or_levels(url: str, arguments: list[str], message: str) -> None:
    code, _, err = vtune("sweep", "--url", url, *arguments)
    assert code == 2
    assert message in err


def test_a_sweep_whose_runs_are_too_short_for_the_bound_is_invalid(url: str) -> None:
    load = ["--workload", "random", "--input-len", 8, "--output-len", 2, "--num-requests", 5, "--rate", 50]
    code, _, err = vtune("sweep", "--url", url, "--slo", "ttft_p99<1s", *load)
    assert code == 3
    assert "cannot be told" in err or "client was the limit" in err


def test_a_trace_is_described(trace: Path) -> None:
    code, out, _ = vtune("trace", trace, "--format", "json")
    assert code == 0
    facts = json.loads(out)
    assert facts["requests"] == 8
    assert facts["prompt tokens"]["max"] == 27
    code, text, _ = vtune("trace", trace)
    assert "requests                   8" in text
    code, _, err = vtune("trace", trace.with_name("nowhere"))
    assert code == 2
    assert "No such file" in err


@pytest.mark.parametrize("format", ["csv", "junit", "bencher", "markdown", "json", "text"])
def test_a_saved_run_is_printed_in_every_format_and_held_against_bounds(tmp_path: Path, format: str) -> None:
    path = tmp_path / "records.json"
    records(failed=1).save(path)
    code, out, err = vtune("report", path, "--format", format, "--slo", "itl_p50<20ms,throughput>1")
    assert (code, err) == (0, "")
    assert out.strip()
    code, _, _ = vtune("report", path, "--format", format, "--slo", "itl_p50<2ms")
    assert code == 1
    code, _, err = vtune("report", path, "--slo", "itl<2ms")
    assert code == 2
    assert "of what statistic" in err
