"""Small random Llama checkpoints, and steps of a runner without a scheduler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.step import ScheduledRequest, StepPlan, StepResult

VOCAB = 97


def save_tiny_llama(directory: Path, *, shard_size: str = "1GB", seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of 3 layers with weights large enough that logits differ clearly."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # ones and zeros would hide a mistake
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


def write_config(directory: Path, **settings: Any) -> Path:
    """A config.json alone, for dummy weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
        **settings,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_request(name: str, prompt: Sequence[int], block_ids: Sequence[int], **sampling: Any) -> Request:
    request = Request(name, list(prompt), SamplingParams(**{"temperature": 0.0, **sampling}))
    request.block_ids = list(block_ids)
    return request


def run_step(runner: ModelRunner, *items: tuple[Request, int, int], drafts: Sequence[int] = ()) -> StepResult:
    """One step: (request, first token, number of tokens); ``drafts`` belong to the last item."""
    scheduled = []
    for place, (request, start, count) in enumerate(items):
        own = tuple(drafts) if place == len(items) - 1 else ()
        emits = start + count - len(own) >= request.num_tokens
        scheduled.append(ScheduledRequest(request, start, count, own, emits))
    return runner.execute(StepPlan(0, tuple(scheduled), token_budget=1 << 20))
