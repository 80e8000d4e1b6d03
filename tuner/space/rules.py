"""What a config must hold before it may be launched: comparisons over its flags, as data.

They are written in the doctor's language of rules (``servers.expression``) and never executed as Python. A
search judges thousands of configs between two launches, so a comparison is turned into closures once.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from servers.expression import Comparison, Expression, ExpressionError, parse_comparison

Numbers = Mapping[str, float]
"""A config as names that expressions use: its numbers, switches as 0 and 1, and of nested flags the keys."""
Evaluate = Callable[[Numbers], float]

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}
_CALLS: Mapping[str, Callable[..., float]] = {"min": min, "max": max}


def evaluate(expression: Expression) -> Evaluate:
    """The expression's value of given numbers. What it makes raises KeyError for a name that is missing, and
    ZeroDivisionError."""
    return _compile(expression.tree)


def _judge(comparison: Comparison) -> Callable[[Numbers], bool]:
    left, right = evaluate(comparison.left), evaluate(comparison.right)
    compare = _COMPARISONS[comparison.operator]
    return lambda numbers: compare(left(numbers), right(numbers))


def _compile(node: ast.expr) -> Evaluate:
    match node:
        case ast.Constant(value=int() | float() as value):
            constant = float(value)
            return lambda numbers: constant
        case ast.Name(id=name):
            return lambda numbers: numbers[name]
        case ast.UnaryOp(operand=operand):
            inner = _compile(operand)
            return lambda numbers: -inner(numbers)
        case ast.Call(func=ast.Name(id=name), args=args):
            call, parts = _CALLS[name], [_compile(argument) for argument in args]
            return lambda numbers: call(*(part(numbers) for part in parts))
        case ast.BinOp(left=left, op=op, right=right):
            a, b, join = _compile(left), _compile(right), _OPERATORS[type(op)]
            return lambda numbers: join(a(numbers), b(numbers))
    raise ExpressionError(f"{ast.unparse(node)!r} is not allowed")


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
    _holds: Callable[[Numbers], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_holds", _judge(parse_comparison(self.holds)))

    @property
    def compared(self) -> frozenset[str]:
        """The names in ``holds``."""
        return parse_comparison(self.holds).names

    def broken(self, flat: Mapping[str, Any], numbers: Numbers) -> bool:
        """``flat``: the config with nested flags as ``flag.key``; ``numbers``: the same for expressions."""
        if self.when and any(flat.get(flag) != value for flag, value in self.when.items()):
            return False
        try:
            return not self._holds(numbers)
        except (KeyError, ZeroDivisionError):
            return False


RULES = (
    Rule(
        "max_num_batched_tokens",
        "max_num_batched_tokens >= max_num_seqs",
        "must be at least max_num_seqs, or a step cannot serve every sequence",
    ),
    Rule(
        "max_num_batched_tokens",
        "max_num_batched_tokens >= max_model_len",
        "must be at least max_model_len when chunked prefill is off, or a long prompt fits no step",
        when={"enable_chunked_prefill": False},
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
"""Of every server. Flags that one does not have are in none of its configs."""
