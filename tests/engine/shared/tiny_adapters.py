"""Random LoRA adapters in PEFT's format, and checkpoints that they are merged into."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.models.model_config import ModelConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter for the checkpoint ``model``, large enough that it changes what is generated."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    shapes = ModelConfig.from_hf(json.loads((model / "config.json").read_text())).tensor_shapes()
    for name, (outputs, *inputs) in shapes.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            for half, shape in (("A", (rank, *inputs)), ("B", (outputs, rank))):
                tensor = torch.empty(shape).normal_(0.0, 0.15, generator=draw)
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = tensor.to(dtype)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets), **config}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def merge(directory: Path, model: Path, adapter: Path, alphas: dict[str, float] | None = None) -> Path:
    """The checkpoint with W + scale * B @ A in the place of W, as PEFT's ``merge_and_unload`` makes it.

    ``alphas``: where lora_alpha is another, by the end of the module's name."""
    shutil.copytree(model, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(model / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if ".lora_A." in name]:
        a, b = tensors[name].float(), tensors[name.replace("lora_A", "lora_B")].float()
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = (alphas or {}).get(module.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        weights[f"{module}.weight"] += scale * (b @ a)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
