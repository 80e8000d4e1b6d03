"""One decoder, driven by a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.base import AttentionShape, Batch, Kernels, Linear
from engine.model_config import ModelConfig, RopeConfig


class TensorError(ValueError):
    """A checkpoint's tensors are not those of its config."""


WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def rope_tables(rope: RopeConfig, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32, each [length, head_dim / 2]."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling is not None:
        frequencies = _scale_llama3(frequencies, rope.scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _scale_llama3(frequencies: torch.Tensor, scaling: Mapping[str, float]) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths divided by ``factor``, short ones kept, a ramp in between."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - ramp) * frequencies / factor + ramp * frequencies


class Workspace:
    """Every activation of a step, allocated once for the largest step. T tokens, R rows that need logits."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, max_tokens: int, max_rows: int, allocate: bool = True
    ) -> None:
        device = "cpu" if allocate else "meta"
        query = config.num_heads * config.head_dim
        qkv = query + 2 * config.num_kv_heads * config.head_dim

        def rows(count: int, width: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(count, width, dtype=kind, device=device)

        self.hidden = rows(max_tokens, config.hidden_size)
        self.normed = rows(max_tokens, config.hidden_size)
        self.qkv = rows(max_tokens, qkv)
        self.attended = rows(max_tokens, query)
        self.gate_up = rows(max_tokens, 2 * config.intermediate_size)
        self.activated = rows(max_tokens, config.intermediate_size)
        self.last = rows(max_rows, config.hidden_size)
        self.logits = rows(max_rows, config.vocab_size, torch.float32)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in vars(self).values())


@dataclass(frozen=True)
class DecoderLayer:
    input_norm: torch.Tensor | None
    """None: attention sees the residual stream as it is (the first layer of an EAGLE head)."""
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        linears = (self.qkv, self.o, self.gate_up, self.down)
        norm = 0 if self.input_norm is None else self.input_norm.nbytes
        return norm + self.post_norm.nbytes + sum(linear.nbytes for linear in linears)


class Decoder:
    """Embedding, layers, final norm and head. Holds weights only: caches and workspace are handed in."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: Linear,
    ) -> None:
        self.config, self.kernels = config, kernels
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head

    @property
    def weights_bytes(self) -> int:
        layers = sum(layer.nbytes for layer in self.layers)
        return self.embedding.nbytes + layers + self.norm.nbytes + self.head.nbytes

    def forward(
        self, token_ids: torch.Tensor, batch: Batch, caches: list[Any], workspace: Workspace
    ) -> torch.Tensor:
        """The residual stream after the last layer, [T, hidden]: a view of the workspace."""
        torch.index_select(self.embedding, 0, token_ids, out=workspace.hidden[: len(token_ids)])
        return self.layers_forward(batch, caches, workspace)

    def layers_forward(self, batch: Batch, caches: list[Any], workspace: Workspace) -> torch.Tensor:
        """``forward`` from what the workspace's residual stream holds already, whatever it was made of."""
        tokens, kernels, eps = batch.num_tokens, self.kernels, self.config.rms_norm_eps
        hidden, normed = workspace.hidden[:tokens], workspace.normed[:tokens]
        qkv, attended = workspace.qkv[:tokens], workspace.attended[:tokens]
        gate_up, activated = workspace.gate_up[:tokens], workspace.activated[:tokens]
        step = kernels.begin(batch)
        for layer, cache in zip(self.layers, caches, strict=True):
            if layer.input_norm is None:
                kernels.linear(hidden, layer.qkv, qkv)
            else:
                kernels.rms_norm(hidden, layer.input_norm, eps, normed)
                kernels.linear(normed, layer.qkv, qkv)
            kernels.rope_and_store(qkv, cache, step)
            kernels.attention(qkv, cache, step, attended)
            kernels.linear_add(attended, layer.o, hidden)
            kernels.rms_norm(hidden, layer.post_norm, eps, normed)
            kernels.linear(normed, layer.gate_up, gate_up)
            kernels.silu_mul(gate_up, activated)
            kernels.linear_add(activated, layer.down, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """fp32 logits [R, vocab] of some rows of ``hidden``: a view of the workspace."""
        last, logits = workspace.last[: len(rows)], workspace.logits[: len(rows)]
        torch.index_select(hidden, 0, rows, out=last)
        normed = workspace.normed[: len(rows)]
        self.kernels.rms_norm(last, self.norm, self.config.rms_norm_eps, normed)
        self.kernels.linear(normed, self.head, logits)
        return logits


def attention_shape(config: ModelConfig, block_size: int) -> AttentionShape:
    return AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, block_size, config.head_dim**-0.5
    )


def load_decoder(
    config: ModelConfig, kernels: Kernels, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Decoder:
    """Fuse and pack a checkpoint's tensors, layer by layer as they come. Raises TensorError."""
    shapes = config.tensor_shapes()
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name not in shapes:
            continue  # such as a tied lm_head, or rotary frequencies of old checkpoints
        if tuple(tensor.shape) != shapes[name]:
            raise TensorError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        if tensor.dtype not in WEIGHT_TYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise TensorError(f"tensor {name} is {kind}: quantised safetensors are not supported")
        pending[name] = tensor.to(kernels.dtype)
    missing = sorted(set(shapes) - set(pending))
    if missing:
        raise TensorError(f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}")
    prefixes = [f"model.layers.{index}." for index in range(config.num_layers)]
    layers = [load_layer(config, kernels, pending, prefix) for prefix in prefixes]
    # Clones, since a tensor that is a view of the mapped file would keep all of it in memory.
    embedding = pending.pop("model.embed_tokens.weight").clone()
    head = embedding if config.tie_word_embeddings else pending.pop("lm_head.weight")
    norm = pending.pop("model.norm.weight").clone()
    return Decoder(config, kernels, embedding, layers, norm, kernels.pack(head))


def load_layer(
    config: ModelConfig, kernels: Kernels, pending: dict[str, torch.Tensor], prefix: str
) -> DecoderLayer:
    def fuse(*names: str) -> Linear:
        weight = torch.cat([pending.pop(f"{prefix}{name}.weight") for name in names])
        biases = [pending.pop(f"{prefix}{name}.bias", None) for name in names]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        return kernels.pack(weight, bias)

    first = pending.pop(prefix + "input_layernorm.weight", None)
    return DecoderLayer(
        input_norm=None if first is None else first.clone(),
        qkv=fuse("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=fuse("self_attn.o_proj"),
        post_norm=pending.pop(prefix + "post_attention_layernorm.weight").clone(),
        gate_up=fuse("mlp.gate_proj", "mlp.up_proj"),
        down=fuse("mlp.down_proj"),
    )
