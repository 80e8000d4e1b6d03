"""What a model is, read from its Hugging Face config. Free of torch: the HTTP process reads it too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.models.model_error import ModelError
from engine.models.model_family import FAMILIES, Family
from engine.models.rope import RopeConfig, positive

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of layer types."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer: the window, in tokens and with the query itself, and the rope."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs of config.json, and of what is known of the architecture."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    """The factor of the products of queries and keys."""
    rms_norm_eps: float
    kinds: tuple[LayerKind, ...]
    pattern: tuple[int, ...]
    """Layer i is of kind ``pattern[i % len(pattern)]``."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str
    """ "silu" or "gelu" (its approximation with tanh)."""
    qk_norm: bool
    norm_offset: float
    output_norms: bool
    embedding_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own type, e.g. "bfloat16"."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Raises ModelError for what is not supported, missing, or impossible."""
        architecture = config.get("architectures")
        if isinstance(architecture, list) and architecture:
            architecture = architecture[0]
        family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
        if family is None:
            raise ModelError(f"architecture {architecture} is not supported ({', '.join(FAMILIES)} are)")
        try:
            return cls._read(str(architecture), family, _with_defaults(config, family), generation or {})
        except ModelError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelError(str(error)) from None

    @classmethod
    def _read(
        cls, architecture: str, family: Family, config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        _refuse_unsupported(config)
        vocab_size = _size(config, "vocab_size")
        heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        kv_heads = _size(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
        head_dim = _size(config, "head_dim", hidden // heads)
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd: a rotary embedding turns pairs")
        length = _size(config, "max_position_embeddings", 2048)
        num_layers = _size(config, "num_hidden_layers")
        kinds, pattern = _layer_kinds(family, config, num_layers, length)
        attention_bias = bool(config.get("attention_bias", False))
        scale_of = config.get("query_pre_attn_scalar")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            attention_scale=positive("query_pre_attn_scalar", head_dim if scale_of is None else scale_of)
            ** -0.5,
            rms_norm_eps=positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            kinds=kinds,
            pattern=pattern,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias and not family.qkv_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            activation=_activation(config),
            qk_norm=family.qk_norm,
            norm_offset=family.norm_offset,
            output_norms=family.output_norms,
            embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
            attention_softcap=_softcap(config, "attn_logit_softcapping"),
            logits_softcap=_softcap(config, "final_logit_softcapping"),
            max_position_embeddings=length if family.scaled_positions else _stretched(length, kinds),
            eos_token_ids=_eos_token_ids(config, generation),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )

    def within(self, max_model_len: int) -> ModelConfig:
        """The same model for contexts up to ``max_model_len``: without windows that none of them reaches."""
        merged: list[LayerKind] = []
        numbers = []
        for kind in self.kinds:
            binds = kind.window is not None and kind.window < max_model_len
            kind = kind if binds else replace(kind, window=None)
            if kind not in merged:
                merged.append(kind)
            numbers.append(merged.index(kind))
        pattern = tuple(numbers[kind] for kind in self.pattern) if len(merged) > 1 else (0,)
        return replace(self, kinds=tuple(merged), pattern=pattern)

    def kind_of(self, layer: int) -> int:
        return self.pattern[layer % len(self.pattern)]

    @property
    def num_parameters(self) -> int:
        """Numbers in all the tensors."""
        layer = sum(math.prod(shape) for shape in self._layer_shapes().values())
        return self.num_layers * layer + sum(math.prod(shape) for shape in self._outer_shapes().values())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, by HF name."""
        shapes = self._outer_shapes()
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        return shapes

    def _outer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors outside the layers."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer, by their names within it."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = {
            "self_attn.q_proj": (query, hidden, self.qkv_bias),
            "self_attn.k_proj": (kv, hidden, self.qkv_bias),
            "self_attn.v_proj": (kv, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, query, self.o_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.output_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
        if self.qk_norm:
            shapes |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes


def _with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The language model's config, with what the file leaves out."""
    merged = {**family.defaults, **config}
    if family.text_config:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ModelError("text_config is missing: what the language model is")
        merged |= text
    return merged


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ModelError for settings that this engine does not compute."""
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"a checkpoint quantised by {method} is not supported; "
            "give one in float32, float16 or bfloat16, or a .gguf file"
        )
    if config.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is not supported: this engine generates, causally")
    if (share := config.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor {share} is not supported (1.0 is)")


def _activation(config: Mapping[str, Any]) -> str:
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    name = config.get(key, "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(f"{key} {name!r} is not supported ({', '.join(ACTIVATIONS)} are)")
    return ACTIVATIONS[name]


def _layer_kinds(
    family: Family, config: Mapping[str, Any], num_layers: int, length: int
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The distinct kinds of layers, and which kind the layers are of, as in ``ModelConfig.pattern``."""
    types = _layer_types(family, config, num_layers)
    window = _size(config, "sliding_window") if SLIDING in types else None
    found = [
        LayerKind(window if type_ == SLIDING else None, _rope(family, config, type_, length))
        for type_ in dict.fromkeys(types)
    ]
    order = list(dict.fromkeys(types))
    return tuple(found), tuple(order.index(type_) for type_ in types)


def _layer_types(family: Family, config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """The types of the layers, from the first on; repeated where there are more layers."""
    windowed = config.get("sliding_window") is not None
    if family.windows in ("none", "all"):
        return (SLIDING,) if family.windows == "all" and windowed else (FULL,)
    if (given := config.get("layer_types")) is not None:
        return _given_layer_types(given, num_layers)
    if family.windows == "alternating":
        return (SLIDING,) * (_size(config, "sliding_window_pattern") - 1) + (FULL,)
    if not (config.get("use_sliding_window") and windowed):
        return (FULL,)
    first = min(_size(config, "max_window_layers", num_layers, least=0), num_layers)
    return (FULL,) * first + (SLIDING,) * (num_layers - first)


def _given_layer_types(given: Any, num_layers: int) -> tuple[str, ...]:
    if not isinstance(given, list) or len(given) != num_layers:
        raise ModelError(f"layer_types must be a list of num_hidden_layers ({num_layers}) names")
    for name in given:
        if name not in (FULL, SLIDING):
            raise ModelError(f"layer type {name!r:.40} is not supported ({FULL} and {SLIDING} are)")
    return tuple(given)


def _rope(family: Family, config: Mapping[str, Any], layer_type: str, length: int) -> RopeConfig:
    """Of layers of one type, in both spellings: transformers 5's ``rope_parameters`` (which may be nested by
    layer type), and ``rope_theta``, ``rope_scaling`` and Gemma's ``rope_local_base_freq``."""
    local = family.local_rope and layer_type == SLIDING
    given = _object(config, "rope_parameters")
    if FULL in given or SLIDING in given:
        given = _object(given, layer_type)
    older = {} if local else _object(config, "rope_scaling")
    theta = config.get("rope_local_base_freq" if local else "rope_theta", 10_000.0)
    return RopeConfig.from_parameters({**older, **given}, theta, length)


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under a name; an empty one where it is missing. Raises ModelError."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"{name} must be an object, got {value!r:.40}")
    return value or {}


def _stretched(length: int, kinds: tuple[LayerKind, ...]) -> int:
    """The longest context. Linear scaling multiplies it; other kinds are counted in the config's own."""
    factors = [kind.rope.numbers["factor"] for kind in kinds if kind.rope.kind == "linear"]
    return int(length * max(factors, default=1.0))


def _softcap(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    return None if value is None else positive(name, value)


def _size(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of at least ``least``. Raises ModelError."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"{name} must be a whole number of at least {least}, got {value!r:.40}")
    return value


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(f"eos_token_id must be a token id or a list of them, got {value!r:.40}")
    return tuple(ids)
