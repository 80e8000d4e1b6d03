"""How the supported architectures depart from Llama where their config.json does not say so.

Facts of each row: transformers' modeling and configuration files of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """One architecture. What is not set here is as in Llama, or read from the config."""

    windows: Literal["none", "all", "late", "alternating"] = "none"
    """Layers with a sliding window: none; all; from max_window_layers on, if use_sliding_window is set; all
    but every sliding_window_pattern-th. The last two obey the config's ``layer_types``, if it has them."""
    qkv_bias: bool = False
    """Biases on q, k and v (and not on o), regardless of the config."""
    qk_norm: bool = False
    """Each head of q and k is normalised before it is rotated."""
    norm_offset: float = 0.0
    """What is added to the weights of norms: Gemma's are stored as offsets from one."""
    output_norms: bool = False
    """Attention and MLP have a norm behind them too, before their residual is added."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    local_rope: bool = False
    """Layers with a window have a rotary embedding of their own: rope_local_base_freq, never scaled."""
    scaled_positions: bool = False
    """max_position_embeddings already counts the factor of a linear rope scaling."""
    text_config: bool = False
    """The language model of a multimodal checkpoint: its config is nested, its tensors have a prefix."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of the config's keys; published files leave out what transformers' classes have as default."""


_GEMMA: Mapping[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA2 = Family(
    windows="alternating",
    norm_offset=1.0,
    output_norms=True,
    scaled_embedding=True,
    defaults={
        **_GEMMA,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_GEMMA3: Mapping[str, Any] = {
    **_GEMMA,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_QWEN = {"sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32_768}


def _gemma3(text_config: bool) -> Family:
    return Family(
        windows="alternating",
        qk_norm=True,
        norm_offset=1.0,
        output_norms=True,
        scaled_embedding=True,
        local_rope=True,
        scaled_positions=True,
        text_config=text_config,
        defaults=_GEMMA3,
    )


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(
        windows="all",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    ),
    "Qwen2ForCausalLM": Family(windows="late", qkv_bias=True, defaults=_QWEN),
    "Qwen3ForCausalLM": Family(windows="late", qk_norm=True, defaults={**_QWEN, "head_dim": 128}),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _gemma3(text_config=False),
    "Gemma3ForConditionalGeneration": _gemma3(text_config=True),
}
"""By the name in config.json's ``architectures``."""
