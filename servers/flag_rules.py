"""What a server refuses at its start: the rules between flags, so that no prescription breaks one.

The rules are vLLM's (``SchedulerConfig.verify_max_model_len``), and the bundled engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servers.known_flags import Flags

Number = int | float


def allowed(changes: Mapping[str, Any], flags: Flags) -> tuple[dict[str, Any], list[str]] | None:
    """``changes`` as the server takes them, with what must change along, and why.

    None where nothing is left of them: a value that the rules push back to where it was, or past it.
    """
    if not flags.kind.budget_counts_decodes:  # none of the rules below is such a server's
        return _stepped(changes, flags)
    new, notes = dict(changes), []
    if isinstance(threshold := new.get("long_prefill_token_threshold"), int):
        new["long_prefill_token_threshold"] = min(threshold, round(_point(flags, "max_model_len", threshold)))
        if new["long_prefill_token_threshold"] >= _tokens(new, flags):
            return None  # the budget caps the chunk already
    if isinstance(tokens := new.get("max_num_batched_tokens"), int):
        new["max_num_batched_tokens"] = max(tokens, _least_tokens(new, flags))
    elif isinstance(seqs := new.get("max_num_seqs"), int):
        if seqs > _tokens(new, flags):
            new["max_num_batched_tokens"] = _least_tokens(new, flags)
            notes.append("the token budget must not be below max_num_seqs")
        elif seqs > flags.known["max_num_batched_tokens"].number.low:
            notes.append(f"max_num_batched_tokens must be at least {seqs}")
    for name, value in new.items():
        if name in changes and _turned_round(flags, name, changes[name], value):
            return None
    return new, notes


def _stepped(changes: Mapping[str, Any], flags: Flags) -> tuple[dict[str, Any], list[str]] | None:
    """The share of memory no further than the server survives, where it may be raised only by steps."""
    wanted, current = changes.get("gpu_memory_utilization"), flags.value("gpu_memory_utilization")
    if not isinstance(wanted, int | float) or flags.kind.memory_step is None:
        return dict(changes), []
    if not isinstance(current, int | float):
        return dict(changes), [flags.kind.memory_note]
    share = min(wanted, round(current + flags.kind.memory_step, 3))
    if (wanted - current) * (share - current) <= 0:
        return None
    return {**changes, "gpu_memory_utilization": share}, [flags.kind.memory_note]


def _least_tokens(new: Mapping[str, Any], flags: Flags) -> int:
    """The smallest token budget beside the other flags; a multiple of 16 where it is not tiny."""
    least = max(
        _value(new, flags, "max_num_seqs", 1),
        1 + _value(new, flags, "num_speculative_tokens", 0),
        1 if _value(new, flags, "enable_chunked_prefill", 1) else _value(new, flags, "max_model_len", 1),
    )
    return -(-round(least) // 16) * 16 if least >= 64 else round(least)


def _turned_round(flags: Flags, name: str, wanted: Any, value: Any) -> bool:
    """Whether a value that was to be lowered is not lower after all, or one to be raised not higher."""
    current = flags.value(name)
    if not all(isinstance(number, int | float) for number in (wanted, value, current)):
        return False
    return bool((wanted - current) * (value - current) <= 0)


def _tokens(new: Mapping[str, Any], flags: Flags) -> Number:
    return _value(new, flags, "max_num_batched_tokens", 0)


def _value(new: Mapping[str, Any], flags: Flags, name: str, otherwise: Number) -> Number:
    value = new.get(name)
    return value if isinstance(value, int | float) else _point(flags, name, otherwise)


def _point(flags: Flags, name: str, otherwise: Number) -> Number:
    return flags.known[name].number.point if name in flags.known else otherwise
