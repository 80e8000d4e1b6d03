"""Rotary embeddings: what a config says of them. Free of torch; the tables are made in model.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.model_error import ModelError

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings")
KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": _LLAMA3,
    "yarn": _YARN,
}
"""Rope types, and what each of them is computed from beside theta."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, as it is or stretched for a longer context; ``scaling``: the numbers of its kind."""

    theta: float
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    truncate: bool = True
    """Of yarn: whether the ramp begins and ends at whole dimensions."""

    @property
    def numbers(self) -> dict[str, float]:
        return dict(self.scaling)

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, Any], theta: Any, max_position_embeddings: int
    ) -> RopeConfig:
        """From transformers 5's ``rope_parameters``, or an older ``rope_scaling`` beside ``theta``.

        Raises ModelError for what is missing, impossible, or not supported.
        """
        theta = positive("rope_theta", parameters.get("rope_theta", theta))
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if not isinstance(kind, str) or kind not in KINDS:
            raise ModelError(f"rope type {kind!r} is not supported ({', '.join(KINDS)} are)")
        if (share := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ModelError(f"partial_rotary_factor {share} is not supported (1.0 is)")
        given = {name: value for name, value in parameters.items() if value is not None}
        if kind in ("llama3", "yarn"):
            given.setdefault("original_max_position_embeddings", max_position_embeddings)
        if kind == "yarn":
            if theta <= 1:
                raise ModelError(f"yarn rope scaling needs a rope_theta above 1, got {theta}")
            given = {"beta_fast": 32, "beta_slow": 1, **given}
            given.setdefault("attention_factor", _yarn_attention(given))
        missing = [name for name in KINDS[kind] if name not in given]
        if missing:
            raise ModelError(f"{kind} rope scaling lacks {', '.join(missing)}")
        scaling = {name: positive(name, given[name]) for name in KINDS[kind]}
        if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise ModelError("llama3 rope scaling needs low_freq_factor < high_freq_factor")
        return cls(theta, kind, tuple(scaling.items()), bool(parameters.get("truncate", True)))


def _yarn_attention(given: Mapping[str, Any]) -> float:
    """What cos and sin are multiplied by (YaRN, arXiv 2309.00071, section 3.4)."""
    factor = positive("factor", given.get("factor"))

    def stretch(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    above, below = given.get("mscale"), given.get("mscale_all_dim")
    if above and below:
        return stretch(positive("mscale", above)) / stretch(positive("mscale_all_dim", below))
    return stretch(1.0)


def positive(name: str, value: Any) -> float:
    """A finite number above 0. Raises ModelError."""
    number = float(value) if isinstance(value, int | float) else math.nan
    if not 0 < number < math.inf:
        raise ModelError(f"{name} must be a number above 0, got {value!r:.40}")
    return number
