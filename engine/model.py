"""One decoder, driven by the Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernels.base import AttentionShape, Batch, Kernels, Linear
from engine.weights import ModelError

ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. ``scaling`` is None or the parameters of "llama3" (Llama 3.1's long context)."""

    theta: float
    scaling: Mapping[str, float] | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Both spellings: transformers 5's ``rope_parameters``, and ``rope_theta`` + ``rope_scaling``."""
        parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "default":
            return cls(theta)
        if kind != "llama3":
            raise ModelError(f"rope type {kind!r} is not supported (default and llama3 are)")
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [name for name in names if name not in parameters]
        if missing:
            raise ModelError(f"config.json: llama3 rope scaling lacks {', '.join(missing)}")
        return cls(theta, {name: float(parameters[name]) for name in names})

    def tables(self, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32, each [length, head_dim / 2]."""
        frequencies = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.scaling is not None:
            frequencies = _scale_llama3(frequencies, self.scaling)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        return angles.cos(), angles.sin()


def _scale_llama3(frequencies: torch.Tensor, scaling: Mapping[str, float]) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths divided by ``factor``, short ones kept, a ramp in between."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - ramp) * frequencies / factor + ramp * frequencies


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs of config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own, e.g. "bfloat16"."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Raises ModelError for an architecture, activation or rotary embedding that is not supported."""
        architecture = (config.get("architectures") or ["none"])[0]
        if architecture not in ARCHITECTURES:
            raise ModelError(f"architecture {architecture} is not supported ({', '.join(ARCHITECTURES)})")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported (silu is)")
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=RopeConfig.from_hf(config),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                eos_token_ids=_eos_token_ids(config, generation or {}),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            )
        except KeyError as error:
            raise ModelError(f"config.json lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise ModelError(f"config.json: {error}") from None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, by HF name."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = {
            "self_attn.q_proj": (query, hidden, self.attention_bias),
            "self_attn.k_proj": (kv, hidden, self.attention_bias),
            "self_attn.v_proj": (kv, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, query, self.attention_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            for name, (rows, columns, bias) in projections.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
        return shapes


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list | tuple) else (int(value),)


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
    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        linears = (self.qkv, self.o, self.gate_up, self.down)
        return self.input_norm.nbytes + self.post_norm.nbytes + sum(linear.nbytes for linear in linears)


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
        tokens, kernels, eps = len(token_ids), self.kernels, self.config.rms_norm_eps
        hidden, normed = workspace.hidden[:tokens], workspace.normed[:tokens]
        qkv, attended = workspace.qkv[:tokens], workspace.attended[:tokens]
        gate_up, activated = workspace.gate_up[:tokens], workspace.activated[:tokens]
        step = kernels.begin(batch)
        torch.index_select(self.embedding, 0, token_ids, out=hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
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
    """Fuse and pack a checkpoint's tensors, layer by layer as they come. Raises ModelError."""
    shapes = config.tensor_shapes()
    pending: dict[str, torch.Tensor] = {}
    layers: dict[int, DecoderLayer] = {}
    for name, tensor in tensors:
        if name not in shapes:
            continue  # such as a tied lm_head, or rotary frequencies of old checkpoints
        if tuple(tensor.shape) != shapes[name]:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        pending[name] = tensor.to(kernels.dtype)
    missing = sorted(set(shapes) - set(pending))
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}")
    for index in range(config.num_layers):
        layers[index] = _load_layer(config, kernels, pending, f"model.layers.{index}.")
    embedding = pending["model.embed_tokens.weight"]
    head = embedding if config.tie_word_embeddings else pending["lm_head.weight"]
    return Decoder(
        config,
        kernels,
        embedding,
        [layers[index] for index in range(config.num_layers)],
        pending["model.norm.weight"],
        kernels.pack(head),
    )


def _load_layer(
    config: ModelConfig, kernels: Kernels, pending: dict[str, torch.Tensor], prefix: str
) -> DecoderLayer:
    def fuse(*names: str) -> Linear:
        weight = torch.cat([pending.pop(f"{prefix}{name}.weight") for name in names])
        biases = [pending.pop(f"{prefix}{name}.bias", None) for name in names]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        return kernels.pack(weight, bias)

    return DecoderLayer(
        input_norm=pending.pop(prefix + "input_layernorm.weight"),
        qkv=fuse("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=fuse("self_attn.o_proj"),
        post_norm=pending.pop(prefix + "post_attention_layernorm.weight"),
        gate_up=fuse("mlp.gate_proj", "mlp.up_proj"),
        down=fuse("mlp.down_proj"),
    )
