"""LoRA adapters in PEFT's format, and what those of a step's requests add to the decoder's projections.

An adapter adds ``scale * (x @ A.T) @ B.T`` to ``x @ W.T`` (LoRA, arXiv 2106.09685, section 4.1). Requests of
several adapters are computed in one batch: the base model's products for all tokens, and those of an adapter
for the tokens of its requests, gathered.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError
from engine.kernels.base import Kernels, Linear
from engine.lora_config import LoRAModule
from engine.models.model import PROJECTIONS, WEIGHT_TYPES, text_name
from engine.models.model_config import ModelConfig
from engine.models.model_error import ModelError
from engine.models.weights import read_json, read_safetensors, resolve_model

RANK_MULTIPLE = 16
"""Ranks are filled up with zeros to a multiple of this, which kernels multiply fastest."""
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_REFUSED = (
    "use_dora",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "kasa_config",
    "lora_ga_config",
    "monteclora_config",
    "arrow_config",
)
"""Keys of adapter_config.json that change what is computed, in ways that are not here."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Of ``init_lora_weights``; the others (pissa, olora, loftq, corda) change the base weights as well."""


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one projection of a layer. Where several matrices make up the projection, their
    ranks stand side by side, and B is zero where the ranks of one meet the outputs of another."""

    a: torch.Tensor
    """[ranks, inputs]"""
    b: torch.Tensor
    """[outputs, ranks], times scale"""

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


Adapter = Mapping[tuple[int, str], LowRank]
"""By layer and projection (see PROJECTIONS); what it leaves alone is missing."""
PackedAdapter = Mapping[tuple[int, str], tuple[Linear, Linear]]
"""The same on the device: A and B."""


class StepAdapters:
    """The adapters of one step, each with the rows of the batch that are its requests' tokens."""

    def __init__(
        self, kernels: Kernels, groups: Sequence[tuple[PackedAdapter, slice | torch.Tensor]]
    ) -> None:
        self._kernels, self._groups = kernels, groups

    def add(self, layer: int, projection: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to ``out`` [T, N] what the adapters make of ``x`` [T, K]."""
        for adapter, rows in self._groups:
            pair = adapter.get((layer, projection))
            if pair is None:
                continue
            a, b = pair
            own, target = _rows_of(x, rows), _rows_of(out, rows)
            low = torch.empty(len(own), a.out_features, dtype=x.dtype, device=x.device)
            self._kernels.linear(own, a, low)
            self._kernels.linear_add(low, b, target)
            if not isinstance(rows, slice):
                out.index_copy_(0, rows, target)


class AdapterSlots:
    """The adapters of a server as the device multiplies them: on a GPU the ``max_loras`` that were used last,
    out of all in host memory; on the CPU all."""

    def __init__(self, adapters: Mapping[str, Adapter], max_loras: int, kernels: Kernels) -> None:
        self._adapters, self._kernels = dict(adapters), kernels
        self._held: OrderedDict[str, PackedAdapter] = OrderedDict()
        self._room = max_loras
        sizes = sorted(sum(change.nbytes for change in adapter.values()) for adapter in adapters.values())
        self.nbytes = sum(sizes[-max_loras:])
        """Bytes of the device that they take at most."""
        if kernels.device.type == "cpu":
            self._room = len(adapters)
            packed = [self._hold(name) for name in adapters]
            self._adapters.clear()
            self.nbytes = sum(a.nbytes + b.nbytes for pairs in packed for a, b in pairs.values())

    def of_step(self, names: Sequence[str], counts: Sequence[int]) -> StepAdapters | None:
        """What the adapters add to a step whose sequences have these adapters ("": none) and numbers of
        tokens; None where none has one."""
        if not any(names):
            return None
        rows: dict[str, list[int]] = {}
        start = 0
        for name, count in zip(names, counts, strict=True):
            if name:
                rows.setdefault(name, []).extend(range(start, start + count))
            start += count
        return StepAdapters(self._kernels, [(self._hold(name), self._rows(rows[name])) for name in rows])

    def _rows(self, rows: list[int]) -> slice | torch.Tensor:
        first, last = rows[0], rows[-1]
        if last - first + 1 == len(rows):
            return slice(first, last + 1)
        return self._kernels.upload(rows).long()

    def _hold(self, name: str) -> PackedAdapter:
        """The adapter on the device. The one that was unused for longest makes room for it: a step has no
        more than ``max_loras``."""
        if name not in self._held:
            if len(self._held) == self._room:
                self._held.popitem(last=False)
            pack, device = self._kernels.pack_exact, self._kernels.device
            self._held[name] = {
                place: (pack(change.a.to(device)), pack(change.b.to(device)))
                for place, change in self._adapters[name].items()
            }
        self._held.move_to_end(name)
        return self._held[name]


def _rows_of(x: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """A view of the rows, or a copy of scattered ones. Plain indexing would wake torch's threads, which keep
    the cores from those of the kernels."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def load_adapters(
    modules: Sequence[LoRAModule], model: ModelConfig, max_rank: int, dtype: torch.dtype
) -> dict[str, Adapter]:
    """The adapters by name. Raises ModelError for what is damaged, not in PEFT's format or not of this model,
    ConfigError for a rank above ``max_rank``."""
    adapters = {}
    for module in modules:
        try:
            path = resolve_model(module.path)
            adapters[module.name] = _load(module.name, path, model, max_rank, dtype)
        except ModelError as error:
            raise ModelError(f"adapter {module.name}: {error}") from None
    return adapters


def _load(name: str, path: Path, model: ModelConfig, max_rank: int, dtype: torch.dtype) -> Adapter:
    for file in (path / "adapter_config.json", path / "adapter_model.safetensors"):
        if not file.is_file():
            raise ModelError(f"{file} is missing: an adapter is a directory in PEFT's format")
    config = _Scales.read(path / "adapter_config.json")
    halves = _halves(path / "adapter_model.safetensors", model)
    rank = max(a.shape[0] for a, _ in halves.values())
    if rank > max_rank:
        rule = f"has rank {rank}, more than --max-lora-rank ({max_rank})"
        raise ConfigError("lora_modules", name, rule, "raise --max-lora-rank")
    scaled = {module: (a, b.float() * config.of(module, a.shape[0])) for module, (a, b) in halves.items()}
    shapes = model.tensor_shapes()
    adapter = {}
    for layer in range(model.num_layers):
        for projection, matrices in PROJECTIONS.items():
            modules = [f"model.layers.{layer}.{matrix}" for matrix in matrices]
            if any(module in scaled for module in modules):
                outputs = [shapes[f"{module}.weight"][0] for module in modules]
                parts = [scaled.get(module) for module in modules]
                adapter[layer, projection] = _fuse(parts, outputs, dtype)
    return adapter


def _fuse(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None], outputs: Sequence[int], dtype: torch.dtype
) -> LowRank:
    """A and B of matrices that stand side by side; None for one that the adapter leaves alone."""
    given = [part for part in parts if part is not None]
    ranks = -(-sum(len(a) for a, _ in given) // RANK_MULTIPLE) * RANK_MULTIPLE
    fused_a = torch.zeros(ranks, given[0][0].shape[1], dtype=dtype)
    fused_b = torch.zeros(sum(outputs), ranks, dtype=dtype)
    rank = row = 0
    for part, width in zip(parts, outputs, strict=True):
        if part is not None:
            a, b = part
            fused_a[rank : rank + len(a)] = a
            fused_b[row : row + width, rank : rank + len(a)] = b
            rank += len(a)
        row += width
    return LowRank(fused_a, fused_b)


def _halves(file: Path, model: ModelConfig) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A [rank, inputs] and B [outputs, rank] of each matrix that is adapted, by its name without .weight."""
    shapes = model.tensor_shapes()
    matrices = {matrix for group in PROJECTIONS.values() for matrix in group}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in read_safetensors(file):
        match = _TENSOR.fullmatch(name)
        module = text_name(match["module"]) if match else name
        layer = _LAYER.fullmatch(module)
        if match is None or layer is None or layer[2] not in matrices:
            raise ModelError(
                f"{file}: tensor {name} is none of LoRA's for the projections of attention and MLP "
                f"({', '.join(sorted(matrices))}), which are those that are supported"
            )
        if f"{module}.weight" not in shapes:
            raise ModelError(
                f"{file}: tensor {name} is of another model: this one has {model.num_layers} layers"
            )
        if tensor.dtype not in WEIGHT_TYPES:
            raise ModelError(f"{file}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}")
        found.setdefault(module, {})[match["half"]] = tensor
    if not found:
        raise ModelError(f"{file}: holds no tensors")
    return {
        module: _pair(file, module, halves, shapes[f"{module}.weight"]) for module, halves in found.items()
    }


def _pair(
    file: Path, module: str, halves: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of one matrix [outputs, inputs]."""
    missing = {"A", "B"} - halves.keys()
    if missing:
        raise ModelError(f"{file}: {module} lacks lora_{missing.pop()}")
    a, b = halves["A"], halves["B"]
    outputs, inputs = shape
    if (
        a.ndim != 2
        or b.ndim != 2
        or (b.shape[0], a.shape[1]) != (outputs, inputs)
        or a.shape[0] != b.shape[1]
    ):
        raise ModelError(
            f"{file}: {module} has A {tuple(a.shape)} and B {tuple(b.shape)}; the model's matrix is "
            f"{outputs} x {inputs}: an adapter of another model?"
        )
    return a, b


@dataclass(frozen=True)
class _Scales:
    """What A and B are multiplied with, as PEFT's LoraConfig says."""

    alpha: float
    alpha_pattern: Mapping[str, float]
    """By regular expressions for the ends of modules' names."""
    rank_stabilised: bool
    """``alpha / sqrt(rank)`` in the place of ``alpha / rank`` (rsLoRA, arXiv 2312.03732)."""

    @classmethod
    def read(cls, file: Path) -> _Scales:
        """Raises ModelError for what changes more than a scale."""
        config = read_json(file)
        if config.get("peft_type") != "LORA":
            raise ModelError(f"{file}: peft_type is {config.get('peft_type')!r:.40}, LORA is supported")
        for key in _unsupported(config):
            raise ModelError(f"{file}: {key} {config[key]!r:.60} is not supported")
        alphas = config.get("alpha_pattern") or {}
        if not isinstance(alphas, Mapping):
            raise ModelError(f"{file}: alpha_pattern must be an object")
        for key, alpha in {"lora_alpha": config.get("lora_alpha"), **alphas}.items():
            if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
                raise ModelError(f"{file}: {key} must be a number, got {alpha!r:.40}")
        try:
            for pattern in alphas:
                re.compile(pattern)
        except re.error as error:
            raise ModelError(
                f"{file}: alpha_pattern {pattern!r:.40} is no regular expression ({error})"
            ) from None
        return cls(config["lora_alpha"], alphas, bool(config.get("use_rslora")))

    def of(self, module: str, rank: int) -> float:
        alpha = next(
            (alpha for key, alpha in self.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", module)),
            self.alpha,
        )
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    yield from (key for key in _REFUSED if config.get(key))
    if config.get("bias", "none") != "none":
        yield "bias"
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        yield "init_lora_weights"
