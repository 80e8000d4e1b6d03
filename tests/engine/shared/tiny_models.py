"""Small random checkpoints of every architecture, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 97
CASES: dict[str, dict[str, Any]] = {
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 20},
    "mistral without a window": {"architecture": "MistralForCausalLM", "sliding_window": None},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2 with late windows": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 2,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "attention_bias": True, "tie_word_embeddings": True},
    "gemma2": {
        "architecture": "Gemma2ForCausalLM",
        "sliding_window": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "sliding_window": 20,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "gemma3 with layer types": {
        "architecture": "Gemma3ForCausalLM",
        "sliding_window": 33,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "attention_bias": True,
    },
    "linear rope": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    },
    "yarn rope": {
        "architecture": "Qwen2ForCausalLM",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
    },
    "one KV head of 80": {"architecture": "Qwen3ForCausalLM", "head_dim": 80, "num_attention_heads": 4},
    "heads of 96": {"architecture": "MistralForCausalLM", "head_dim": 96, "num_attention_heads": 2},
    "sharded bfloat16": {"architecture": "Qwen2ForCausalLM", "shard_size": "60KB", "dtype": "bfloat16"},
}
"""What the checkpoint has, where it differs from the settings in save_tiny."""
CONFIG_CLASSES = {"Gemma3ForCausalLM": "Gemma3TextConfig"}


def save_tiny(
    directory: Path, *, architecture: str, shard_size: str = "1GB", dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a checkpoint with weights large enough that a mistake in any of them shows in the logits."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    torch.manual_seed(0)
    config_class = CONFIG_CLASSES.get(architecture, architecture.replace("ForCausalLM", "Config"))
    model = getattr(transformers, architecture)(getattr(transformers, config_class)(**settings))
    at_rest = 0.0 if architecture.startswith("Gemma") else 1.0
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # ones and zeros would hide a mistake
            torch.nn.init.normal_(parameter, mean=at_rest if "norm" in name else 0.0, std=0.3)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shard_size)
    return directory
