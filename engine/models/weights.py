"""Where a model is, and what a Hugging Face directory of it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.model_error import ModelError

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]


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
        """Raises ModelError for a damaged file."""
        for file in self._files:
            yield from read_safetensors(file)


def read_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file and their names. Raises ModelError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                yield name, shard.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{file}: damaged safetensors file ({error})") from None
