"""Whole decoders through the Triton kernels, in the interpreter, against the torch path; steps; sampling."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import VOCAB, make_request, run_step, save_tiny_llama
from triton_interpreter import kernels, sampler

from engine.config import EngineConfig
from engine.kernels.base import AttentionShape, Batch, Kernels
from engine.kernels.cpu import TorchKernels
from engine.kernels.device import idle_batch
from engine.kernels.triton.graphs import Launch
from engine.runner import ModelRunner
from engine.sampling.sampler import Drawn, SampleRow

CPU = torch.device("cpu")
Factory = Callable[..., Kernels]


def triton_kernels(sizes: tuple[int, ...] = (), record: Any = None) -> Factory:
    def make(
        shape: AttentionShape, dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor, *ignored: Any
    ) -> Kernels:
        return kernels.TritonKernels(shape, dtype, cos, sin, CPU, sizes, record)

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
    long = make_request("long", tokens(1, 40), [7, 3, 12, 1], logprobs=VOCAB)
    short = make_request("short", tokens(2, 3), [20, 21], logprobs=VOCAB)
    decode = make_request("decode", tokens(3, 17), [30, 29, 28], logprobs=VOCAB)
    run_step(runner, (decode, 0, 16), (long, 0, 22))
    results = [run_step(runner, (decode, 16, 1), (long, 22, 18), (short, 0, 3))]
    for _ in range(2):
        for request in (long, short, decode):
            request.token_ids.append(int(results[-1].tokens[request.request_id][0]))
        results.append(run_step(runner, *((r, r.num_tokens - 1, 1) for r in (long, short, decode))))
    return [_row(result.logprobs[name][0].top) for result in results for name in ("long", "short", "decode")]


def _row(top: tuple[tuple[int, float], ...]) -> torch.Tensor:
    row = torch.empty(VOCAB)
    for token, logprob in top:
        row[token] = logprob
    return row


@pytest.mark.parametrize("flags", [{"block_size": 32}, {"kv_cache_dtype": "fp8_per_token_head"}], ids=str)
def test_a_decoder_equals_the_torch_path(
    tiny: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = distributions(make_runner(monkeypatch, torch_kernels, tiny, **flags))
    found = distributions(make_runner(monkeypatch, triton_kernels(), tiny, **flags))
    tolerance = 2e-2 if "kv_cache_dtype" in flags else 1e-4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=1e-4)


def test_recorded_steps_equal_the_torch_path(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps padded to 4, recorded once: later steps launch the same, on numbers at the same place."""
    recorded: list[int] = []

    def record(launch: Launch) -> Launch:
        launch()
        recorded.append(1)
        return launch

    expected = distributions(make_runner(monkeypatch, torch_kernels, tiny))
    monkeypatch.setattr("engine.runner.capture_sizes", lambda config, device: (1, 4))
    flags = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
    runner = make_runner(monkeypatch, triton_kernels((1, 4), record), tiny, **flags)
    runner._workspace.attended.zero_()  # idle rows are not used, but the interpreter minds infinities
    runner._warm_up()
    for one, other in zip(distributions(runner), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert len(recorded) == 2
    assert isinstance(runner._kernels, kernels.TritonKernels)
    assert runner._kernels._graphs is not None
    assert sorted(runner._kernels._graphs._replays) == [1, 4]


@pytest.mark.parametrize("config", ["qwen3", "gemma3"])
def test_other_families(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of heads, windows, two ropes, offsets of norms, GELU."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    if config == "qwen3":
        settings |= {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"}
    else:
        settings |= {
            "architectures": ["Gemma3ForCausalLM"],
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    expected = distributions(make_runner(monkeypatch, torch_kernels, tmp_path, load_format="dummy"))
    found = distributions(make_runner(monkeypatch, triton_kernels(), tmp_path, load_format="dummy"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def make_idle(sequences: int, each: int, sizes: tuple[int, ...] = ()) -> tuple[Any, kernels.TritonKernels]:
    shape = AttentionShape(6, 2, 16, 16, 0.25)
    tables = torch.ones(1, 64, 8)
    own = kernels.TritonKernels(shape, torch.float32, tables, tables, CPU, sizes, lambda launch: launch)
    return own.begin(idle_batch(sequences, each)), own


def test_idle_steps_touch_nothing() -> None:
    """What kernels are compiled and graphs recorded with."""
    for sequences, each in ((1, 40), (3, 1), (2, 4)):
        step, own = make_idle(sequences, each)
        cache, tokens = own.allocate_cache(2), sequences * each
        qkv = torch.ones(tokens, 10 * 16)
        out = torch.full((tokens, 6 * 16), 7.0)
        own.rope_and_store(qkv, cache, step)
        own.attention(qkv, cache, step, out)
        assert (out == 7.0).all()
        assert (qkv == 1.0).all()
        assert not cache.keys.stored.any()


def test_steps_are_cut_into_tiles() -> None:
    """Up to 5 tokens of 3 heads fit 16 rows; 40 tokens are long; sequences without tokens have no tile."""
    shape = AttentionShape(6, 2, 16, 16, 0.25)
    tables = torch.ones(1, 64, 8)
    own = kernels.TritonKernels(shape, torch.float32, tables, tables, CPU)
    counts = np.array([5, 40, 0, 1, 6], dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    blocks = -(-counts // 16)
    batch = Batch(
        positions=np.zeros(52, dtype=np.int32),
        slots=np.zeros(52, dtype=np.int32),
        query_start=query_start,
        context_lens=counts,
        tables=np.zeros(blocks.sum(), dtype=np.int32),
        table_start=np.concatenate(([0], np.cumsum(blocks))).astype(np.int32),
    )
    step = own.begin(batch)
    assert step.short.sequence.tolist() == [0, 3]
    assert step.short.first.tolist() == [0, 45]
    tokens = step.long.tiling.tokens(3)
    assert step.long.sequence.tolist() == [1] * -(-40 // tokens) + [4]
    assert step.long.first.tolist() == [*range(5, 45, tokens), 46]
    assert step.batch.query_start.tolist() == query_start.tolist()
    assert step.captured == 0
    for numbers in (
        step.positions,
        step.slots,
        step.short.first,
        step.long.sequence,
        *vars(step.batch).values(),
    ):
        assert numbers.storage_offset() % 4 == 0  # or each step would compile kernels for its own alignments


def test_only_steps_of_single_tokens_are_padded() -> None:
    step, _ = make_idle(3, 1, (1, 4, 8))
    assert step.captured == 4
    assert step.slots.tolist() == [-1] * 4
    assert step.batch.query_start.tolist() == [0, 1, 2, 3, 4]
    assert make_idle(8, 1, (1, 4, 8))[0].captured == 8
    assert make_idle(9, 1, (1, 4, 8))[0].captured == 0
    assert make_idle(3, 2, (1, 4, 8))[0].captured == 0


def test_linear_layers() -> None:
    """Into fp32 and onto the residual, with bias and without."""
    _, own = make_idle(1, 1)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    for given in (None, bias):
        linear, out = own.pack(weight, given), torch.ones(3, 5)
        expected = x @ weight.T + (0.0 if given is None else given)
        own.linear_add(x, linear, out)
        torch.testing.assert_close(out, expected + 1.0)
        own.linear(x, linear, out)
        torch.testing.assert_close(out, expected)
        wide = torch.ones(3, 5, dtype=torch.float64)
        own.linear(x, linear, wide)
        torch.testing.assert_close(wide, expected.double())


def make_rows(seeds: Sequence[int | None], **sampling: Any) -> list[SampleRow]:
    return [
        SampleRow(make_request(str(i), [1, 2], [], **{"temperature": 0.8, "seed": seed, **sampling}))
        for i, seed in enumerate(seeds)
    ]


def test_the_sampler_on_a_device() -> None:
    """Seeds reproduce, alone and among others; rows without one differ each time; greedy is exact."""
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    rows = make_rows([5, None, 7, 5, 9, None])
    rows[4] = SampleRow(make_request("greedy", [1], []))
    logits[3] = logits[0]
    own = sampler.DeviceSampler(0)
    first, _ = own.sample(logits.clone(), rows)
    second, _ = own.sample(logits.clone(), rows)
    assert [first[i] for i in (0, 2, 3, 4)] == [second[i] for i in (0, 2, 3, 4)]
    assert first[0] == first[3]
    assert first[4] == int(logits[4].argmax())
    assert own.sample(logits[2:3].clone(), rows[2:3])[0] == [first[2]]
    unseeded = {tuple(own.sample(logits.clone(), rows)[0][i] for i in (1, 5)) for _ in range(8)}
    assert len(unseeded) > 1
    assert (
        own.sample(logits[:2].clone(), make_rows([1, 2], temperature=0.0))[0]
        == logits[:2].argmax(-1).tolist()
    )


def test_drawn_drafts_are_verified_on_a_device() -> None:
    """A draft that the target is sure of is accepted, one that it excludes is replaced."""
    logits = torch.full((2, 50), -30.0)
    logits[:, 3] = 30.0
    even = torch.full((50,), 0.02)
    rows = [
        SampleRow(row.request, (), Drawn(draft, even))
        for row, draft in zip(make_rows([1, 2], top_k=20), (3, 4), strict=True)
    ]
    assert sampler.DeviceSampler(0).sample(logits, rows)[0] == [3, 3]
