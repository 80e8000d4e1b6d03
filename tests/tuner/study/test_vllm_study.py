"""``--target vllm`` from end to end, on a program that says it is vLLM and serves as the fake server does."""

from __future__ import annotations

import sys
from pathlib import Path

import optuna
import psutil
import pytest

from tuner.command import run
from tuner.job.options import Options, Place

FAKE = Path(__file__).parents[2] / "fake_server.py"
HELP = """options:
  --max-num-seqs MAX_NUM_SEQS
                        Maximum number of sequences. (default: None)
  --max-num-batched-tokens MAX_NUM_BATCHED_TOKENS
                        Maximum number of tokens. (default: None)
  --gpu-memory-utilization GPU_MEMORY_UTILIZATION, --device-memory-utilization GPU_MEMORY_UTILIZATION
                        The fraction of GPU memory. (default: 0.92)
"""
PROGRAM = f"""#!{sys.executable} -S
import os, sys
if sys.argv[1:] == ["--version"]:
    print("0.32.0+cpu")
elif sys.argv[1:] == ["serve", "--help=all"]:
    print({HELP!r})
else:
    at = sys.argv.index("--host")
    assert sys.argv[at + 1] == "127.0.0.1", "it would listen on every address"
    assert sys.argv[1:3] == ["serve", "M"], sys.argv
    print("VAR is", os.environ["VAR"], flush=True)
    words = sys.argv[2:at] + sys.argv[at + 2:]
    os.execv(sys.executable, [sys.executable, "-S", {str(FAKE)!r}, *words, "--time-scale", "0.2"])
"""


def test_a_study_of_a_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path / "cache"))
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    before = set(psutil.Process().children(recursive=True))
    options = Options(
        target="vllm",
        flags=f"VAR=x {program} serve M --max-num-seqs 16",
        slo="ttft_es95<60s",  # held on however busy a machine
        rate=50.0,
        workload="random",
        run_time="0.5s",
        trials=1,
        pairs=2,
        prior="none",
        place=Place(study="s", out=tmp_path / "out"),
    )
    assert run(options) == 0
    said = capsys.readouterr()
    notes = " ".join(said.err.split())
    assert f"{program}: version 0.32.0+cpu" in notes
    assert "long_prefill_token_threshold is not varied: vllm 0.32.0+cpu has no" in notes
    assert "speculative_config is not varied" in notes
    assert "VAR is x" in (tmp_path / "out" / "logs" / "vllm-001.log").read_text()
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/out/study.db")
    told = [trial.user_attrs["result"] for trial in study.trials if "result" in trial.user_attrs]
    assert told[0]["status"] == "measured"
    assert told[0]["kv_tokens"]
    assert told[0]["preemptions"] == 0
    assert set(told[0]["config"]) >= {"max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"}
    assert set(psutil.Process().children(recursive=True)) <= before
