"""Every architecture against transformers on small random checkpoints: logits, windows, paging, batching."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_model import Reference
from tiny_llama import make_request, run_step
from tiny_models import CASES, VOCAB, save_tiny

from engine.config import EngineConfig
from engine.kernels.cpu import TorchKernels
from engine.kernels.native import NativeKernels
from engine.kernels.split import SplitKernels
from engine.models.checkpoint import load_model_config
from engine.request import Request
from engine.runner import ModelRunner
from engine.step import StepResult

LENGTH = 150
"""Of the long sequence: several windows, many blocks."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: save_tiny(folder / name.replace(" ", "-"), **case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """transformers' log-probabilities after every token of the two sequences."""
    found = {}
    for name, directory in checkpoints.items():
        reference = Reference(directory)
        reference.model.set_attn_implementation("eager")  # the one that has soft caps
        found[name] = {
            sequence: reference.logits(token_ids).log_softmax(-1)
            for sequence, token_ids in (("long", tokens(1, LENGTH)), ("decode", tokens(2, 70)))
        }
    return found


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_runner(model: Path, **flags: Any) -> ModelRunner:
    runner = ModelRunner(EngineConfig(model=str(model), **{"dtype": "float32", **flags}))
    runner.allocate(40)
    return runner


def distribution(result: StepResult, name: str) -> torch.Tensor:
    row = torch.empty(VOCAB)
    for token, logprob in result.logprobs[name][0].top:
        row[token] = logprob
    return row


def prefix(request: Request, count: int) -> Request:
    """The request as it is when it has ``count`` tokens: so a step that ends there shows its logits."""
    return make_request(request.request_id, request.token_ids[:count], request.block_ids, logprobs=VOCAB)


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(
    name: str,
    native: str,
    checkpoints: dict[str, Path],
    expected: dict[str, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefill at once, one in chunks with a decode beside it, and decodes, all within one cache."""
    monkeypatch.setenv("VTUNE_NATIVE", native)
    runner = make_runner(checkpoints[name])

    def check(result: StepResult, sequence: str, count: int) -> None:
        found, wanted = distribution(result, sequence), expected[name][sequence][count - 1]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)

    long = make_request("long", tokens(1, LENGTH), [7, 3, 12, 1, 9, 2, 5, 4, 11, 10])
    decode = make_request("decode", tokens(2, 70), [30, 29, 28, 27, 26])
    whole = prefix(long, LENGTH)
    check(run_step(runner, (whole, 0, LENGTH)), "long", LENGTH)
    check(run_step(runner, (prefix(decode, 64), 0, 64)), "decode", 64)
    for place, (start, end) in enumerate([(0, 50), (50, 77), (77, 78), (78, 149), (149, 150)]):
        one, other = prefix(long, end), prefix(decode, 65 + place)
        result = run_step(runner, (one, start, end - start), (other, 64 + place, 1))
        check(result, "long", end)
        check(result, "decode", 65 + place)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "qwen3"])
@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
def test_bfloat16_is_close(
    name: str,
    native: str,
    checkpoints: dict[str, Path],
    expected: dict[str, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VTUNE_NATIVE", native)
    runner = make_runner(checkpoints[name], dtype="bfloat16", block_size=32)
    request = make_request("long", tokens(1, LENGTH), [7, 3, 12, 1, 9], logprobs=VOCAB)
    run_step(runner, (request, 0, 100))
    found = distribution(run_step(runner, (request, 100, 50)), "long")
    error = (found - expected[name]["long"][-1]).abs()
    assert 0 < error.max() < 0.4
    assert error.mean() < 0.1


@pytest.mark.parametrize(
    ("name", "flags", "kernels"),
    [
        ("qwen3", {}, NativeKernels),
        ("mistral", {}, SplitKernels),
        ("mistral", {"max_model_len": 20}, NativeKernels),
        ("gemma3", {}, SplitKernels),
        ("gemma2", {}, SplitKernels),
        ("qwen2 with late windows", {}, SplitKernels),
        ("qwen2 with late windows", {"max_model_len": 17}, NativeKernels),
        ("one KV head of 80", {}, SplitKernels),
    ],
)
def test_which_kernels_a_model_gets(
    name: str, flags: dict[str, int], kernels: type, checkpoints: dict[str, Path]
) -> None:
    """C++ for everything, or for all but the attention; a window that no context reaches is none."""
    found = make_runner(checkpoints[name], **flags)._kernels
    if isinstance(found, TorchKernels):
        pytest.skip("no C++ kernels here")
    assert type(found) is kernels


def test_a_window_that_is_never_reached_changes_nothing(checkpoints: dict[str, Path]) -> None:
    model = load_model_config(checkpoints["gemma3"])
    assert [kind.window for kind in model.kinds] == [20, None]
    assert [model.kind_of(layer) for layer in range(7)] == [0, 0, 0, 0, 0, 1, 0]
    assert [model.within(20).kind_of(layer) for layer in range(7)] == [0, 0, 0, 0, 0, 1, 0]
    assert [kind.window for kind in model.within(20).kinds] == [None, None]
    late = load_model_config(checkpoints["qwen2 with late windows"])
    assert [late.kind_of(layer) for layer in range(4)] == [0, 0, 1, 1]
    assert len(late.within(17).kinds) == 1
    assert len(late.within(18).kinds) == 2


def test_a_multimodal_checkpoint_serves_its_language_model(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """Gemma 3 of 4B and more: nested config, prefixed tensors, and a part that sees, which is left out."""
    from safetensors.torch import load_file, save_file

    source = checkpoints["gemma3"]
    text = json.loads((source / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 5]}
    del text["eos_token_id"], text["architectures"]
    tensors = load_file(source / "model.safetensors")
    request = make_request("long", tokens(1, 60), [1, 2, 3, 4], logprobs=VOCAB)
    alone = distribution(run_step(make_runner(source), (request, 0, 60)), "long")
    for name, prefix_ in (("new", "model.language_model."), ("old", "language_model.model.")):
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps(outer))
        renamed = {key.replace("model.", prefix_, 1): tensor for key, tensor in tensors.items()}
        renamed["vision_tower.embeddings.weight"] = torch.ones(3)
        save_file(renamed, folder / "model.safetensors")
        found = distribution(run_step(make_runner(folder), (request, 0, 60)), "long")
        assert torch.equal(found, alone)
        assert load_model_config(folder).eos_token_ids == (1, 5)


PUBLISHED: dict[str, dict[str, Any]] = {  # as the hub has them: what is a default is left out
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "bfloat16",
    },
    "Gemma2ForCausalLM": {"model_type": "gemma2", "hidden_size": 64, "hidden_act": "gelu_pytorch_tanh"},
    "MistralForCausalLM": {
        "model_type": "mistral",
        "eos_token_id": 2,
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    },
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 1,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    },
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_a_published_config_means_what_transformers_makes_of_it(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (old := tmp_path / "old").mkdir()
    config = {"architectures": [architecture], **PUBLISHED[architecture]}
    (old / "config.json").write_text(json.dumps(config))
    AutoConfig.from_pretrained(old).save_pretrained(tmp_path / "new")
    ours, theirs = (load_model_config(tmp_path / name, "dummy") for name in ("old", "new"))
    layers = range(ours.num_layers)
    assert [ours.kinds[ours.kind_of(i)] for i in layers] == [theirs.kinds[theirs.kind_of(i)] for i in layers]
    assert replace(ours, kinds=(), pattern=()) == replace(theirs, kinds=(), pattern=())
