"""LMDeploy 0.18.0 as its source has it: its flags, its metrics, its log, and how a start of it ends."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.log_source import LogSource
from doctor.metrics.sources import Scrapes
from loadgen.target import StartFailed
from loadgen.targets.server import ServerTarget
from servers.command import parse_command
from servers.failures import classify
from servers.flags.words import FlagError
from servers.kinds.lmdeploy import LMDEPLOY
from servers.server_log import parse_log
from tuner.job.options import Options
from tuner.report.reproduce import command_of
from tuner.session.new_job import requested_job
from tuner.space.space import Surroundings, build_space, effective
from tuner.study.target import make_target

COMMAND = "lmdeploy serve api_server M --max-batch-size 64"
FAKE = Path(__file__).parents[1] / "fake_server.py"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_num_seqs": 64}, "--max-batch-size 64"),
        ({"max_num_batched_tokens": 4096}, "--max-prefill-token-num 4096"),
        ({"gpu_memory_utilization": 0.7}, "--cache-max-entry-count 0.7"),
        ({"max_model_len": 8192}, "--session-len 8192"),
        ({"block_size": 64, "tensor_parallel_size": 2}, "--cache-block-seq-len 64 --tp 2"),
        ({"enable_prefix_caching": True, "enforce_eager": True}, "--enable-prefix-caching --eager-mode"),
        ({"enable_prefix_caching": False}, ""),
        ({"kv_cache_dtype": "int8"}, "--quant-policy int8"),
        ({"cudagraph_capture_sizes": [1, 8]}, "--cudagraph-capture-batch-sizes 1 8"),
        ({"backend": "pytorch"}, "--backend pytorch"),
        (
            {"speculative_config": {"method": "eagle3", "model": "D", "num_speculative_tokens": 3}},
            "--speculative-algorithm eagle3 --speculative-draft-model D --speculative-num-draft-tokens 3",
        ),
    ],
)
def test_spelling_there_and_back(flags: Mapping[str, Any], words: str) -> None:
    assert " ".join(LMDEPLOY.spelling.render(flags)) == words
    typed = {name: value for name, value in flags.items() if value is not False}
    assert parse_command(f"lmdeploy serve api_server M {words}").flags == typed


def test_what_it_lacks_is_refused() -> None:
    lacking: list[Mapping[str, Any]] = [
        {"long_prefill_token_threshold": 256},
        {"enable_chunked_prefill": False},
        {"scheduling_policy": "priority"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ]
    for flags in lacking:
        with pytest.raises(FlagError, match="LMDeploy has no"):
            LMDEPLOY.spelling.render(flags)


def test_a_baseline_is_read_planned_and_rendered(tmp_path: Path) -> None:
    text = f"CUDA_VISIBLE_DEVICES=1 {COMMAND} --quant-policy 8 --api-keys a b --tp 2 --server-port 23333"
    asked = requested_job(Options(target="lmdeploy", flags=text, fix=["gpu_memory_utilization"]))
    job = asked.job
    assert (job.model, job.server, job.login) == ("M", "lmdeploy", "started")
    assert asked.connection.api_key == "a"
    assert job.flags == {
        "max_num_seqs": 64,
        "kv_cache_dtype": "int8",
        "tensor_parallel_size": 2,
    }
    target = make_target(job, tmp_path, 60.0)
    assert isinstance(target, ServerTarget)
    assert target.launch_command({"max_num_seqs": 32, "max_num_batched_tokens": 2048}) == (
        "CUDA_VISIBLE_DEVICES=1 lmdeploy serve api_server M --max-batch-size 32 --max-prefill-token-num 2048 "
        "--server-port 8000"
    )
    again = command_of(job)
    assert (
        "--target lmdeploy --model M --flags 'CUDA_VISIBLE_DEVICES=1 lmdeploy serve api_server M --" in again
    )
    assert "--quant-policy int8 --max-batch-size 64 --tp 2'" in again
    space = build_space(effective(job.flags, "lmdeploy"), 8192, around=Surroundings("lmdeploy"))
    assert [axis.name for axis in space.axes] == [
        "max_num_batched_tokens",
        "max_num_seqs",
        "gpu_memory_utilization",
    ]
    assert space.baseline["max_num_batched_tokens"] == 8192
    assert space.baseline["enable_prefix_caching"] is False
    assert not space.refusals({**space.baseline, "max_num_batched_tokens": 32})  # it bounds prompts alone


SHIM = """#!{python} -S
import os, sys
serve, kind, model, *flags = sys.argv[1:]
assert (serve, kind) == ("serve", "api_server"), sys.argv
names = {{"--max-batch-size": "--max-num-seqs", "--server-port": "--port", "--server-name": "--host"}}
if "--max-prefill-token-num" in flags:
    print("Traceback (most recent call last):\\n  File \\"base.py\\", line 405, in _update_num_gpu_blocks")
    sys.exit("RuntimeError: No enough gpu memory for kv cache.")
assert flags[flags.index("--server-name") + 1] == "127.0.0.1"
flags = [names.get(flag, flag) for flag in flags]
at = flags.index("--host")
os.execv({python!r}, [{python!r}, "-S", {fake!r}, model, *flags[:at], *flags[at + 2 :]])
"""


def test_it_is_started_and_a_failed_start_is_read(tmp_path: Path) -> None:
    program = tmp_path / "lmdeploy"
    program.write_text(SHIM.format(python=sys.executable, fake=str(FAKE)))
    program.chmod(0o755)
    command = f"{shlex.quote(str(program))} serve api_server M"
    target = ServerTarget.of(LMDEPLOY, "M", command=command, log_dir=tmp_path / "logs")
    assert target.exclusive
    with target.open({"max_num_seqs": 4}) as server:
        assert server.scrape()
    with pytest.raises(StartFailed) as caught, target.open({"max_num_batched_tokens": 1 << 20}):
        pass
    assert caught.value.reason == "kv_cache_too_small"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("RuntimeError: No enough gpu memory for kv cache.", "kv_cache_too_small"),
        ("AssertionError: No enough gpu memory for state cache.", "kv_cache_too_small"),
        ("RuntimeError: No enough gpu memory for runtime.", "out_of_memory"),
        ("lmdeploy: error: argument --max-batch-size: invalid int value: 'x'", "bad_flag"),
        ("lmdeploy: error: unrecognized arguments: --max-num-seqs 4", "bad_flag"),
        ("AssertionError: invalid cache_max_entry_count", "bad_flag"),
        ("ModuleNotFoundError: No module named 'lmdeploy'", "not_found"),
    ],
)
def test_why_it_ended(line: str, reason: str) -> None:
    assert classify(f"Traceback (most recent call last):\n{line}\n", 1).reason == reason


LACKS = (
    "num_preemptions",
    "prefix_cache_",
    "request_time_per_output_token",
    "request_prefill_kv",
    "request_num_preemptions",
    "iteration_tokens",
    "cache_config_info",
)


def as_lmdeploy(page: str) -> str:
    """A page of the synthetic vLLM under the names of ``lmdeploy/metrics/loggers.py``."""
    page = page.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    page = page.replace("vllm:inter_token_latency_seconds", "vllm:iter_token_latency")
    lines = [line for line in page.splitlines() if not re.match(rf"vllm:({'|'.join(LACKS)})", line)]
    more = 'vllm:prefix_cache_hit_rate{engine="0",model_name="m"} 0.0\n'
    return ("\n".join(lines) + "\n" + more).replace("vllm:", "lmdeploy:")


def judged(server: Server, flags: str | None = None) -> Diagnosis:
    pages = [(at, as_lmdeploy(page)) for at, page in server.scrapes()]
    return diagnose(Scrapes(pages), None if flags is None else parse_command(flags).flags)


def test_its_page_is_recognised_and_what_it_lacks_is_named() -> None:
    found = judged(Server(), COMMAND)
    assert found.family == "LMDeploy"
    assert found.findings == ()
    assert found.version is None
    why = {item.why for undecided in found.cannot_tell for item in undecided.missing}
    assert "lmdeploy:request_generation_tokens is missing" in why
    assert not any("preemptions" in each for each in why), "no release of it has counted them"
    assert not {item.id for item in found.cannot_tell} & {"overload", "seq-cap", "itl-flat-high"}


def test_a_prescription_is_in_its_flags_and_its_steps() -> None:
    capped = replace(
        Server(), running=64, waiting=20, kv=0.3, histograms={"ttft": {4.0: 10}, "queue_time": {3.5: 10}}
    )
    (finding, *_) = judged(capped, COMMAND).findings
    assert finding.id == "seq-cap"
    assert finding.prescriptions[0].args == "--max-batch-size 88"
    full = replace(Server(), running=40, waiting=20, kv=0.99, histograms=capped.histograms)
    text = " ".join(
        item.args
        for finding in judged(full, f"{COMMAND} --cache-max-entry-count 0.6").findings
        for item in finding.prescriptions
    )
    assert "--cache-max-entry-count 0.65" in text
    assert "gpu-memory-utilization" not in text


def test_only_its_own_flags_are_spoken_of() -> None:
    assert LMDEPLOY.unavailable("long_prefill_token_threshold", None) == "LMDeploy has no such flag"
    assert LMDEPLOY.unavailable("max_num_seqs", "0.18.0") is None


def line(second: int, running: int, waiting: int, kv: float, more: str = "") -> str:
    """As ``LoggingStatLogger.log`` prints it."""
    return (
        f"[2026-05-04 10:00:{second:02d} DP0] Avg thr (in/out): 100.0 / 50.0 tokens/s, "
        f"Server (succeeded/failed/routed/waiting): 5 / 0 / {running} / 0, "
        f"Engine (running/waiting): {running} / {waiting}, KV cache: {kv:.1f}%, {more}"
    )


CONFIG = (
    "2026-05-04 09:59:00,000 - lmdeploy - \x1b[37mINFO\x1b[0m - async_engine.py:168 - updated backend_config="
    "PytorchEngineConfig(dtype='auto', tp=2, session_len=8192, max_batch_size=64, cache_max_entry_count=0.8, "
    "block_size=64, max_prefill_token_num=8192, enable_prefix_caching=False, "
    "quant_policy=<QuantPolicy.NONE: 0>)"
)


def test_its_log_is_read(tmp_path: Path) -> None:
    drafts = "SpecDecoding metrics: Draft acceptance rate: 50.00%, Accepted: 10 tokens, Drafted: 20 tokens, "
    text = "\n".join([CONFIG, *(line(second, 8, 1, 40.0, drafts) for second in range(0, 50, 10))])
    facts = parse_log(text)
    assert facts.complete
    assert facts.flags == {
        "tensor_parallel_size": 2,
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.8,
        "block_size": 64,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "dtype": "auto",
    }
    (first, _), *_, (last, page) = facts.scrapes
    assert last - first == 40_000
    assert 'lmdeploy:num_requests_running{engine="0"} 8.0' in page
    assert 'lmdeploy:gpu_cache_usage_perc{engine="0"} 0.4' in page
    assert 'lmdeploy:generation_tokens_total{engine="0"} 2000.0' in page
    assert 'lmdeploy:spec_decode_num_draft_tokens_total{engine="0"} 100.0' in page
    path = tmp_path / "lmdeploy.log"
    path.write_text(text)
    assert diagnose(LogSource(path), log=facts).family == "LMDeploy"


def test_a_budget_that_it_lowered_itself_is_the_budget() -> None:
    lowered = "base.py:382 - No enough memory. Update max_prefill_token_num=2048"
    assert parse_log(f"{CONFIG}\n{lowered}").flags["max_num_batched_tokens"] == 2048
