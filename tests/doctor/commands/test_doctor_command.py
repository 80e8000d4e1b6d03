"""The command line: exit codes, output, and errors in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_server import Server
from typer.testing import CliRunner, Result

from vtune_cli import app

CAPPED = Server(running=2, waiting=9, kv=0.02)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def written(server: Server, path: Path) -> str:
    path.write_text("".join(f"# scrape_unix_ms {t}\n{page}" for t, page in server.scrapes()))
    return str(path)


@pytest.fixture
def capped(tmp_path: Path) -> str:
    return written(CAPPED, tmp_path / "capped.prom")


def test_text_shows_finding_figures_query_flags_and_cure(capped: str) -> None:
    result = run("doctor", "--series", capped, "--flags", "vllm serve m --max-num-seqs 2")
    assert result.exit_code == 0
    for part in (
        "1. WARNING seq-cap",
        "waiting_share = 100 %",
        "vllm:num_requests_waiting",
        "max_num_seqs = 2 (given)",
        "try: --max-num-seqs 16   (max_num_seqs was 2)",
        "ITL P99 < 200 ms (default): held, 50 ms",
        "TTFT P95 < 2 s (default): held, 24",
        "kv-idle",
        "(explained by seq-cap)",
        "Cannot tell:",
        "--assume shared-prefix",
    ):
        assert part in result.stdout
    assert "Not judged" not in result.stdout
    assert "Not judged: LoRA" in run("doctor", "--series", capped).stdout
    assert "avg_over_time" not in run("doctor", "--series", capped, "--no-queries").stdout


def test_json_has_the_documented_form(capped: str) -> None:
    result = run("doctor", "--series", capped, "--flags", "vllm serve m --max-num-seqs 2", "--format", "json")
    document = json.loads(result.stdout)
    assert document["schema"] == "vtune.doctor/1"
    assert document["healthy"] is False
    first = document["findings"][0]
    assert (first["id"], first["severity"], first["suppressed_by"]) == ("seq-cap", "warning", None)
    assert first["instance"] == capped
    assert {"signal", "value", "query"} <= first["evidence"][0].keys()
    assert first["prescriptions"][0]["set"] == {"max_num_seqs": 16}
    kinds = {item["id"]: {m["kind"] for m in item["missing"]} for item in document["cannot_tell"]}
    assert kinds["prefix-misses"] == {"assumption"}
    assert kinds["slow-start"] == {"elsewhere"}


def test_json_says_which_flags_it_judged_by_and_where_they_are_from(capped: str, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        "max-num-seqs: 2\nmax-model-len: 8192\nspeculative-config: {num_speculative_tokens: 3}\n"
    )
    command = f"docker run i/vllm:v0.11.0 --config {settings} --max-model-len 4096 --api-key mine"
    command += " --no-async-scheduling"
    result = run("doctor", "--series", capped, "--flags", command, "--format", "json")
    document = json.loads(result.stdout)
    flags = document["flags"]
    assert document["server"]["version"] == "0.11.0"
    assert flags["max_num_seqs"] == {"value": 2, "origin": "config file"}
    assert flags["num_speculative_tokens"] == {"value": 3, "origin": "config file"}
    assert flags["max_model_len"] == {"value": 4096, "origin": "given"}
    assert flags["async_scheduling"] == {"value": False, "origin": "given"}
    assert flags["enable_chunked_prefill"] == {"value": True, "origin": "default"}
    assert "mine" not in result.stdout
    document = json.loads(run("doctor", "--series", capped, "--format", "json").stdout)
    assert document["flags"]["max_num_seqs"] == {"value": 2, "origin": "inferred"}
    assert document["flags"]["tensor_parallel_size"] == {"value": 1, "origin": "default", "between": [1, 64]}


def test_a_flag_that_no_release_has_leaves_no_default_certain(capped: str) -> None:
    command = "vllm serve m --max-num-seqs 2 --unheard-of 7"
    document = json.loads(run("doctor", "--series", capped, "--flags", command, "--format", "json").stdout)
    assert document["flags"]["enable_chunked_prefill"]["between"] == [0, 1]
    assert any(note.startswith("--unheard-of: no release of vLLM") for note in document["notes"])
    assert "--unheard-of: no release of vLLM" in run("doctor", "--series", capped, "--flags", command).stdout


@pytest.mark.parametrize(("threshold", "code"), [(None, 0), ("info", 1), ("warning", 1), ("critical", 0)])
def test_fail_on_gates_the_exit_code(capped: str, threshold: str | None, code: int) -> None:
    gate = ["--fail-on", threshold] if threshold else []
    assert run("doctor", "--series", capped, "--flags", "--max-num-seqs 2", *gate).exit_code == code


def test_a_healthy_server_passes_every_gate(tmp_path: Path) -> None:
    result = run("doctor", "--series", written(Server(), tmp_path / "a.prom"), "--fail-on", "info")
    assert result.exit_code == 0
    assert "Healthy" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to look at"),
        (["--metrics", "http://a", "--prometheus", "http://b"], "are different sources; give one"),
        (["--selector", 'job="x"', "--metrics", "http://a"], "it needs --prometheus URL"),
        (["--series", "absent.prom"], "absent.prom: cannot be read (No such file or directory)"),
        (["--series", "{capped}", "--window", "soon"], "write a duration such as 90s"),
        (["--series", "{capped}", "--window", "0s"], "write a duration such as 90s"),
        (["--series", "{capped}", "--slo", "itl<50ms"], "of what statistic"),
        (["--series", "{capped}", "--slo", "itl_p99<0ms"], "can never be met"),
        (["--series", "{capped}", "--slo", "itl_p99{class=chat}<50ms"], "carry no request class"),
        (["--series", "{capped}", "--assume", "shared-prefix"], "write shared-prefix=NUMBER"),
        (["--series", "{capped}", "--assume", "shared-prefix=nan"], "a number of tokens"),
        (["--series", "{capped}", "--assume", "batch=3"], "unknown; known: shared-prefix"),
        (["--series", "{capped}", "--flags", "vllm serve m --max-num-seqs two"], "--flags: "),
        (["--series", "{capped}", "--log", "absent.log"], "--log absent.log: cannot be read"),
    ],
)
def test_wrong_use_is_said_in_words(arguments: list[str], complaint: str, capped: str) -> None:
    filled = [capped if argument == "{capped}" else argument for argument in arguments]
    result = run("doctor", *(filled or ["--format", "text"]))
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stdout == ""


def test_playbooks_are_listed_and_shown() -> None:
    listed = run("playbook", "list")
    assert listed.exit_code == 0
    assert "seq-cap                    warning   Requests wait" in listed.stdout
    shown = run("playbook", "show", "seq-cap")
    assert shown.stdout.startswith("---\nid: seq-cap\n")
    wrong = run("playbook", "show", "seq-capp")
    assert (wrong.exit_code, "did you mean 'seq-cap'?" in wrong.stderr) == (2, True)


def test_importing_the_commands_imports_nothing_heavy() -> None:
    heavy = ("numpy", "requests", "yaml", "prometheus_client")
    code = f"import sys, doctor.cli; print([name for name in {heavy} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize("command", [["doctor"], ["playbook", "list"], ["playbook", "show"]])
def test_help_has_examples(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout
