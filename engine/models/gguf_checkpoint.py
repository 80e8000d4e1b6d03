"""A llama.cpp model file (GGUF) seen as a Hugging Face checkpoint: config, tensors by HF name, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.model_error import ModelError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3
"""llama.cpp's token type for special tokens such as <|im_end|>."""

_PRE_TOKENIZER_DIGITS = {"smollm": True, "gpt-2": False, "default": False}
"""llama.cpp's name of a byte-level BPE pre-tokenizer -> whether it splits every digit off first."""


class GgufError(ModelError):
    """The file is not a GGUF file, or holds a model that is not supported."""


class GgufCheckpoint:
    """Reads one ``.gguf`` file of the llama architecture (Llama, Mistral, SmolLM2). Raises GgufError."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader: GGUFReader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise GgufError(f"{path}: not a readable GGUF file ({error})") from None
        self._fields = dict(self._reader.fields.items())
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise GgufError(
                f"{path}: GGUF architecture {architecture!r} is not supported (llama is); "
                "give a Hugging Face directory with safetensors instead"
            )
        self.config = self._read_config()

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def _need(self, key: str) -> Any:
        value = self._value(key)
        if value is None:
            raise GgufError(f"{self.path}: metadata key {key!r} is missing")
        return value

    def _read_config(self) -> dict[str, Any]:
        heads = int(self._need("llama.attention.head_count"))
        hidden = int(self._need("llama.embedding_length"))
        head_dim = int(self._value("llama.attention.key_length", hidden // heads))
        names = {tensor.name for tensor in self._reader.tensors}
        if "rope_freqs.weight" in names:
            raise GgufError(f"{self.path}: scaled rotary frequencies in a GGUF file are not supported")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": int(self._need("llama.feed_forward_length")),
            "num_hidden_layers": int(self._need("llama.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._value("llama.attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "vocab_size": int(self._value("llama.vocab_size", len(self._value("tokenizer.ggml.tokens", [])))),
            "max_position_embeddings": int(self._need("llama.context_length")),
            # The file holds a float32; nine digits restore the number that was written.
            "rms_norm_eps": float(f"{float(self._need('llama.attention.layer_norm_rms_epsilon')):.6g}"),
            "rope_theta": float(self._value("llama.rope.freq_base", 10000.0)),
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in names,
            "torch_dtype": "bfloat16",
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, fp32 tensor) pairs, dequantised, with llama.cpp's q/k row order undone."""
        import torch
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            name = self._hf_name(tensor.name)
            values = dequantize(tensor.data, tensor.tensor_type)
            # An unquantised tensor is a read-only view of the mapped file, which torch warns about.
            weight = torch.from_numpy(values if values.flags.writeable else values.copy())
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = _unpermute(weight, int(self.config["head_dim"]))
            yield name, weight

    def _hf_name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
        raise GgufError(f"{self.path}: unexpected tensor {name!r} for the llama architecture")

    @property
    def chat_template(self) -> str | None:
        template = self._value("tokenizer.chat_template")
        return None if template is None else str(template)

    def tokenizer_json(self) -> str:
        """The file's vocabulary as the text of a ``tokenizer.json``. Byte-level BPE only; else GgufError."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        kind, pre = self._value("tokenizer.ggml.model"), self._value("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or pre not in _PRE_TOKENIZER_DIGITS:
            raise GgufError(
                f"{self.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; "
                "name a directory with a tokenizer.json by --tokenizer"
            )
        tokens: list[str] = self._need("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._need("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
            if _PRE_TOKENIZER_DIGITS[pre]
            else byte_level
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self._value("tokenizer.ggml.token_type", [])
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind_ in zip(tokens, types, strict=False)
                if kind_ == _CONTROL_TOKEN
            ]
        )
        return str(tokenizer.to_str())

    def tokenizer_config(self) -> dict[str, Any]:
        """The content of a ``tokenizer_config.json``, chat template included."""
        tokens: list[str] = self._need("tokenizer.ggml.tokens")
        named = {
            "bos_token": "tokenizer.ggml.bos_token_id",
            "eos_token": "tokenizer.ggml.eos_token_id",
            "unk_token": "tokenizer.ggml.unknown_token_id",
            "pad_token": "tokenizer.ggml.padding_token_id",
        }
        ids = {name: self._value(key) for name, key in named.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
            **{name: tokens[i] for name, i in ids.items() if i is not None},
        }


def _unpermute(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of rotary pairs: rows ``[head, d/2, 2]`` back to ``[head, 2, d/2]``."""
    rows, columns = weight.shape
    pairs = weight.reshape(rows // head_dim, head_dim // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()
