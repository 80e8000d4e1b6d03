"""``vtune bench``: what it prints, writes and exits with."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mock_sse_server import MockServer, running
from typer.testing import CliRunner

from loadgen.measure.record import Records
from vtune_cli import app

FAST = ["--workload", "random", "--input-len", "8", "--output-len", "6", "--warmup", "0"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(MockServer()) as port:
        yield f"http://127.0.0.1:{port}"


def vtune(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


def test_a_run_prints_every_class_and_the_definitions(url: str, tmp_path: Path) -> None:
    code, out, _ = vtune(
        "bench",
        "run",
        "--url",
        url,
        "--rate",
        150,
        "--num-requests",
        60,
        "--workload",
        "mixed",
        "--out",
        tmp_path,
    )
    assert code in (0, 3)  # 3: the machine was too busy for the client to keep time
    for word in (
        "short",
        "rag",
        "background",
        "TTFT",
        "ITL per token",
        "ITL per chunk",
        "token-weighted",
        "verdict",
    ):
        assert word in out
    assert re.search(r"n/a \(n=\d+\)", out)
    assert {path.name for path in tmp_path.iterdir()} == {
        "records.json",
        "requests.jsonl",
        "summary.json",
        "report.md",
        "report.html",
        "requests.csv",
        "junit.xml",
        "bencher.json",
    }
    assert len(Records.load(tmp_path / "records.json").requests) == 60
    page = (tmp_path / "report.html").read_text()
    assert "Plotly.newPlot" in page
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', page)

    code, again, _ = vtune("bench", "report", tmp_path)
    assert code == 0
    assert again == out
    code, markdown, _ = vtune("bench", "report", tmp_path / "records.json", "--format", "markdown")
    assert markdown.rstrip() == (tmp_path / "report.md").read_text().rstrip()
    code, text, _ = vtune("bench", "report", tmp_path / "records.json", "--format", "json")
    assert json.loads(text) == json.loads((tmp_path / "summary.json").read_text())


def test_json_on_stdout_is_nothing_but_json(url: str) -> None:
    _, out, _ = vtune(
        "bench", "run", "--url", url, "--concurrency", 2, "--num-requests", 40, *FAST, "--format", "json"
    )
    summary = json.loads(out)
    assert summary["schema"] == "vtune.bench/1"
    figures = summary["classes"]["all"]
    measured = figures["measured"]["value"]
    assert 20 <= figures["completed"]["value"] == measured <= 40
    assert figures["ttft_p99"] == {"value": None, "n": measured, "low": None, "high": None}
    assert figures["throughput"]["value"] > 0
    assert "ttft" in summary["definitions"]


def test_a_run_without_a_success_is_invalid(url: str) -> None:
    code, out, _ = vtune(
        "bench", "run", "--url", f"{url}/503", "--model", "m", "--max-model-len", 100, "--rate", 100,
        "--num-requests", 5, *FAST,
    )  # fmt: skip
    assert code == 3
    assert "5 unavailable" in out
    assert "∞" in out


class ChatOnly(MockServer):
    """No list of models, no text completions, and no field that OpenAI does not have."""

    async def _get(self, path: str, write: Any) -> bool:
        await self._json(write, 404, {"error": {"message": "Not Found"}})
        return True

    async def do_v1(self, body: dict[str, Any], write: Any) -> None:
        unknown = {"ignore_eos", "priority"} & body.keys()
        if "messages" not in body:
            await self._json(write, 404, {"error": {"message": "Not Found"}})
        elif unknown:
            message = f"Extra inputs are not permitted: {', '.join(unknown)}"
            await self._json(write, 400, {"error": {"message": message}})
        else:
            await super().do_v1(body, write)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "m", "--chat", "--natural-stop"], ""),
        (["--model", "m"], "one that only chats wants --chat"),
        (["--model", "m", "--chat"], "give --natural-stop"),
        ([], "name the model with --model"),
    ],
)
def test_a_server_that_only_chats_is_measured_or_says_what_it_wants(options: list[str], said: str) -> None:
    with running(server := ChatOnly()) as port:
        at = ["--url", f"http://127.0.0.1:{port}", "--concurrency", 2, "--num-requests", 4]
        code, out, error = vtune("bench", "run", *at, *FAST, *options)
    assert said in out + error
    if not said:
        assert code == 0
        assert [len(body["messages"][0]["content"].split()) for body in server.seen.bodies] == [8] * 4
        assert {body["model"] for body in server.seen.bodies} == {"m"}


def test_nobody_there_is_said_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code, out, err = vtune(
        "bench", "run", "--url", f"http://127.0.0.1:{port}", "--rate", 1, "--duration", "5s"
    )
    assert (code, out) == (2, "")
    assert "Connection refused" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "1"], "--duration"),
        (["--duration", "5s"], "--rate"),
        (["--rate", "0", "--duration", "5s"], "positive"),
        (["--rate", "1", "--duration", "soon"], "60s"),
        (["--rate", "1", "--duration", "5s", "--workload", "nope"], "known: chat"),
        (["--rate", "1", "--duration", "5s", "--burstiness", "2"], "gamma"),
        (["--concurrency", "1", "--num-requests", "5", "--arrival", "constant"], "--rate"),
        (["--rate", "1", "--num-requests", "5", "--workload", "random", "--input-len", "5000"], "exceed"),
        (["--rate", "9", "--num-requests", "5", "--out", "/proc/nowhere", *FAST], "cannot write"),
    ],
)
def test_bad_usage(url: str, arguments: list[str], words: str) -> None:
    code, _, err = vtune("bench", "run", "--url", url, *arguments)
    assert code == 2
    assert words in " ".join(err.split())


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("60", 60), ("2m", 120), ("1.5h", 5400), ("3s", 3)]
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    from loadgen.commands.options import seconds as _seconds

    assert _seconds(text) == seconds


def test_report_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    code, _, err = vtune("bench", "report", tmp_path / "x.json")
    assert code == 2
    assert "x.json" in err


@pytest.mark.parametrize("command", ["run", "report"])
def test_help_has_examples(command: str) -> None:
    code, out, _ = vtune("bench", command, "--help")
    assert code == 0
    assert f"vtune bench {command}" in out


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    mock = MockServer(gap=0.005)
    with running(mock) as port:
        program = [sys.executable, "-m", "vtune_cli", "bench", "run", "--url", f"http://127.0.0.1:{port}"]
        if "__main__" not in Path(sys.modules["vtune_cli"].__file__ or "").read_text():
            program[1:3] = ["-c", "from vtune_cli import app; app()"]
        process = subprocess.Popen(
            [*program, "--rate", "50", "--duration", "60s", *FAST, "--json", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        line = process.stderr.readline()  # the first sign of progress
        while mock.seen.answered < 20:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 130, line + err
    assert "interrupted" in out
    run = Records.load(path)
    assert run.partial
    assert any(r.ok for r in run.requests)
    assert "Traceback" not in err
