"""A small GGUF file of the llama architecture, as llama.cpp's converter would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models.gguf_checkpoint import _LAYER_NAMES

TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *"abcdehlorw0123",
    "Ġ",
    "Ċ",
    "he",
    "ll",
    "hell",
    "hello",
]
MERGES = ["h e", "l l", "he ll", "hell o"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


def write_gguf(path: Path, weights: dict[str, torch.Tensor], **overrides: Any) -> Path:
    """``weights`` by HF name, fp32, of a model with 2 heads of 32 (1 KV head); written with q/k permuted."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, overrides.get("architecture", "llama"))
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1000.0)
    writer.add_tokenizer_model(overrides.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = permute(weight, weight.shape[0] // 32)
        writer.add_tensor(gguf_name(name), weight.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k: [heads, 2, d/2] rows become [heads, d/2, 2]."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    layers = {hf: own for own, hf in _LAYER_NAMES.items()}
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{layers[rest.removesuffix('.weight')]}.weight"
