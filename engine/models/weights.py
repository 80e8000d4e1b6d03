"""Checkpoints: a model's config and tensors, from safetensors, from GGUF, or random for a given config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.models.gguf_checkpoint import GgufCheckpoint
from engine.models.model_error import ModelError

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]


class Checkpoint(Protocol):
    """A model on disk: its HF config, and its tensors by HF name (each given once, in any order)."""

    config: dict[str, Any]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def resolve_model(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """The directory, ``.gguf`` file or ``config.json`` that ``name`` stands for.

    ``name`` is "bundled", a path, or a hub id ("org/model"), which is downloaded where the hub is reachable.
    Raises ModelError, or FetchError for the bundled model.
    """
    if name == "bundled":
        from engine.models.bundled import fetch_bundled

        return fetch_bundled(progress)
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null character
        raise ModelError(f"model {name[:100]!r}: {error}") from None
    if exists:
        return path
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(f"model {name!r}: no such file or directory, and not a hub id such as 'org/model'")
    return _download_from_hub(name)


def _download_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"]))
    except Exception as error:  # the hub client raises many kinds: HTTP, validation, offline, cache
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {name!r}: no such directory, and the hub could not deliver it ({reason}). "
            "Give a local directory, a .gguf file, or 'bundled'."
        ) from error


def open_checkpoint(path: Path, load_format: str = "auto", seed: int = 0) -> Checkpoint:
    """The checkpoint at ``path`` (a directory, a ``.gguf`` file, or, for "dummy", a ``config.json``)."""
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: not a Hugging Face model directory?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return content


class SafetensorsCheckpoint:
    """A Hugging Face directory: config.json and one or many ``.safetensors`` files, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_json(directory / "config.json")
        self._files = self._find_files()

    def _find_files(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(f"{index}: holds no weight_map")
            if not all(isinstance(name, str) for name in weight_map.values()):
                raise ModelError(f"{index}: weight_map names something that is no file")
            files = [self.directory / name for name in sorted(set(weight_map.values()))]
        else:
            files = sorted(self.directory.glob("*.safetensors"))
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            raise ModelError(
                f"{self.directory}: {', '.join(missing) or 'no .safetensors file'} is missing; "
                "complete the checkpoint, or use --load-format dummy for random weights"
            )
        return files

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import SafetensorError, safe_open

        for file in self._files:
            try:
                with safe_open(file, framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                        yield name, shard.get_tensor(name)
            except SafetensorError as error:
                raise ModelError(f"{file}: damaged safetensors file ({error})") from None


class DummyCheckpoint:
    """Random weights for a config: normal, deviation 0.02; norms one, biases zero. One seed, one model."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.config = read_json(path / "config.json" if path.is_dir() else path)
        self._seed = seed

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        from engine.models.model_config import ModelConfig

        generator = torch.Generator().manual_seed(self._seed)
        model = ModelConfig.from_hf(self.config)
        for name, shape in model.tensor_shapes().items():
            if name.endswith("norm.weight"):
                yield name, torch.full(shape, 1.0 - model.norm_offset)
            elif name.endswith("bias"):
                yield name, torch.zeros(shape)
            else:
                yield name, torch.empty(shape, device="cpu").normal_(0.0, 0.02, generator=generator)
