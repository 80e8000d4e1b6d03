"""Checkpoints: a model's config and tensors, from safetensors, from GGUF, or random for a given config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.models.gguf_checkpoint import GgufCheckpoint
from engine.models.model_config import ModelConfig
from engine.models.model_error import ModelError
from engine.models.weights import SafetensorsCheckpoint, read_json

if TYPE_CHECKING:
    import torch


class Checkpoint(Protocol):
    """A model on disk: its HF config, and its tensors by HF name (each given once, in any order)."""

    config: dict[str, Any]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def open_checkpoint(path: Path, load_format: str = "auto", seed: int = 0) -> Checkpoint:
    """The checkpoint at ``path`` (a directory, a ``.gguf`` file, or, for "dummy", a ``config.json``).

    Raises ModelError.
    """
    if load_format == "auto":
        load_format = "gguf" if path.suffix == ".gguf" else "safetensors"
    if load_format == "gguf":
        if path.is_dir():
            raise ModelError(f"{path}: --load-format gguf needs the path of a .gguf file")
        return GgufCheckpoint(path)
    if load_format == "dummy":
        return DummyCheckpoint(path, seed)
    if not path.is_dir():
        raise ModelError(f"{path}: not a Hugging Face model directory, and not a .gguf file")
    return SafetensorsCheckpoint(path)


def load_model_config(path: Path, load_format: str = "auto") -> ModelConfig:
    """The config of the model at ``path``, as ``resolve_model`` gives it. Raises ModelError."""
    config = open_checkpoint(path, load_format).config
    file = (path.parent if path.suffix == ".json" else path) / "generation_config.json"
    generation = read_json(file) if file.is_file() else None
    try:
        return ModelConfig.from_hf(config, generation)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json' if path.is_dir() else path}: {error}") from None


class DummyCheckpoint:
    """Random weights for a config: normal, deviation 0.02; norms one, biases zero. One seed, one model."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.config = read_json(path / "config.json" if path.is_dir() else path)
        self._seed = seed

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        generator = torch.Generator().manual_seed(self._seed)
        model = ModelConfig.from_hf(self.config)
        for name, shape in model.tensor_shapes().items():
            if name.endswith("norm.weight"):
                yield name, torch.full(shape, 1.0 - model.norm_offset)
            elif name.endswith("bias"):
                yield name, torch.zeros(shape)
            else:
                yield name, torch.empty(shape, device="cpu").normal_(0.0, 0.02, generator=generator)
