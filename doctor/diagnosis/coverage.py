"""What a diagnosis could not look at, although the server may have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from doctor.diagnosis.engine_view import EngineView

SWITCHED_ON: Mapping[str, tuple[str, ...]] = {
    "LoRA": ("enable_lora", "lora_modules", "lora_paths", "max_loras"),
    "MoE expert balance": ("enable_expert_parallel", "ep_size", "expert_parallel_size"),
    "data parallel ranks against each other": ("data_parallel_size",),
    "prefill/decode disaggregation": ("kv_transfer_config", "disaggregation_mode"),
}
"""The flags, of which kind of server ever, that a server has each by."""
_TOLD_BY: Mapping[str, tuple[str, ...]] = {
    "LoRA": ("adapters", "deferred"),
    "prefill/decode disaggregation": ("waiting_for_kv",),
}
"""Keys of the metrics that rules judge each by."""


def not_judged(examined: Sequence[EngineView], told: frozenset[str]) -> tuple[str, ...]:
    """``told``: keys of the metrics that there are."""
    return tuple(
        topic
        for topic, flags in SWITCHED_ON.items()
        if told.isdisjoint(_TOLD_BY.get(topic, ()))
        and not (topic.startswith("data parallel") and any(v.constants["ranks"] > 1 for v in examined))
        and not all(_without(view, flags) for view in examined)
    )


def _without(view: EngineView, flags: Sequence[str]) -> bool:
    """Whether the command is known, and has none of these."""
    return view.flags.complete and not any(view.flags.raw.get(name) for name in flags)
