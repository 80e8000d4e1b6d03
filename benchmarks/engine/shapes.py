"""Models known by their shapes alone, as a Hugging Face config says them: for what only estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"]}
_8B = {
    **_LLAMA,
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "7B": {**_8B, "vocab_size": 32_000, "intermediate_size": 11_008, "num_key_value_heads": 32},
    "8B": _8B,
    # These two have the same layers but for their experts: one matrix as wide as all of them together.
    "13B": {**_8B, "vocab_size": 32_000, "intermediate_size": 28_672},
    "8x7B": {**_8B, "vocab_size": 32_000, "intermediate_size": 114_688},
    "70B": {
        **_8B,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    # Falcon's two matrices of 4 x hidden, as three of a gated layer with as many parameters.
    "180B": {
        **_LLAMA,
        "vocab_size": 65_024,
        "hidden_size": 14_848,
        "intermediate_size": 39_552,
        "num_hidden_layers": 80,
        "num_attention_heads": 232,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}


def shape(model: str, context: int, **more: Any) -> dict[str, Any]:
    """The config of ``model`` (a name of SHAPES), with a context of so many tokens."""
    return {**SHAPES[model], "max_position_embeddings": context, **more}
