"""What a model is, read from its Hugging Face config. Free of torch: the HTTP process reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights import ModelError, open_checkpoint, read_json

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


def load_model_config(path: Path, load_format: str = "auto") -> ModelConfig:
    """The config of the model at ``path``, as ``resolve_model`` gives it. Raises ModelError or GgufError."""
    generation = path / "generation_config.json"
    return ModelConfig.from_hf(
        open_checkpoint(path, load_format).config, read_json(generation) if generation.is_file() else None
    )
