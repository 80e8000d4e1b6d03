"""The rules between flags, which a server holds at its start: comparisons, as data.

The doctor keeps its prescriptions inside them and the tuner the configs that it launches. They are vLLM's
(``SchedulerConfig.verify_max_model_len``) and the bundled engine's, and what makes a flag do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from servers.expression import Numbers, Relation, parse_comparison


@dataclass(frozen=True)
class Rule:
    """``holds`` must be true of a config in which every flag of ``when`` has that value.

    A name that the config does not have makes the rule silent. Raises ExpressionError.
    """

    flag: str
    """The flag that a refusal names."""
    holds: str
    text: str
    """Why, after the flag and its value: ``must be at least max_num_seqs, or …``."""
    when: Mapping[str, Any] = field(default_factory=dict)
    budget: bool = False
    """True: of servers whose token budget counts the tokens that decode, too."""
    comparison: Relation = field(init=False, repr=False, compare=False)
    _holds: Callable[[Numbers], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        comparison = parse_comparison(self.holds)
        object.__setattr__(self, "comparison", comparison)
        object.__setattr__(self, "_holds", comparison.on_numbers())

    @property
    def compared(self) -> frozenset[str]:
        """The names in ``holds``."""
        return self.comparison.names

    def applies(self, flat: Mapping[str, Any]) -> bool:
        return not self.when or all(flat.get(flag) == value for flag, value in self.when.items())

    def broken(self, flat: Mapping[str, Any], numbers: Numbers) -> bool:
        """``flat``: the config with nested flags as ``flag.key``; ``numbers``: the same for expressions."""
        if not self.applies(flat):
            return False
        try:
            return not self._holds(numbers)
        except (KeyError, ZeroDivisionError):
            return False

    def limit(self, flag: str, sign: str, numbers: Numbers) -> float | None:
        """What ``flag`` must not be beyond where the rule reads ``flag sign …``; None where it does not."""
        if (self.comparison.left.text, self.comparison.operator) != (flag, sign) or not self.applies(numbers):
            return None
        try:
            return self.comparison.right.on_numbers()(numbers)
        except (KeyError, ZeroDivisionError):
            return None


RULES = (
    Rule(
        "max_num_batched_tokens",
        "max_num_batched_tokens >= max_num_seqs",
        "must be at least max_num_seqs, or a step cannot serve every sequence",
        budget=True,
    ),
    Rule(
        "max_num_batched_tokens",
        "max_num_batched_tokens >= max_model_len",
        "must be at least max_model_len when chunked prefill is off, or a long prompt fits no step",
        when={"enable_chunked_prefill": False},
        budget=True,
    ),
    Rule(
        "long_prefill_token_threshold",
        "long_prefill_token_threshold < max_num_batched_tokens",
        "must be below max_num_batched_tokens, or it does nothing",
    ),
    Rule(
        "long_prefill_token_threshold",
        "long_prefill_token_threshold <= max_model_len",
        "must not exceed max_model_len",
    ),
    Rule(
        "max_num_batched_tokens",
        "max_num_batched_tokens >= 1 + num_speculative_tokens",
        "must be at least 1 + num_speculative_tokens, or nothing is ever admitted",
        budget=True,
    ),
    Rule(
        "speculative_config",
        "prompt_lookup_min <= prompt_lookup_max",
        "prompt_lookup_min must not exceed prompt_lookup_max",
    ),
    Rule(
        "max_long_partial_prefills",
        "max_long_partial_prefills <= max_num_partial_prefills",
        "must not exceed max_num_partial_prefills",
    ),
    Rule(
        "max_num_partial_prefills",
        "max_num_partial_prefills <= 1",
        "must be 1 when chunked prefill is off: then no prefill is partial",
        when={"enable_chunked_prefill": False},
    ),
    Rule(
        "max_model_len",
        "max_model_len >= longest_request",
        "must hold the workload's longest request",
    ),
)
"""Flags that a server does not have are in none of its configs."""
