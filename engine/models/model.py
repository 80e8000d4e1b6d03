"""One decoder, driven by a ModelConfig."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from engine.errors import EngineUserError
from engine.kernels.base import AttentionShape, Batch, Kernels, Linear
from engine.kv.kv_format import AUTO, KVFormat
from engine.models.model_config import ModelConfig
from engine.models.rope import RopeConfig


class TensorError(EngineUserError):
    """A checkpoint's tensors are not those of its config."""


PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""By the fields of a DecoderLayer: the checkpoint's matrices whose outputs stand side by side in it."""
WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_IGNORED = re.compile(
    r"^lm_head\.weight$|rotary_emb\.inv_freq$|^(?:model\.)?(?:vision_tower|multi_modal_projector)\."
)
"""What checkpoints hold beside the decoder: a head that is tied, tables, and the parts that see."""


def rope_tables(rope: RopeConfig, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32, each [length, head_dim / 2]."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    stretch = _STRETCHES.get(rope.kind)
    if stretch is not None:
        frequencies = stretch(frequencies, rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    size = rope.numbers.get("attention_factor", 1.0)
    return angles.cos() * size, angles.sin() * size


def layer_rope_tables(config: ModelConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every kind of layer, fp32, each [kinds, length, head_dim / 2]."""
    tables = [rope_tables(kind.rope, config.head_dim, length) for kind in config.kinds]
    cos, sin = zip(*tables, strict=True)
    return torch.stack(cos), torch.stack(sin)


def _stretch_linear(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    return frequencies / rope.numbers["factor"]


def _stretch_llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths divided by ``factor``, short ones kept, a ramp in between."""
    scaling = rope.numbers
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - ramp) * frequencies / factor + ramp * frequencies


def _stretch_yarn(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): what turns at most ``beta_slow`` times within the original
    context is divided by ``factor``, what turns at least ``beta_fast`` times is kept; a ramp in between."""
    scaling, dimensions = rope.numbers, 2 * len(frequencies)
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that turns so often within the original context."""
        return dimensions * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling["beta_fast"]), dimension(scaling["beta_slow"])
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return ramp * frequencies / factor + (1.0 - ramp) * frequencies


_STRETCHES: Mapping[str, Callable[[torch.Tensor, RopeConfig], torch.Tensor]] = {
    "linear": _stretch_linear,
    "llama3": _stretch_llama3,
    "yarn": _stretch_yarn,
}


class Workspace:
    """Every activation of a step, allocated once for the largest step. T tokens, R rows that need logits."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        max_tokens: int,
        max_rows: int,
        device: torch.device | None = None,
    ) -> None:
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
    """Before the MLP."""
    gate_up: Linear
    down: Linear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of the heads of q and k, before they are rotated."""
    output_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    """Behind the attention and behind the MLP, before their residuals are added."""

    @property
    def nbytes(self) -> int:
        linears = (self.qkv, self.o, self.gate_up, self.down)
        norms = (self.input_norm, self.post_norm, *(self.head_norms or ()), *(self.output_norms or ()))
        sizes = (norm.nbytes for norm in norms if norm is not None)
        return sum(sizes) + sum(linear.nbytes for linear in linears)


class Deltas(Protocol):
    """What adapters of a step's requests add to the outputs of a layer's projections (see adapters.py)."""

    def add(self, layer: int, projection: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to ``out`` [T, N] what the adapters make of ``x`` [T, K]; ``projection`` as in PROJECTIONS."""


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
        # In the computed type, as the model was trained: Gemma's sqrt(1152) is 34 in bfloat16.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=embedding.dtype).item()
        self._activate = kernels.silu_mul if config.activation == "silu" else kernels.gelu_mul
        self.fused = kernels.fuse(layers, config.rms_norm_eps) if config.activation == "silu" else None

    @property
    def weights_bytes(self) -> int:
        layers = sum(layer.nbytes for layer in self.layers)
        return self.embedding.nbytes + layers + self.norm.nbytes + self.head.nbytes

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: Batch,
        caches: list[Any],
        workspace: Workspace,
        deltas: Deltas | None = None,
    ) -> torch.Tensor:
        """The residual stream after the last layer, [T, hidden]: a view of the workspace."""
        hidden = workspace.hidden[: len(token_ids)]
        torch.index_select(self.embedding, 0, token_ids, out=hidden)
        if self._embedding_scale != 1.0:
            hidden *= self._embedding_scale
        return self.layers_forward(batch, caches, workspace, deltas)

    def layers_forward(
        self, batch: Batch, caches: list[Any], workspace: Workspace, deltas: Deltas | None = None
    ) -> torch.Tensor:
        """``forward`` without the embedding: from what the workspace's residual stream holds."""
        step = self.kernels.begin(batch)
        if self.fused is not None and deltas is None:
            self.fused(step, caches, workspace)
        else:
            layers = partial(self._compute, step, caches, workspace, deltas)
            self.kernels.run(step, batch.num_tokens, layers, recordable=deltas is None)
        return workspace.hidden[: batch.num_tokens]

    def _compute(
        self, step: Any, caches: list[Any], workspace: Workspace, deltas: Deltas | None, tokens: int
    ) -> None:
        """The layers, one operation after another."""
        kernels, eps = self.kernels, self.config.rms_norm_eps
        hidden, normed = workspace.hidden[:tokens], workspace.normed[:tokens]
        qkv, attended = workspace.qkv[:tokens], workspace.attended[:tokens]
        gate_up, activated = workspace.gate_up[:tokens], workspace.activated[:tokens]
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x = hidden
            if layer.input_norm is not None:
                kernels.rms_norm(hidden, layer.input_norm, eps, normed)
                x = normed
            kernels.linear(x, layer.qkv, qkv)
            if deltas is not None:
                deltas.add(index, "qkv", x, qkv)
            if layer.head_norms is not None:
                kernels.norm_heads(qkv, *layer.head_norms, eps)
            kernels.rope_and_store(qkv, cache, step)
            kernels.attention(qkv, cache, step, attended)
            attention_norm, mlp_norm = layer.output_norms or (None, None)
            add_o = None if deltas is None else partial(deltas.add, index, "o", attended)
            self._add(attended, layer.o, attention_norm, hidden, normed, add_o)
            kernels.rms_norm(hidden, layer.post_norm, eps, normed)
            kernels.linear(normed, layer.gate_up, gate_up)
            if deltas is not None:
                deltas.add(index, "gate_up", normed, gate_up)
            self._activate(gate_up, activated)
            add_down = None if deltas is None else partial(deltas.add, index, "down", activated)
            self._add(activated, layer.down, mlp_norm, hidden, normed, add_down)

    def _add(
        self,
        x: torch.Tensor,
        linear: Linear,
        norm: torch.Tensor | None,
        hidden: torch.Tensor,
        scratch: torch.Tensor,
        add_delta: Callable[[torch.Tensor], None] | None,
    ) -> None:
        """A projection back into the residual stream, through a norm where the model has one there."""
        if norm is None:
            self.kernels.linear_add(x, linear, hidden)
            if add_delta is not None:
                add_delta(hidden)
            return
        self.kernels.linear(x, linear, scratch)
        if add_delta is not None:
            add_delta(scratch)
        self.kernels.rms_norm(scratch, norm, self.config.rms_norm_eps, scratch)
        hidden += scratch

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """fp32 logits [R, vocab] of some rows of ``hidden``: a view of the workspace."""
        last, logits = workspace.last[: len(rows)], workspace.logits[: len(rows)]
        torch.index_select(hidden, 0, rows, out=last)
        normed = workspace.normed[: len(rows)]
        self.kernels.rms_norm(last, self.norm, self.config.rms_norm_eps, normed)
        self.kernels.linear(normed, self.head, logits)
        if (cap := self.config.logits_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def attention_shape(config: ModelConfig, block_size: int, kv_format: KVFormat = AUTO) -> AttentionShape:
    return AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        block_size,
        config.attention_scale,
        tuple(kind.window for kind in config.kinds),
        config.attention_softcap,
        kv_format,
    )


def load_decoder(
    config: ModelConfig, kernels: Kernels, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Decoder:
    """Fuse and pack a checkpoint's tensors, layer by layer as they come. Raises TensorError."""
    shapes = config.tensor_shapes()
    pending: dict[str, torch.Tensor] = {}
    extra: list[str] = []
    for full_name, tensor in tensors:
        name = text_name(full_name)
        if name not in shapes:
            extra += [] if _IGNORED.search(name) else [full_name]
            continue
        if tuple(tensor.shape) != shapes[name]:
            raise TensorError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        if tensor.dtype not in WEIGHT_TYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise TensorError(f"tensor {name} is {kind}: quantised safetensors are not supported")
        pending[name] = tensor.to(kernels.device, kernels.dtype)
    missing = sorted(set(shapes) - set(pending))
    if missing:
        raise TensorError(f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}")
    if extra:
        raise TensorError(
            f"the checkpoint has {len(extra)} tensors that its config does not speak of, first {min(extra)}"
        )
    layers = [
        load_layer(config, kernels, pending, f"model.layers.{index}.") for index in range(config.num_layers)
    ]
    # A clone, since a tensor that is a view of the mapped file would keep all of it in memory.
    embedding = pending.pop("model.embed_tokens.weight").clone()
    head = embedding if config.tie_word_embeddings else pending.pop("lm_head.weight")
    norm = kernels.pack_norm(pending.pop("model.norm.weight"), config.norm_offset)
    return Decoder(config, kernels, embedding, layers, norm, kernels.pack(head))


def text_name(name: str) -> str:
    """A tensor's name without what a multimodal checkpoint, of transformers 5 or older, puts before it."""
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")


def load_layer(
    config: ModelConfig, kernels: Kernels, pending: dict[str, torch.Tensor], prefix: str
) -> DecoderLayer:
    def fuse(*names: str) -> Linear:
        weight = torch.cat([pending.pop(f"{prefix}{name}.weight") for name in names])
        biases = [pending.pop(f"{prefix}{name}.bias", None) for name in names]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        return kernels.pack(weight, bias)

    def norm(name: str) -> torch.Tensor:
        return kernels.pack_norm(pending.pop(f"{prefix}{name}.weight"), config.norm_offset)

    head_norms = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None
    output_norms = None
    if config.output_norms:  # then HF's post_attention_layernorm is behind the attention, not before the MLP
        output_norms = norm("post_attention_layernorm"), norm("post_feedforward_layernorm")
        post_norm = norm("pre_feedforward_layernorm")
    else:
        post_norm = norm("post_attention_layernorm")
    return DecoderLayer(
        input_norm=norm("input_layernorm") if f"{prefix}input_layernorm.weight" in pending else None,
        post_norm=post_norm,
        head_norms=head_norms,
        output_norms=output_norms,
        **{field: fuse(*names) for field, names in PROJECTIONS.items()},
    )
