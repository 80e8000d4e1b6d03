"""Prescriptions as SGLang takes them: its names, its switches, and what it does not bear."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from servers.flags.sglang_flags import SPELLING, SWITCHES, to_sglang
from servers.flags.words import render

MEMORY_STEP = 0.02
"""How much ``mem_fraction_static`` is raised at a time."""
_BESIDE_IT = (
    "it is the share of weights and KV alone: activations and graphs need the rest, so raise it in small "
    "steps, while the log's available_gpu_mem stays above 5 GB"
)


def allowed(changes: Mapping[str, Any], current: Any) -> tuple[dict[str, Any], list[str]] | None:
    """``changes`` in steps that the server survives, and why; ``current`` is its memory share, where known.

    None where nothing is left of them.
    """
    wanted = changes.get("gpu_memory_utilization")
    if not isinstance(wanted, int | float):
        return dict(changes), []
    if not isinstance(current, int | float):
        return dict(changes), [_BESIDE_IT]
    share = min(wanted, round(current + MEMORY_STEP, 3))
    if (wanted - current) * (share - current) <= 0:
        return None
    return {**changes, "gpu_memory_utilization": share}, [_BESIDE_IT]


def arguments(changes: Mapping[str, Any]) -> str:
    """vLLM's ``changes`` as one types them for SGLang; a dropped flag is named in words."""
    kept = {name: value for name, value in changes.items() if value is not None}
    dropped = [SPELLING.get(name, name) for name, value in changes.items() if value is None]
    dropped += [SWITCHES[name][0] for name, value in kept.items() if _is_default(name, value)]
    drafts = kept.get("speculative_config", {})
    if drafts and "method" not in drafts:  # a method that vLLM has no name for; only the number changes
        kept["speculative_num_draft_tokens"] = kept.pop("speculative_config")["num_speculative_tokens"] + 1
    typed = {name: value for name, value in to_sglang(kept).items() if value is not False}
    words = [f"drop --{name.replace('_', '-')}" for name in dropped]
    return ", ".join(filter(None, [shlex.join(render(typed)), *words]))


def _is_default(name: str, value: Any) -> bool:
    """Whether a switch is wanted as it is without SGLang's flag."""
    return name in SWITCHES and value != SWITCHES[name][1]
