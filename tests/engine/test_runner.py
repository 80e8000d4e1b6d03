"""The model runner against transformers, on small random checkpoints: logits, paging, batching, memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_model import Reference
from tiny_llama import VOCAB, make_request, run_step, save_tiny_llama, write_config

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.native import NativeKernels, NativeUnavailable, load_library
from engine.models.model_error import ModelError
from engine.runner import ModelRunner
from engine.speculative_config import SpeculativeConfig
from engine.step import PLACEHOLDER_TOKEN_ID, StepResult

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 3},
    "group of 4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "wide heads": {"num_attention_heads": 2, "head_dim": 64},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sharded": {"shard_size": "60KB"},
    "odd sizes": {"hidden_size": 90, "intermediate_size": 100, "rms_norm_eps": 1e-3},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_runner(model: Path, num_blocks: int = 40, **flags: Any) -> ModelRunner:
    runner = ModelRunner(EngineConfig(model=str(model), **{"dtype": "float32", **flags}))
    runner.allocate(num_blocks)
    return runner


def distribution(result: StepResult, name: str, place: int = 0) -> torch.Tensor:
    """Log-probabilities over the vocabulary, for a request that asked for all of them."""
    row = torch.empty(VOCAB)
    for token, logprob in result.logprobs[name][place].top:
        row[token] = logprob
    return row


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_distributions_equal_transformers(
    tmp_path: Path, kernels: str, variant: str, block_size: int
) -> None:
    save_tiny_llama(tmp_path, **VARIANTS[variant])
    runner, reference = make_runner(tmp_path, block_size=block_size), Reference(tmp_path)
    long = make_request("long", tokens(1, 150), [7, 3, 12, 1, 9, 2, 5, 4, 11, 10], logprobs=VOCAB)
    short = make_request("short", tokens(2, 5), [20, 21], logprobs=VOCAB)
    decode = make_request("decode", tokens(3, 34), [30, 29, 28], logprobs=VOCAB)
    run_step(runner, (decode, 0, 33))
    run_step(runner, (long, 0, 70))
    result = run_step(runner, (decode, 33, 1), (long, 70, 80), (short, 0, 5))
    for request in (decode, long, short):
        expected = reference.logits(request.token_ids)[-1].log_softmax(-1)
        torch.testing.assert_close(distribution(result, request.request_id), expected, atol=1e-4, rtol=1e-4)


def test_native_kernels_are_used_where_they_can_be(tiny: Path) -> None:
    try:
        load_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    assert isinstance(make_runner(tiny)._kernels, NativeKernels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_results_do_not_depend_on_batching(tiny: Path, dtype: str) -> None:
    """The same bits alone, batched and chunked: sums run in one fixed order."""
    runner = make_runner(tiny, dtype=dtype)
    if not isinstance(runner._kernels, NativeKernels):
        pytest.skip("no C++ kernels here")
    alone = make_request("alone", tokens(1, 90), range(1, 7), logprobs=VOCAB)
    chunked = make_request("chunked", tokens(1, 90), range(10, 16), logprobs=VOCAB)
    others = [make_request(f"other{i}", tokens(i, 20 + i), [20 + 2 * i, 21 + 2 * i]) for i in range(5)]
    one = run_step(runner, (alone, 0, 90))
    run_step(runner, (chunked, 0, 37), *((other, 0, 20) for other in others))
    run_step(runner, *((other, 20, i) for i, other in enumerate(others) if i), (chunked, 37, 52))
    two = run_step(runner, (chunked, 89, 1))
    assert torch.equal(distribution(one, "alone"), distribution(two, "chunked"))


def test_bfloat16_is_close_to_fp32(tiny: Path, kernels: str) -> None:
    prompt = tokens(4, 60)
    rows = []
    for dtype in ("float32", "bfloat16"):
        request = make_request("a", prompt, [1, 2, 3, 4], logprobs=VOCAB)
        rows.append(distribution(run_step(make_runner(tiny, dtype=dtype), (request, 0, 60)), "a"))
    assert (rows[0] - rows[1]).abs().max() < 0.15
    assert (rows[0] - rows[1]).abs().max() > 0


def test_drafts_are_verified_against_greedy(tiny: Path, kernels: str) -> None:
    runner = make_runner(tiny)
    plain = make_request("plain", tokens(5, 20), [1, 2, 3])
    for start in (0, 20, 21, 22, 23):
        result = run_step(runner, (plain, start, plain.num_tokens - start))
        plain.token_ids += result.tokens["plain"]
    truth = plain.output_token_ids
    wrong = (truth[2] + 1) % VOCAB
    for drafts, expected in (
        ((truth[1], truth[2], truth[3]), truth[1:5]),
        ((truth[1], wrong, truth[3]), truth[1:3]),
        ((wrong, truth[1], truth[2]) if wrong != truth[1] else (0, 0, 0), truth[1:2]),
        ((PLACEHOLDER_TOKEN_ID,) * 3, truth[1:2]),
    ):
        request = make_request("spec", tokens(5, 20), [4, 5, 6])
        request.token_ids.append(truth[0])
        run_step(runner, (request, 0, 20))
        result = run_step(runner, (request, 20, 4), drafts=drafts)
        assert result.tokens["spec"] == expected


def test_logprobs_come_with_every_accepted_draft(tiny: Path, kernels: str) -> None:
    runner = make_runner(tiny)
    request = make_request("a", tokens(6, 10), [1, 2], logprobs=VOCAB)
    first = run_step(runner, (request, 0, 10)).tokens["a"][0]
    request.token_ids.append(first)
    second = run_step(runner, (request, 10, 1)).tokens["a"][0]
    result = run_step(runner, (request, 10, 2), drafts=[second])
    assert [entry.token_id for entry in result.logprobs["a"]] == result.tokens["a"]
    assert len(result.tokens["a"]) == 2
    assert all(entry.rank == 1 for entry in result.logprobs["a"])


def test_mid_prefill_emits_nothing(tiny: Path, kernels: str) -> None:
    request = make_request("a", tokens(1, 40), [1, 2, 3])
    assert run_step(make_runner(tiny), (request, 0, 16)).tokens == {}


def test_an_empty_plan_computes_nothing(tiny: Path) -> None:
    assert run_step(make_runner(tiny)) == StepResult({})


def test_proposes_drafts_only_with_speculation(tiny: Path) -> None:
    speculative = SpeculativeConfig(num_speculative_tokens=2, prompt_lookup_min=1)
    request = make_request("a", [5, 6, 7, 8] * 8, [1, 2])
    result = run_step(make_runner(tiny, speculative_config=speculative), (request, 0, 32))
    history = [*request.token_ids, *result.tokens["a"]]
    assert set(result.drafts) == {"a"}
    assert len(result.drafts["a"]) <= 2
    assert run_step(make_runner(tiny), (request, 0, 32)).drafts == {}
    assert len(history) == 33


def measured_peak(runner: ModelRunner, plan: list[Any]) -> int:
    """Bytes that torch allocates at most at a time during a step."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run_step(runner, *plan)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def test_the_activation_account_covers_a_full_step(tiny: Path, kernels: str) -> None:
    """Buffers are allocated at the start; what a step allocates beyond them is within the account."""
    flags = {"max_num_batched_tokens": 400, "max_num_seqs": 8, "max_model_len": 512}
    runner = make_runner(tiny, num_blocks=120, **flags)
    plan = [
        (make_request(f"r{i}", tokens(i, 50), range(1 + 4 * i, 5 + 4 * i), temperature=1.0, top_p=0.9), 0, 50)
        for i in range(8)
    ]
    beyond = runner.profile_activation() - runner._workspace.nbytes
    assert 0 < measured_peak(runner, plan) <= beyond


def test_a_larger_token_budget_costs_memory(tiny: Path) -> None:
    small, large = (make_runner(tiny, max_num_batched_tokens=size) for size in (256, 4096))
    hidden, inner, qkv = 96, 160, (3 + 2) * 32
    per_token = 4 * (2 * hidden + qkv + 3 * 32 + 3 * inner)
    grown = large._workspace.nbytes - small._workspace.nbytes
    assert grown == (4096 - 256) * per_token
    assert large.profile_activation() - small.profile_activation() >= grown


def test_kv_bytes_and_weights_are_counted(tiny: Path, kernels: str) -> None:
    runner = make_runner(tiny)
    assert runner.kv_bytes_per_token == 3 * 2 * 1 * 32 * 4
    parameters = sum(p.numel() for p in Reference(tiny).model.parameters())
    assert runner.weights_bytes >= 4 * parameters
    assert runner.weights_bytes < 4 * parameters * 1.5  # panels are padded to 48 columns


def test_auto_dtype_is_the_checkpoint_s(tmp_path: Path) -> None:
    for name, expected in (
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.bfloat16),
    ):
        write_config(tmp_path, torch_dtype=name)
        config = EngineConfig(model=str(tmp_path), load_format="dummy")
        assert ModelRunner(config).dtype == expected


def test_dummy_weights_are_the_same_for_a_seed(tmp_path: Path) -> None:
    write_config(tmp_path)
    results = []
    for seed in (0, 0, 1):
        runner = make_runner(tmp_path, load_format="dummy", seed=seed)
        request = make_request("a", tokens(1, 20), [1, 2], logprobs=VOCAB)
        results.append(distribution(run_step(runner, (request, 0, 20)), "a"))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_context_longer_than_the_model_s_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 1024: exceeds the 512 positions"):
        make_runner(tiny, max_model_len=1024)


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"device_memory": 1 << 50}, "--device-memory 1125899906842624: "),
        ({"num_gpu_blocks_override": 1 << 30}, "--num-gpu-blocks-override 1073741824: "),
    ],
)
def test_more_kv_than_the_machine_has_memory_is_refused(tiny: Path, flags: dict, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag + r"weights and KV cache take [\d,.]+ GiB, this machine has"):
        make_runner(tiny, **flags).allocate(1 << 30)


def test_max_model_len_of_the_model(tiny: Path) -> None:
    assert make_runner(tiny).max_model_len == 512


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"lacks 1 tensors, first model.layers.1.mlp.up_proj.weight"):
        make_runner(tmp_path)


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(95)
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(95,\), expected \(96,\)"):
        make_runner(tmp_path)


def test_the_runner_changes_nothing_of_a_request(tiny: Path) -> None:
    request = make_request("a", tokens(1, 20), [1, 2])
    before = copy.deepcopy(request)
    run_step(make_runner(tiny), (request, 0, 20))
    assert [getattr(request, name) for name in request.__slots__] == [
        getattr(before, name) for name in request.__slots__
    ]
