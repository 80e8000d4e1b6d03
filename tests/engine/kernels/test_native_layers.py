"""All layers in one call of C++ give what the operations one by one give; argmax; int8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import save_tiny_llama

from engine.kernels.base import AttentionShape, Batch, Kernels
from engine.kernels.cpu import TorchKernels
from engine.kernels.int8 import Int8Linear, quantise_rows
from engine.kernels.native import NativeKernels, NativeLinear, NativeUnavailable, supports
from engine.models.checkpoint import load_model_config, open_checkpoint
from engine.models.model import Decoder, Workspace, attention_shape, layer_rope_tables, load_decoder

SHAPE = AttentionShape(1, 1, 32, 16, 1.0)
TABLES = torch.ones(4, 16), torch.zeros(4, 16)
BLOCK = 16


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    try:
        supports(SHAPE, request.param)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    return request.param


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def make_decoder(path: Path, dtype: torch.dtype, int8: bool, native: bool = True) -> Decoder:
    config = load_model_config(path).within(512)
    kind = NativeKernels if native else TorchKernels
    kernels = kind(attention_shape(config, BLOCK), dtype, *layer_rope_tables(config, 512), int8=int8)
    return load_decoder(config, kernels, open_checkpoint(path).tensors())


def batch_of(starts: list[int], counts: list[int]) -> Batch:
    """Sequences with blocks of their own, 32 each."""
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
    sequence = np.repeat(np.arange(len(counts)), counts)
    ends = np.array(starts) + np.array(counts)
    widths = -(-ends // BLOCK)
    tables = np.concatenate([1 + 32 * s + np.arange(width) for s, width in enumerate(widths)])
    slots = (1 + 32 * sequence + positions // BLOCK) * BLOCK + positions % BLOCK
    arrays = (positions, slots, offsets, ends, tables, np.concatenate(([0], np.cumsum(widths))))
    return Batch(*(array.astype(np.int32) for array in arrays))


def run(decoder: Decoder, fused: bool, batches: list[Batch]) -> list[torch.Tensor]:
    """What the layers make of random residual streams, a batch after the other in one cache."""
    layers, kernels = decoder.fused, decoder.kernels
    if not fused:
        decoder.fused = None
    caches = [kernels.allocate_cache(1 + 32 * len(batches[0].context_lens)) for _ in decoder.layers]
    found = []
    for number, batch in enumerate(batches):
        workspace = Workspace(decoder.config, kernels.dtype, batch.num_tokens, 1)
        stream = torch.randn(
            batch.num_tokens, decoder.config.hidden_size, generator=torch.manual_seed(number)
        )
        workspace.hidden.copy_(stream)
        found.append(decoder.layers_forward(batch, caches, workspace).clone())
    decoder.fused = layers
    return found


STEPS = {
    "few rows": ([[0, 0, 0]], [[20, 1, 9]]),
    "many rows, then few": ([[0, 0, 0], [200, 64, 90]], [[200, 64, 90], [1, 1, 1]]),
    "one row": ([[0], [5]], [[5], [1]]),
    "64 rows": ([[0]], [[64]]),
    "65 rows": ([[0]], [[65]]),
}


@pytest.mark.parametrize("int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize("steps", STEPS)
def test_fused_layers_give_the_same_bits(
    checkpoint: Path, dtype: torch.dtype, steps: str, int8: bool
) -> None:
    decoder = make_decoder(checkpoint, dtype, int8)
    assert decoder.fused is not None
    starts, counts = STEPS[steps]
    batches = [batch_of(a, n) for a, n in zip(starts, counts, strict=True)]
    for fused, single in zip(run(decoder, True, batches), run(decoder, False, batches), strict=True):
        assert torch.equal(fused, single)


def test_int8_layers_are_those_of_the_torch_path(checkpoint: Path) -> None:
    batches = [batch_of([0, 0], [70, 3])]
    native, torch_path = (
        run(make_decoder(checkpoint, torch.float32, True, in_cpp), in_cpp, batches)[0]
        for in_cpp in (True, False)
    )
    # A last digit may tip an activation to its other neighbour among 255 steps.
    assert (native - torch_path).abs().max() < 0.02 * torch_path.abs().max()
    assert (native - torch_path).abs().mean() < 1e-3 * torch_path.abs().mean()


def test_layers_with_other_parts_are_not_fused(checkpoint: Path, dtype: torch.dtype) -> None:
    decoder = make_decoder(checkpoint, dtype, False)
    ones = torch.ones(decoder.config.head_dim, dtype=dtype)
    normed = [replace(layer, head_norms=(ones, ones)) for layer in decoder.layers]
    assert decoder.kernels.fuse(normed, 1e-5) is None


@pytest.mark.parametrize("kind", [NativeKernels, TorchKernels])
@pytest.mark.parametrize("rows", [1, 7, 8, 17, 130])
@pytest.mark.parametrize(("columns", "inner"), [(48, 32), (97, 68), (480, 576)])
def test_int8_products(
    kind: type[NativeKernels] | type[TorchKernels], rows: int, columns: int, inner: int, dtype: torch.dtype
) -> None:
    """Against sums of the same integers in float64."""
    kernels: Kernels = kind(SHAPE, dtype, *TABLES, int8=True)
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    x[1:2] = 0.0
    bias, before = torch.randn(columns).to(dtype), torch.randn(rows, columns).to(dtype)
    (x8, x_scales), (w8, w_scales) = quantise_rows(x), quantise_rows(weight)
    exact = (x8.double() @ w8.double().T) * x_scales.double() * w_scales.double().T

    def error(out: torch.Tensor, expected: torch.Tensor) -> float:
        return float((out.double() - expected).abs().max() / (1 + expected.abs().max()))

    linear = kernels.pack(weight, bias)
    wide = torch.empty(rows, columns)
    kernels.linear(x, linear, wide)
    # Half a step, which is common among so short numbers, may be rounded to either side.
    assert error(wide, exact + bias.double()) < (1e-5 if dtype == torch.float32 else 8e-3)
    added = before.clone()
    kernels.linear_add(x, kernels.pack(weight), added)
    assert error(added, exact + before.double()) < (1e-5 if dtype == torch.float32 else 1.6e-2)
    assert error(exact, x.double() @ weight.double().T) < 0.03


def test_int8_weights_take_a_byte_each(dtype: torch.dtype) -> None:
    weight = torch.randn(480, 576).to(dtype)
    overhead = 2 * 4 * 480  # scales, and in C++ shifts
    assert NativeKernels(SHAPE, dtype, *TABLES, int8=True).pack(weight).nbytes == 480 * 576 + overhead
    assert Int8Linear(weight, None).nbytes == 480 * 576 + 4 * 480


def test_a_width_that_is_no_multiple_of_4_stays_as_computed(dtype: torch.dtype) -> None:
    kernels = NativeKernels(SHAPE, dtype, *TABLES, int8=True)
    linear = kernels.pack(torch.randn(48, 66).to(dtype))
    assert isinstance(linear, NativeLinear)
    assert linear.scales is None


def test_rows_as_bytes() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    quantised, scales = quantise_rows(x)
    assert quantised.tolist() == [[64, -127, 32, 0], [0, 0, 0, 0]]
    assert scales[0].item() == pytest.approx(2 / 127)


@pytest.mark.parametrize("columns", [5, 16, 100, 49_152])
def test_argmax(columns: int, dtype: torch.dtype) -> None:
    kernels = NativeKernels(SHAPE, dtype, *TABLES)
    logits = torch.randn(9, columns, generator=torch.manual_seed(0))
    logits[1, [2, 4]] = 50.0
    logits[2] = -torch.inf
    logits[3, -1] = 60.0
    found = kernels.argmax(logits)
    assert found[1:4] == [2, 0, columns - 1]
    assert found == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", [NativeKernels, TorchKernels])
def test_a_weight_that_is_packed_exactly_is_not_quantised(
    kind: type[NativeKernels] | type[TorchKernels], dtype: torch.dtype
) -> None:
    kernels = kind(SHAPE, dtype, *TABLES, int8=True)
    x, weight = torch.randn(5, 48).to(dtype), torch.randn(32, 48).to(dtype)
    out = torch.empty(5, 32, dtype=dtype)
    kernels.linear(x, kernels.pack_exact(weight), out)
    torch.testing.assert_close(out, x @ weight.T)
