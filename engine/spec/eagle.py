"""EAGLE (arXiv:2401.15077): one decoder layer drafts from the target's own hidden states.

The head sees, at each position, the target's hidden state there and the token that follows, and computes what
the hidden state of the next position would be. Embedding and output head are the target's. The layout of a
checkpoint is the published one, which vLLM reads too: ``fc.weight`` [hidden, 2 * hidden] (token first),
``layers.0.*`` without an input norm.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.kernels import make_kernels
from engine.kernels.base import Batch, Linear
from engine.models.model import Decoder, attention_shape, layer_rope_tables, load_layer
from engine.models.model_config import ModelConfig
from engine.models.model_error import ModelError
from engine.models.weights import SafetensorsCheckpoint, resolve_model
from engine.spec.network import NetworkProposer, TokenSpan
from engine.spec.proposer import TargetStep

ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of the target that a checkpoint may repeat."""


class EagleProposer(NetworkProposer):
    """KV at a position belongs to the hidden state there and the token after it. So it is written one token
    late, and the last position of a prefix block depends on what follows the block: the scheduler computes
    that block anew. Hidden states are kept nowhere: every step's are used at once, drafts wanted or not."""

    def __init__(self, config: EngineConfig, target: Decoder) -> None:
        """Raises ModelError for a head that does not load, or does not fit the target."""
        speculative, max_model_len = config.speculative_config, config.max_model_len
        assert speculative is not None
        assert speculative.model is not None
        assert max_model_len is not None
        path = resolve_model(speculative.model)
        if not path.is_dir():
            raise ModelError(f"EAGLE head {path}: not a Hugging Face model directory")
        checkpoint = SafetensorsCheckpoint(path)
        model = _head_config(path, checkpoint.config, target.config)
        shape = attention_shape(model, config.block_size)
        tables = layer_rope_tables(model, max_model_len)
        kernels = make_kernels(shape, target.kernels.dtype, *tables)
        tensors = _head_tensors(path, checkpoint, model, target)
        bias = tensors.pop("model.fc.bias", None)
        self._fc: Linear = kernels.pack(tensors.pop("model.fc.weight"), bias)
        layers = [
            load_layer(model, kernels, tensors, f"model.layers.{index}.") for index in range(model.num_layers)
        ]
        decoder = Decoder(model, kernels, target.embedding, layers, target.norm, target.head)
        super().__init__(config, decoder, max_model_len)
        self.weights_bytes = self._fc.nbytes + sum(layer.nbytes for layer in layers)
        self._target = target
        self._inputs = torch.empty(self._tokens_at_once, 2 * model.hidden_size, dtype=kernels.dtype)

    def activation_bytes(self) -> int:
        return super().activation_bytes() + 2 * self._inputs.nbytes

    def _spans(self, step: TargetStep) -> list[TokenSpan]:
        spans = []
        row = 0
        for item, table in zip(step.scheduled, step.tables, strict=True):
            emitted = step.tokens.get(item.request.request_id, [])
            own = item.num_tokens - len(item.drafts)
            computed = own + max(
                len(emitted) - 1, 0
            )  # what counts: the request's own tokens, accepted drafts
            first = item.start + 1
            tokens = [*item.request.token_ids[first : first + computed], *emitted][:computed]
            drafts = 0
            if emitted and step.drafting:
                end = item.start + computed
                room = self._room(table, end)
                drafts = max(min(self._k, room + 1, self._max_positions - end - 1), 0)
            spans.append(TokenSpan(item.request, table, item.start, tokens, row, drafts))
            row += item.num_tokens
        return spans

    def _features(self, target_hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as its output head sees them: behind the final norm."""
        hidden = target_hidden[rows]
        normed = torch.empty_like(hidden)
        self._target.kernels.rms_norm(hidden, self._target.norm, self._target.config.rms_norm_eps, normed)
        return normed

    def _forward(self, token_ids: torch.Tensor, features: torch.Tensor, batch: Batch) -> torch.Tensor:
        size = features.shape[-1]
        inputs = self._inputs[: len(token_ids)]
        inputs[:, :size] = self._decoder.embedding[token_ids]
        inputs[:, size:] = features
        self._decoder.kernels.linear(inputs, self._fc, self._workspace.hidden[: len(token_ids)])
        return self._decoder.layers_forward(batch, self._caches, self._workspace)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._workspace.logits[: len(hidden)]
        self._target.kernels.linear(hidden, self._target.head, logits)
        return logits


def _head_config(path: Path, config: dict[str, Any], target: ModelConfig) -> ModelConfig:
    """The head's layers as a decoder's. Raises ModelError for what does not fit the target."""
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if architectures[0] not in ARCHITECTURES:
        raise ModelError(
            f"EAGLE head {path}: architecture {architectures[0]} is not supported "
            f"({', '.join(ARCHITECTURES)} are)"
        )
    given = {**config, "architectures": ["LlamaForCausalLM"]}
    given.setdefault("vocab_size", target.vocab_size)
    try:
        model = ModelConfig.from_hf(given)
    except ModelError as error:
        raise ModelError(f"EAGLE head {path / 'config.json'}: {error}") from None
    for name in ("vocab_size", "hidden_size"):
        own, wanted = getattr(model, name), getattr(target, name)
        if own != wanted:
            raise ModelError(
                f"EAGLE head {path}: its {name} is {own}, the served model's {wanted}; "
                "a head works only with the model it was trained for"
            )
    return replace(model, tie_word_embeddings=True)


def _head_tensors(
    path: Path, checkpoint: SafetensorsCheckpoint, model: ModelConfig, target: Decoder
) -> dict[str, torch.Tensor]:
    """The head's tensors as ``model.layers.*`` and ``model.fc.*``. Raises ModelError."""
    hidden = model.hidden_size
    shapes = {name: shape for name, shape in model.tensor_shapes().items() if ".layers." in name}
    del shapes["model.layers.0.input_layernorm.weight"]
    shapes["model.fc.weight"] = (hidden, 2 * hidden)
    optional: dict[str, tuple[int, ...]] = {"model.fc.bias": (hidden,)}
    found: dict[str, torch.Tensor] = {}
    for given, tensor in checkpoint.tensors():
        name = f"model.{given.removeprefix('model.')}"
        if given.removeprefix("model.") in SHARED:
            _check_shared(path, given, tensor, target)
            continue
        shape = shapes.get(name) or optional.get(name)
        if shape is None:
            raise ModelError(f"EAGLE head {path}: tensor {given} is none of a head's")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"EAGLE head {path}: tensor {given} has shape {tuple(tensor.shape)}, not {shape}"
            )
        found[name] = tensor.to(target.kernels.dtype)
    missing = sorted(set(shapes) - set(found))
    if missing:
        raise ModelError(f"EAGLE head {path}: lacks {len(missing)} tensors, first {missing[0]}")
    return found


def _check_shared(path: Path, name: str, tensor: torch.Tensor, target: Decoder) -> None:
    """An embedding or output head of its own would be left aside, and the drafts would be worthless."""
    tied = target.config.tie_word_embeddings
    if "embed" not in name and not tied:
        return  # the target's own is packed for its device: nothing to compare with
    embedding = target.embedding
    if tensor.shape != embedding.shape or not torch.equal(tensor.to(embedding.dtype), embedding):
        raise ModelError(
            f"EAGLE head {path}: its {name} is not the served model's; only heads that share it are supported"
        )
