"""Flags of ``vtune serve``: vLLM's spellings, and what reaches the server."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import engine.server.server
from engine.config import EngineConfig
from engine.lora_config import LoRAModule
from engine.server.serve_command import parse_bytes, parse_count
from engine.speculative_config import SpeculativeConfig
from vtune_cli import app


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5gb", 1_500_000_000), ("4KB", 4000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2XiB", "-1GiB", "1.2.3GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "number"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("2.5k", 2500)])
def test_counts(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "eight"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a whole number"):
        parse_count(text)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments with which the server would have been started."""
    calls: list[tuple[Any, ...]] = []

    def serve(*arguments: Any) -> int:
        calls.append(arguments)
        return 0

    monkeypatch.setattr(engine.server.server, "run_server", serve)
    return calls


def run(line: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *line])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_defaults_are_those_of_the_config(started: list[tuple[Any, ...]]) -> None:
    assert run([]) == (0, "")
    config, options, non_default = started[0]
    assert config == EngineConfig()
    assert (options.host, options.port, options.api_keys, options.access_log) == (
        "127.0.0.1",
        8000,
        (),
        True,
    )
    assert non_default == {}


def test_every_flag_reaches_the_config(started: list[tuple[Any, ...]]) -> None:
    text = """
        model-dir --host 0.0.0.0 --port 0 --api-key k1 --api_key=k2 --disable-uvicorn-access-log
        --tokenizer tok --served-model-name name --dtype float32 --load-format dummy --seed 5
        --max-model-len 1k --block_size 32 --gpu-memory-utilization 0.5 --device-memory 2GiB
        --num-gpu-blocks-override 77 --max_num_batched_tokens=2K --max-num-seqs 9
        --no-enable_chunked_prefill --no-enable-prefix-caching --scheduling-policy priority
        --long-prefill-token-threshold 64 --enable-lora --max-loras 2 --max-lora-rank 64
        --lora-modules sql=./sql chat=a=b"""
    line = shlex.split(text)
    line += ['{"name": "third", "path": "p", "base_model_name": "base"}']
    line += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}']
    assert run(line) == (0, "")
    config, options, non_default = started[0]
    assert config == EngineConfig(
        model="model-dir",
        tokenizer="tok",
        served_model_name=("name",),
        dtype="float32",
        load_format="dummy",
        seed=5,
        max_model_len=1000,
        block_size=32,
        gpu_memory_utilization=0.5,
        device_memory=2 << 30,
        num_gpu_blocks_override=77,
        max_num_batched_tokens=2048,
        max_num_seqs=9,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        long_prefill_token_threshold=64,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=64,
        lora_modules=(
            LoRAModule("sql", "./sql"),
            LoRAModule("chat", "a=b"),
            LoRAModule("third", "p", "base"),
        ),
        speculative_config=SpeculativeConfig(num_speculative_tokens=5),
    )
    assert (options.host, options.port, options.api_keys, options.access_log) == (
        "0.0.0.0",
        0,
        ("k1", "k2"),
        False,
    )
    assert non_default["enable_chunked_prefill"] is False
    assert non_default["api_key"] == "***"
    assert non_default["speculative_config"]["num_speculative_tokens"] == 5


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--bogus"], "no such flag: --bogus"),
        (["--max-num-batched-token", "5"], "did you mean --max-num-batched-tokens?"),
        (["--no-enable-prefix-cache"], "did you mean --enable-prefix-caching?"),
        (["--tensor_parallel_size=2"], "--tensor_parallel_size is a flag of vLLM that this engine does not"),
        (["-tp", "2"], "-tp is a flag of vLLM that this engine does not"),
        (["one", "two"], "one MODEL is served, got one two"),
        (["--port", "70000"], "less than or equal to 65535"),
        (["--speculative-config", "{"], "not JSON"),
        (["--speculative-config", '{"method": "medusa"}'], "method must be one of"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization 2.0: must lie in (0, 1]"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0: must be at least 1"),
        (["--max_num_seqs=512", "--max_num_batched_tokens=256"], "must be at least max_num_seqs (512)"),
        (["--dtype", "maybe"], "'maybe' is not one of"),
        (
            ["--max-num-batched-tokens", "3g"],
            "--max-num-batched-tokens 3000000000: is larger than any machine",
        ),
        (["--device-memory", "9" * 400], "is larger than any machine"),
        (["--device-memory", "99999999999GiB"], "is larger than any machine"),
        (["--lora-modules", "sql=./sql"], "--lora-modules sql: needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "sql"], "sql: must be name=path, or a JSON object"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "name and path must be there"),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": "b", "x": 1}'], "x is no key of it"),
        (["--enable-lora", "--lora-modules", "{"], "not JSON"),
        (["--enable-lora", "--lora-modules", "a=b", "a=c"], "a: is the name of another adapter"),
        (["--enable-lora", "--lora-modules", "bundled=b"], "bundled: is the name of the model"),
        (["--enable-lora", "--lora-modules", "a,b=c"], "must be printable and without commas"),
        (["--max-loras", "0"], "--max-loras 0: must be at least 1"),
        (["--max-lora-rank", "17"], "--max-lora-rank 17: must be one of 1, 8, 16, 32"),
        (["--enable-lora", "--scheduler", "static"], "--enable-lora True: the static scheduler does not"),
        (["--seed", "-1"], "--seed -1: must lie in [0, 9223372036854775807]"),
        (["--served-model-name", "\udcff"], r"--served-model-name '\udcff': is not Unicode text"),
    ],
)
def test_refusals(started: list[tuple[Any, ...]], line: list[str], words: str) -> None:
    code, output = run(line)
    assert code == 2
    assert words in output
    assert not started


def test_slots_without_adapters_are_told_to_have_no_effect(started: list[tuple[Any, ...]]) -> None:
    with pytest.warns(UserWarning, match="have no effect without --enable-lora"):
        assert run(["--max-loras", "4"])[0] == 0
    assert started


def test_the_http_side_does_without_torch() -> None:
    """It has to be up by the time the engine is; and two copies of torch are one too many."""
    probe = (
        "import sys, engine.server.service; print(*{'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_help_has_examples() -> None:
    code, output = run(["--help"])
    assert code == 0
    assert "vtune serve bundled --port 8001" in output


def test_a_key_comes_from_vllms_variable_too(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k0")
    assert run([]) == (0, "")
    assert run(["--api-key", "k1"]) == (0, "")
    assert [(options.api_keys, told["api_key"]) for _, options, told in started] == [
        (("k0",), "***"),
        (("k1",), "***"),
    ]
