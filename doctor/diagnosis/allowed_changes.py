"""A prescription as the server takes it: inside the rules between flags (``servers.flags.rules``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servers.known_flags import Flags

TOKENS, SEQS = "max_num_batched_tokens", "max_num_seqs"
THRESHOLD, SHARE = "long_prefill_token_threshold", "gpu_memory_utilization"


def allowed(changes: Mapping[str, Any], flags: Flags) -> tuple[dict[str, Any], list[str]] | None:
    """``changes`` as the server takes them, with what must change along, and why.

    None where nothing is left of them: a value that the rules push back to where it was, or past it.
    """
    kind, new, notes = flags.kind, dict(changes), list[str]()
    if isinstance(share := new.get(SHARE), int | float) and kind.memory_step is not None:
        notes.append(kind.memory_note)
        if isinstance(current := flags.value(SHARE), int | float):
            new[SHARE] = min(share, round(current + kind.memory_step, 3))
    if isinstance(threshold := new.get(THRESHOLD), int):
        new[THRESHOLD] = min([threshold, *_limits(THRESHOLD, "<=", new, flags)])
        if any(new[THRESHOLD] >= limit for limit in _limits(THRESHOLD, "<", new, flags)):
            return None  # the budget caps the chunk already
    if isinstance(tokens := new.get(TOKENS), int):
        new[TOKENS] = max(tokens, _least_tokens(new, flags))
    elif isinstance(seqs := new.get(SEQS), int) and kind.budget_counts_decodes:
        if seqs > _numbers(new, flags)[TOKENS]:
            new[TOKENS] = _least_tokens(new, flags)
            notes.append("the token budget must not be below max_num_seqs")
        elif seqs > flags.known[TOKENS].number.low:
            notes.append(f"max_num_batched_tokens must be at least {seqs}")
    for name, wanted in changes.items():
        if _turned_round(flags, name, wanted, new[name]):
            return None
    return new, notes


def _least_tokens(new: Mapping[str, Any], flags: Flags) -> int:
    """The smallest token budget beside the other flags; a multiple of 16 where it is not tiny."""
    least = max(_limits(TOKENS, ">=", new, flags), default=1)
    return -(-least // 16) * 16 if least >= 64 else least


def _limits(flag: str, sign: str, new: Mapping[str, Any], flags: Flags) -> list[int]:
    """What the rules say that ``flag sign`` …, with the changes made."""
    numbers = _numbers(new, flags)
    limits = (rule.limit(flag, sign, numbers) for rule in flags.kind.rules)
    return [round(limit) for limit in limits if limit is not None]


def _numbers(new: Mapping[str, Any], flags: Flags) -> dict[str, float]:
    """The flags after the changes, each by its best figure."""
    known = {name: flag.number.point for name, flag in flags.known.items()}
    return known | {name: value for name, value in new.items() if isinstance(value, int | float)}


def _turned_round(flags: Flags, name: str, wanted: Any, value: Any) -> bool:
    """Whether a value that was to be lowered is not lower after all, or one to be raised not higher."""
    current = flags.value(name)
    if not all(isinstance(number, int | float) for number in (wanted, value, current)):
        return False
    return bool((wanted - current) * (value - current) <= 0)
