"""``vtune optimize``: what it refuses, with which words, before anything is started."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vtune_cli import app


def invoke(*arguments: Any) -> Any:

    return CliRunner().invoke(app, ["optimize", *arguments])


@pytest.fixture(autouse=True)
def back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--slo", "itl_es99<50"], "needs a unit"),
        (["--slo", "nonsense"], "unknown metric 'nonsense'"),
        (["--slo", ""], "expected a metric"),
        (["--target", "nonsense"], "unknown. Give bundled, vllm, "),
        (["--target", "http://"], "no server URL"),
        (["--target", "http://127.0.0.1:1"], "http://127.0.0.1:1/health: Connection refused"),
        (["--target", "sglang", "--vary", "long_prefill_token_threshold"], "SGLang has no such flag"),
        (["--target", "x -m sglang.launch_server --chunked-prefill-size 4 {flags}"], "move it to --flags"),
        (["--flags", "vtune serve --max-num-seq 4"], "(did you mean --max-num-seqs?)"),
        (["--vary", "max_num_seq=1,2"], "no such flag (did you mean max_num_seqs?)"),
        (["--space", "nowhere.yaml"], "--space nowhere.yaml: No such file or directory"),
        (["--target", "x --max-num-seqs 4 {flags}"], "move it to --flags"),
        (["--flags", "vllm serve M --max-num-seqs lots"], "must be a whole number"),
        (["--flags", "vllm serve 'M"], "quotes do not match"),
        (["--flags", "--max-num-batched-tokens auto"], "must be a number to be tuned"),
        (["--flags", "--speculative-config ngram"], "must be a JSON object"),
        (["--workload", "nonsense"], "Known: chat"),
        (["--rate", "1", "--concurrency", "2"], "either open or closed"),
        (["--slo", "throughput", "--rate", "1"], "measured at saturation"),
        (["--budget", "soon"], "no length of time"),
        (["--run-time", "0s"], "no length of time"),
        (["--rate", "inf"], "--rate inf: must be a positive number"),
        (["--scale", "0"], "--scale 0.0: must be a positive number"),
        (["--scale", "nan"], "--scale nan: must be a positive number"),
        (["--seed", "99999999999"], "--seed"),
        (["--study", "\udcff"], r"--study '\udcff': not a printable name"),
        (["--flags", "vtune serve --max-num-seqs 0"], "--flags: max_num_seqs is 0, but must be a positive"),
        (["--vary", "max_num_seqs=x"], '--vary max_num_seqs: "x" is not a number'),
        (["--vary", "max_num_seqs=1e400"], "--vary max_num_seqs: Infinity is not a number"),
        (["--vary", "max_num_seqs=[1]"], "--vary max_num_seqs: [1] is not a number"),
        (["--vary", "new_flag=null"], "--vary new_flag: null is not a number, a switch or a word"),
        (["--fix", "nonsense"], "not a flag that is varied"),
        (["--fix", "all"], "nothing is left to vary"),
        (["--vary", "nonsense"], "has no range of its own"),
        (["--vary", "block_size="], "no values after the ="),
        (["--fix", "max-num-seqs", "--vary", "max-num-seqs"], "both --fix and --vary"),
        (["--trials", "0"], "greater than or equal to 1"),
        (["--rate", "-1"], "greater than or equal to 0.001"),
        (["--storage", "nonsense"], "--storage nonsense: cannot be opened"),
        (["--out", "/proc/nowhere"], "--out /proc/nowhere"),
    ],
)
def test_errors_say_what_to_do_and_exit_2(tmp_path: Path, arguments: list[str], fragment: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert fragment in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_typing_error_leaves_nothing_behind(tmp_path: Path) -> None:
    invoke("--slo", "itl_es99<50")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ([], "vtune-runs/lost."),
        (["--out", "elsewhere"], "elsewhere."),
        (["--storage", "sqlite:///shared.db"], "sqlite:///shared.db."),
        (["--workers", "2"], "vtune-runs/lost."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_study_that_is_not_found_is_not_begun_as_another(tmp_path: Path, where: Any, place: str) -> None:
    result = invoke("--study", "lost", *where)
    assert result.exit_code == 2
    assert f"no such study in {place}" in result.stderr
    assert {entry.name for entry in tmp_path.iterdir()} <= {"shared.db"}


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    result = invoke("--target", "no-such-server {flags}", "--rate", "1", "--out", "out")
    assert result.exit_code == 2
    assert "there is no program 'no-such-server'" in result.output


def test_help_has_examples_and_every_option_is_explained() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from vtune_cli import app;"
        "print(CliRunner().invoke(app, ['optimize', '--help']).output);"
        "heavy = {'optuna', 'torch', 'pandas', 'plotly', 'scipy', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    ).stdout
    assert "Examples:" in shown
    assert "vtune optimize --slo itl" in shown
    for option in (
        "--slo",
        "--target",
        "--flags",
        "--budget",
        "--fix",
        "--vary",
        "--storage",
        "--study",
        "--out",
    ):
        assert option in shown


def test_every_option_reaches_the_run_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(options: Any) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr("tuner.command.run", run)
    words = (
        "--slo",
        "ttft",
        "--replay",
        "t.jsonl",
        "--rate-scale",
        "2",
        "--fix",
        "a",
        "--fix",
        "b",
        "--json",
    )
    assert invoke(*words, "--study", "s").exit_code == 0
    (options,) = asked
    assert (options.slo, options.fix) == ("ttft", ["a", "b"])
    assert (str(options.replay.replay), options.replay.rate_scale) == ("t.jsonl", 2.0)
    assert (options.place.study, options.place.json) == ("s", True)
    assert not options.resumes_only
    assert invoke("--study", "s", "--json").exit_code == 0
    assert asked[1].resumes_only
