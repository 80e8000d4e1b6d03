"""Whole decoders through the Triton kernels, in the interpreter, against the torch path; graphs; the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import VOCAB, make_request, run_step, save_tiny_llama
from triton_interpreter import kernels

from engine.config import EngineConfig
from engine.kernels.base import AttentionShape, Kernels
from engine.kernels.cpu import TorchKernels
from engine.kernels.triton.graphs import Launch
from engine.request import Request
from engine.runner import ModelRunner

CPU = torch.device("cpu")
Factory = Callable[..., Kernels]


def triton_kernels(sizes: tuple[int, ...] = (), record: Any = None) -> Factory:
    def make(shape: AttentionShape, dtype: torch.dtype, *tables: Any, **ignored: Any) -> Kernels:
        return kernels.TritonKernels(shape, dtype, *tables[:2], CPU, sizes, record)

    return make


def torch_kernels(shape: AttentionShape, dtype: torch.dtype, *tables: Any, **ignored: Any) -> Kernels:
    return TorchKernels(shape, dtype, *tables[:2])


def make_runner(monkeypatch: pytest.MonkeyPatch, factory: Factory, model: Path, **flags: Any) -> ModelRunner:
    monkeypatch.setattr("engine.runner.make_kernels", factory)
    runner = ModelRunner(EngineConfig(model=str(model), dtype="float32", **flags))
    runner.allocate(60)
    return runner


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def distributions(runner: ModelRunner) -> list[torch.Tensor]:
    """Of three requests: a long prompt in two chunks, a short one, and a decode, mixed, and then together."""
    long = make_request("long", tokens(1, 90), [7, 3, 12, 1, 9, 2], logprobs=VOCAB)
    short = make_request("short", tokens(2, 5), [20, 21], logprobs=VOCAB)
    decode = make_request("decode", tokens(3, 34), [30, 29, 28], logprobs=VOCAB)
    run_step(runner, (decode, 0, 33))
    run_step(runner, (long, 0, 60))
    results = [run_step(runner, (decode, 33, 1), (long, 60, 30), (short, 0, 5))]
    for request in (long, short, decode):
        request.token_ids.append(int(results[0].tokens[request.request_id][0]))
    results.append(run_step(runner, *((r, r.num_tokens - 1, 1) for r in (long, short, decode))))
    return [_row(result.logprobs[name][0].top) for result in results for name in ("long", "short", "decode")]


def _row(top: tuple[tuple[int, float], ...]) -> torch.Tensor:
    row = torch.empty(VOCAB)
    for token, logprob in top:
        row[token] = logprob
    return row


@pytest.mark.parametrize("flags", [{}, {"block_size": 32}, {"kv_cache_dtype": "fp8_per_token_head"}], ids=str)
def test_a_decoder_equals_the_torch_path(
    tiny: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = distributions(make_runner(monkeypatch, torch_kernels, tiny, **flags))
    found = distributions(make_runner(monkeypatch, triton_kernels(), tiny, **flags))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, atol=1e-4 if not flags.get("kv_cache_dtype") else 2e-2, rtol=1e-4
        )
