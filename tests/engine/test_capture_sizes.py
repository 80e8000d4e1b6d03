"""Flags of CUDA graphs: their rules, the sizes they give, and that they say so where they do nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.device import capture_sizes, memory_of, pick_device, warn_of_unused

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({"max_num_seqs": 8}, (1, 2, 4, 8, 16)),
        ({"max_num_seqs": 1}, (1, 2)),
        ({"max_cudagraph_capture_size": 20}, (1, 2, 4, 8, 16)),
        (
            {"max_cudagraph_capture_size": 20, "max_num_batched_tokens": 18, "max_num_seqs": 18},
            (1, 2, 4, 8, 16, 18),
        ),
        ({"cudagraph_capture_sizes": (8, 1, 8, 9999)}, (1, 8)),
        ({"cudagraph_capture_sizes": (8, 1), "max_cudagraph_capture_size": 8}, (1, 8)),
        ({"enforce_eager": True}, ()),
    ],
    ids=str,
)
def test_sizes_are_vllm_s(flags: dict[str, Any], sizes: tuple[int, ...]) -> None:
    config = EngineConfig(**flags)
    config.validate()
    assert capture_sizes(config, GPU) == sizes
    assert capture_sizes(config, CPU) == ()


def test_default_sizes() -> None:
    """1, 2, 4, 8, 16, ..., 248, 256, 272, ..., 512."""
    sizes = capture_sizes(EngineConfig(max_num_seqs=1000), GPU)
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-18:] == (248, 256, *range(272, 513, 16))
    assert len(sizes) == 51


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cudagraph_capture_sizes": ()}, r"--cudagraph-capture-sizes \(none\): sizes must be at least 1"),
        ({"cudagraph_capture_sizes": (0, 4)}, "--cudagraph-capture-sizes 0 4: sizes must be at least 1"),
        ({"cudagraph_capture_sizes": (4096,)}, r"every size exceeds max_num_batched_tokens \(2048\)"),
        (
            {"cudagraph_capture_sizes": (4, 8), "max_cudagraph_capture_size": 16},
            r"--max-cudagraph-capture-size 16: must be the largest of cudagraph_capture_sizes \(8\)",
        ),
        ({"max_cudagraph_capture_size": 0}, "--max-cudagraph-capture-size 0: must be at least 1"),
    ],
    ids=str,
)
def test_rules(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**flags).validate()


def test_the_cpu_says_that_they_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_unused(EngineConfig(), CPU)
        warn_of_unused(EngineConfig(enforce_eager=True, max_cudagraph_capture_size=4), GPU)
        assert not caplog.records
        warn_of_unused(EngineConfig(enforce_eager=True, max_cudagraph_capture_size=4), CPU)
    assert [record.message for record in caplog.records] == [
        "--enforce-eager has no effect on the CPU: it records no graphs",
        "--max-cudagraph-capture-size has no effect on the CPU: it records no graphs",
    ]


def test_without_a_gpu_the_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device() == CPU
    assert memory_of(CPU) > 0


def test_a_gpu_without_triton_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert pick_device() == CPU
    assert "pip install triton" in caplog.text
