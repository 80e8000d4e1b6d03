"""What a model is, read from its Hugging Face config. Free of torch: the HTTP process reads it too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_error import ModelError
from engine.weights import open_checkpoint, read_json

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
        theta = _positive("rope_theta", parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "default":
            return cls(theta)
        if kind != "llama3":
            raise ModelError(f"rope type {kind!r} is not supported (default and llama3 are)")
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [name for name in names if name not in parameters]
        if missing:
            raise ModelError(f"llama3 rope scaling lacks {', '.join(missing)}")
        scaling = {name: _positive(name, parameters[name]) for name in names}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise ModelError("llama3 rope scaling needs low_freq_factor < high_freq_factor")
        return cls(theta, scaling)


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
        """Raises ModelError for what is not supported, missing, or impossible."""
        architecture = config.get("architectures")
        if isinstance(architecture, list) and architecture:
            architecture = architecture[0]
        if architecture not in ARCHITECTURES:
            raise ModelError(f"architecture {architecture} is not supported ({', '.join(ARCHITECTURES)})")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported (silu is)")
        heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        kv_heads = _size(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
        head_dim = _size(config, "head_dim", hidden // heads)
        if head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd: a rotary embedding turns pairs")
        try:
            return cls(
                architecture=architecture,
                vocab_size=_size(config, "vocab_size"),
                hidden_size=hidden,
                intermediate_size=_size(config, "intermediate_size"),
                num_layers=_size(config, "num_hidden_layers"),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rms_norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
                rope=RopeConfig.from_hf(config),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                max_position_embeddings=_size(config, "max_position_embeddings", 2048),
                eos_token_ids=_eos_token_ids(config, generation or {}),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            )
        except ModelError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelError(str(error)) from None

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
            "self_attn.q_proj": (query, hidden, self.attention_bias),
            "self_attn.k_proj": (kv, hidden, self.attention_bias),
            "self_attn.v_proj": (kv, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, query, self.attention_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of at least 1. Raises ModelError."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, got {value!r:.40}")
    return value


def _positive(name: str, value: Any) -> float:
    """A finite number above 0. Raises ModelError."""
    number = float(value) if isinstance(value, int | float) else math.nan
    if not 0 < number < math.inf:
        raise ModelError(f"{name} must be a number above 0, got {value!r:.40}")
    return number


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(f"eos_token_id must be a token id or a list of them, got {value!r:.40}")
    return tuple(ids)


def load_model_config(path: Path, load_format: str = "auto") -> ModelConfig:
    """The config of the model at ``path``, as ``resolve_model`` gives it. Raises ModelError."""
    config = open_checkpoint(path, load_format).config
    file = path / "generation_config.json"
    generation = read_json(file) if file.is_file() else None
    try:
        return ModelConfig.from_hf(config, generation)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json' if path.is_dir() else path}: {error}") from None
