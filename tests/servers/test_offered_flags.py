"""What a server's help offers: read once a version, in argparse's words and in typer's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from loadgen.targets.server import ServerTarget
from servers.flags.offered_flags import OfferedFlags, parse_help, read_offered_flags

VLLM = """usage: vllm serve [model_tag] [options]

options:
  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT
                        How many API server processes to run. Use
                        --not-a-flag for more. (default: None)
  --grpc                Launch the gRPC server on --port instead of HTTP.
  -h, --help            show this help message and exit

CacheConfig:
  --enable-prefix-caching, --no-enable-prefix-caching
                        Whether to enable prefix caching. (default: None)
  --gpu-memory-utilization GPU_MEMORY_UTILIZATION, --device-memory-utilization GPU_MEMORY_UTILIZATION
                        The fraction of GPU memory. (default: 0.92)
  --kv-cache-dtype {auto,fp8,fp8_e4m3}
                        Data type for kv cache storage.
"""
TYPER = """
│ --host                                   <str>       Address to listen on. [default: 127.0.0.1] │
│ --enable-prefix-caching                              Reuse the KV of common beginnings of       │
│   --no-enable-prefix-caching                         prompts. [default: enable-prefix-caching]  │
│ --async-scheduling     --no-async-scheduling         Plan a step while --another computes.      │
"""


def test_flags_are_read_from_argparse_and_typer() -> None:
    assert parse_help(VLLM) == {
        "api_server_count": (),
        "grpc": (),
        "help": (),
        "enable_prefix_caching": (),
        "gpu_memory_utilization": (),
        "device_memory_utilization": (),
        "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3"),
    }
    assert set(parse_help(TYPER)) == {"host", "enable_prefix_caching", "async_scheduling"}


def test_what_is_lacking_and_what_is_near() -> None:
    offered = OfferedFlags("vllm", "0.32.0", parse_help(VLLM))
    names = ["grpc", "max_num_partial_prefills", "max_num_partial_prefills"]
    assert offered.lacking(names) == ["max_num_partial_prefills"]
    assert offered.near("enable_prefix_cache") == "enable_prefix_caching"
    assert offered.near("something_else_entirely") == ""
    assert offered.takes("kv_cache_dtype", "fp8")
    assert not offered.takes("kv_cache_dtype", "int4")
    assert offered.takes("gpu_memory_utilization", 0.5)


def program(directory: Path, body: str) -> Path:
    """A ``vllm`` that counts its calls."""
    path = directory / "vllm"
    path.write_text(
        f"#!{sys.executable} -S\nimport sys\nopen({str(directory / 'calls')!r}, 'a').write('x')\n{body}"
    )
    path.chmod(0o755)
    return path


def calls(directory: Path) -> int:
    return len((directory / "calls").read_text())


def test_the_help_is_read_once_for_each_program_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path / "cache"))
    body = f"print('0.32.0+cpu' if '--version' in sys.argv else {VLLM!r})"
    target = ServerTarget("vllm serve M {flags}", env={"PATH": str(tmp_path)})
    assert target.offered_flags() is None  # not installed

    path = program(tmp_path, body)
    offered = target.offered_flags()
    assert offered is not None
    assert (offered.version, offered.program) == ("0.32.0+cpu", str(path))
    assert offered.flags["kv_cache_dtype"] == ("auto", "fp8", "fp8_e4m3")
    assert calls(tmp_path) == 2
    assert target.offered_flags() == offered
    assert calls(tmp_path) == 2

    os.utime(path, ns=(1, 1))  # another version was installed
    target.offered_flags()
    assert calls(tmp_path) == 4
    for saved in (tmp_path / "cache" / "offered-flags").iterdir():
        saved.write_text("not whole")
    assert target.offered_flags() == offered


def test_a_program_that_does_not_explain_itself_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path / "cache"))
    path = program(tmp_path, "sys.exit(3)")
    assert read_offered_flags([str(path), "serve"], [["--help=all"], ["--help"]]) is None
    assert read_offered_flags([str(tmp_path / "gone")], [["--help"]]) is None
    assert ServerTarget("my-server {flags}").offered_flags() is None


def test_our_own_engine_names_its_flags() -> None:
    offered = ServerTarget.bundled().offered_flags()
    assert offered is not None
    assert {"max_num_seqs", "max_num_partial_prefills", "speculative_config"} <= set(offered.flags)
    assert "tensor_parallel_size" not in offered
