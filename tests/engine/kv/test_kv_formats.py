"""Keys and values in a byte a number: how exact, how large, and the same however a sequence was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tiny_llama import make_request, run_step
from tiny_models import CASES, VOCAB, save_tiny

from engine.config import EngineConfig, KVCacheDtype
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.kernels.cpu import TorchKernels
from engine.kernels.host import HostBlocks, block_tensors
from engine.kv.kv_cache import plan_memory
from engine.kv.kv_format import _FP8, AUTO, KV_FORMATS, _widen_fp8, kv_format
from engine.llm import LLM
from engine.models.bundled import fetch_bundled
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.step import StepResult

QUANTISED = [name for name, kind in KV_FORMATS.items() if kind.largest is not None]


def test_the_flag_s_choices_are_the_formats() -> None:
    assert set(get_args(KVCacheDtype)) == set(KV_FORMATS)


def config_of(name: Any, **flags: Any) -> EngineConfig:
    return EngineConfig(dtype="float32", kv_cache_dtype=name, **flags)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype nvfp4: must be one of auto, .*int8_per_token_head"
    ):
        config_of("nvfp4").validate()


def test_what_changes_nothing_is_no_format_of_its_own() -> None:
    assert kv_format("bfloat16", torch.bfloat16) is AUTO
    assert kv_format("bfloat16", torch.float32).storage == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", list(_FP8), ids=str)
def test_every_finite_fp8_number_is_widened_exactly(storage: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wide, factor = _widen_fp8(codes, *_FP8[storage], dtype)
    expected = codes.view(storage).to(dtype)
    assert torch.equal((wide * factor)[expected.isfinite()], expected[expected.isfinite()])


@pytest.mark.parametrize(
    ("name", "relative", "absolute"),
    [
        # Half a unit of the fraction, and half the smallest subnormal number.
        ("fp8_e4m3", 2**-4, 2**-10),
        ("fp8_e5m2", 2**-3, 2**-17),
        ("fp8_per_token_head", 2**-4, 0.0001),
        ("int8_per_token_head", 0.0, 0.502 / 127),
    ],
)
def test_errors_are_within_half_a_step(name: str, relative: float, absolute: float) -> None:
    """``absolute`` counts in units of the largest number of a token's head, where there is a scale."""
    kind = KV_FORMATS[name]
    x = (
        torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-3, 2, 200)[:, None, None]
    )
    stored, scales = kind.quantize(x)
    assert (scales is not None) == kind.scaled
    back = kind.dequantize(stored.view(kind.held_as), scales, torch.float32)
    unit = x.abs().amax(-1, keepdim=True) if kind.scaled else torch.tensor(1.0)
    assert bool(((back - x).abs() <= relative * 1.001 * x.abs() + absolute * unit).all())
    assert (back - x).abs().max() > 0


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_and_outliers(name: str) -> None:
    kind = KV_FORMATS[name]
    x = torch.tensor([[0.0, 0.0], [1e6, -1e6], [448.0, -0.0], [1e-30, 0.0]])
    stored, scales = kind.quantize(x)
    back = kind.dequantize(stored.view(kind.held_as), scales, torch.float32)
    assert back.isfinite().all()
    assert torch.equal(back[0], torch.zeros(2))
    limit = 1e6 if kind.scaled else kind.largest
    torch.testing.assert_close(back[1], torch.tensor([limit, -limit]), rtol=1e-6, atol=0)
    torch.testing.assert_close(back[2], torch.tensor([448.0, 0.0]), rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), **CASES["mistral"])


@pytest.fixture(scope="module")
def bundled() -> Path:
    return fetch_bundled()


@pytest.mark.parametrize("name", KV_FORMATS)
def test_the_memory_plan_counts_what_is_stored(name: str, tiny: Path) -> None:
    config = config_of(name, model=str(tiny))
    runner = ModelRunner(config)
    number = {"auto": 4, "bfloat16": 2}.get(name, 1)
    scale = 4 if name.endswith("per_token_head") else 0
    assert runner.kv_bytes_per_token == 2 * 4 * (32 * number + scale)  # keys and values of 4 layers
    plan = plan_memory(
        config.resolved(512),
        weights_bytes=0,
        activation_bytes=0,
        kv_bytes_per_token=runner.kv_bytes_per_token,
    )
    runner.allocate(200)
    held = sum(tensor.nbytes for cache in runner._caches for tensor in block_tensors(cache))
    assert held == 200 * plan.block_size * runner.kv_bytes_per_token
    assert 0 <= plan.kv_bytes - plan.num_blocks * plan.block_size * runner.kv_bytes_per_token < held


def test_a_byte_a_number_makes_room_for_twice_the_tokens(bundled: Path) -> None:
    """In the whole engine, where weights and activations take their part too."""
    flags: dict[str, Any] = {"max_num_batched_tokens": 256, "max_model_len": 1024, "device_memory": 1 << 30}
    room = {
        name: LLM(str(bundled), kv_cache_dtype=name, **flags).core.memory_plan.num_tokens
        for name in ("auto", "fp8", "int8_per_token_head")
    }
    assert room["fp8"] / room["auto"] > 1.9
    assert room["int8_per_token_head"] / room["auto"] > 1.8


PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "def fibonacci(n):",
    "Water boils at a temperature of",
)


@pytest.fixture(scope="module")
def exact(bundled: Path) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Prompts and 24 greedy tokens each of the bundled model, and its distributions at their ends."""
    llm = LLM(str(bundled), dtype="float32", max_model_len=256)
    done = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    texts = [item.prompt_token_ids + item.token_ids for item in done]
    runner = llm.core.runner
    assert isinstance(runner, ModelRunner)
    return texts, [ends(runner, text) for text in texts]


def ends(runner: ModelRunner, text: list[int]) -> torch.Tensor:
    """Log-probabilities of the 50 likeliest tokens after ``text``, by token id, others far below."""
    request = make_request("a", text, range(1, 1 + -(-len(text) // 16)), logprobs=50)
    run_step(runner, (request, 0, len(text) - 4))
    return distribution(run_step(runner, (request, len(text) - 4, 4)), "a", 49_152)


def distribution(result: StepResult, name: str, vocab: int) -> torch.Tensor:
    row = torch.full((vocab,), -torch.inf)
    for token, logprob in result.logprobs[name][0].top:
        row[token] = logprob
    return row


@pytest.mark.parametrize(
    ("name", "bound", "agreeing"),
    [("int8_per_token_head", 0.15, 4), ("fp8", 0.6, 3)],
)
def test_the_bundled_model_says_nearly_the_same(
    name: str, bound: float, agreeing: int, bundled: Path, exact: tuple[list[list[int]], list[torch.Tensor]]
) -> None:
    """Mean error of the likely tokens' log-probabilities, and how often the likeliest is the same."""
    runner = ModelRunner(config_of(name, model=str(bundled), max_model_len=256))
    runner.allocate(17)
    errors, same = [], 0
    for text, expected in zip(*exact, strict=True):
        found = ends(runner, text)
        both = found.isfinite() & expected.isfinite()
        assert both.sum() > 25
        errors.append(float((found - expected)[both].abs().mean()))
        same += int(found.argmax() == expected.argmax())
    assert 0 < max(errors) < bound, errors
    assert same >= agreeing


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("case", ["mistral", "gemma3", "gemma2"])
def test_windows_and_caps_work_on_quantised_keys(case: str, name: str, tmp_path: Path) -> None:
    """Close to the unquantised model, and the same at once, in chunks, batched, and after a prefix hit."""
    model = save_tiny(tmp_path, **CASES[case])
    token_ids = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    found = {}
    for kv in ("auto", name):
        runner = ModelRunner(config_of(kv, model=str(model)))
        runner.allocate(40)
        once = make_request("once", token_ids, [1, 2, 3, 4, 5, 6], logprobs=VOCAB)
        chunked = make_request("chunked", token_ids, [9, 8, 7, 12, 11, 10], logprobs=VOCAB)
        hit = make_request("hit", token_ids, [1, 2, 3, 20, 21, 22], logprobs=VOCAB)
        other = make_request("other", token_ids[::-1], [30, 31, 32, 33, 34, 35])
        first = run_step(runner, (once, 0, 90))
        run_step(runner, (chunked, 0, 41), (other, 0, 60))
        run_step(runner, (other, 60, 1), (chunked, 41, 48))
        last = run_step(runner, (hit, 48, 42), (other, 61, 1), (chunked, 89, 1))
        found[kv] = distribution(first, "once", VOCAB)
        for result, request in ((last, "chunked"), (last, "hit")):
            # Sums differ in their last bits, by which a number at a border may fall to the other side.
            torch.testing.assert_close(distribution(result, request, VOCAB), found[kv], atol=0.05, rtol=0)
    # These models' weights are so large that errors grow from layer to layer.
    assert 1e-3 < (found["auto"] - found[name]).abs().mean() < 1.0


def test_a_preempted_request_goes_on_as_if_nothing_had_been(tiny: Path) -> None:
    """Recomputed keys are quantised as they were: what a token stores does not depend on its neighbours."""
    outputs, preempted = [], []
    for blocks in (33, 13):
        config = EngineConfig(
            model=str(tiny),
            dtype="float32",
            kv_cache_dtype="int8_per_token_head",
            num_gpu_blocks_override=blocks,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
        )
        core = EngineCore(config)
        sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        requests = [Request(str(i), list(range(3 + i, 33 + i)), sampling) for i in range(4)]
        for request in requests:
            core.add(request)
        while core.has_unfinished:
            core.step()
        outputs.append([request.output_token_ids for request in requests])
        preempted.append(sum(request.num_preemptions for request in requests))
    assert preempted[0] == 0 < preempted[1]
    same = sum(roomy == tight for roomy, tight in zip(*outputs, strict=True))
    assert same >= 3  # sums in another order may turn a near tie


@pytest.mark.parametrize("name", KV_FORMATS)
def test_blocks_can_be_moved_to_the_host_and_back(name: str, tiny: Path) -> None:
    runner = ModelRunner(config_of(name, model=str(tiny)))
    runner.allocate(12)
    token_ids = list(range(3, 53))
    request = make_request("a", token_ids, [1, 2, 3, 4], logprobs=VOCAB)
    run_step(runner, (request, 0, 49))
    expected = distribution(run_step(runner, (request, 49, 1)), "a", VOCAB)
    host = HostBlocks(runner._caches, 4)
    host.swap([(block, 4 - block) for block in (1, 2, 3, 4)], [])
    for cache in runner._caches:
        for tensor in block_tensors(cache):
            tensor.zero_()
    host.swap([], [(4 - block, block + 5) for block in (1, 2, 3, 4)])
    moved = make_request("a", token_ids, [6, 7, 8, 9], logprobs=VOCAB)
    assert torch.equal(distribution(run_step(runner, (moved, 49, 1)), "a", VOCAB), expected)


def test_the_documented_layout() -> None:
    from engine.kernels.base import AttentionShape

    shape = AttentionShape(4, 2, 80, 16, 1.0, kv_format=KV_FORMATS["int8_per_token_head"])
    tables = torch.ones(1, 8, 40)
    cache = TorchKernels(shape, torch.bfloat16, tables, tables).allocate_cache(10)
    sizes = sorted((tuple(tensor.shape), tensor.dtype) for tensor in block_tensors(cache))
    assert sizes == [((10, 2, 16), torch.float32)] * 2 + [((10, 2, 16, 80), torch.int8)] * 2
    assert sum(tensor.nbytes for tensor in block_tensors(cache)) == 160 * shape.kv_bytes(torch.bfloat16)
