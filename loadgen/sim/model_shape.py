"""What a model's config says of a step's work, for servers whose step times were not measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadgen.sim.target_name import HERE, SimulatedTargetError


@dataclass(frozen=True)
class Shape:
    """What of a step's work is in proportion to what, whatever the device."""

    pair: float
    """A query-key pair of attention, to the linear layers of a token."""
    context: float
    """Reading the keys and values of a token, to reading all weights, where both are of one type."""


def shape_of(model: str) -> Shape | None:
    """Of a model whose config is on this machine; None for others, and for what the engine does not know."""
    from loadgen.sim.simulated_engine import read_model, work_ratios

    here = model if model == HERE or Path(model).exists() else _cached_config(model)
    try:
        return Shape(*work_ratios(read_model(here))) if here else None
    except SimulatedTargetError:
        return None


def _cached_config(model: str) -> str:
    """The config.json that the hub's client has fetched for another program; "" without one."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # HFValidationError is a ValueError: no hub id
        return ""
    return found if isinstance(found, str) else ""
