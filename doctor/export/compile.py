"""A playbook's rule as one PromQL expression, so that an alert means what the diagnosis means.

PromQL has no third truth value. What only an unknown flag, or an absent metric, could decide is
left out where the rest of the rule decides without it, and otherwise the rule is not compiled at all.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from doctor.diagnosis.judged_objectives import MISSED, JudgedObjectives, judged_objectives
from doctor.diagnosis.objective_judgement import figure_of
from doctor.diagnosis.playbook import BASELINE
from doctor.metrics.promql import PromQL
from doctor.metrics.signals import SIGNALS, Node, Signal, metrics_of
from servers.expression import All, Clause, Expression, Relation
from servers.known_flags import Flags
from servers.metrics.catalog import METRICS, OPTIONAL
from servers.reading import Number
from servers.slo.bounds import Bound, family_of

WEEK_MS = 7 * 86_400_000
"""How long ago an alert's baseline is: the same day and hour, since load goes by the week."""

Value = float | str
"""A constant, or a PromQL vector with one element an engine."""

PromCondition = bool | str
"""Constant, or a PromQL vector that has the engines for which it holds."""

_SIGNS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_MIRRORED = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "==": "=="}
_TRUTH = {
    ">": float.__gt__,
    ">=": float.__ge__,
    "<": float.__lt__,
    "<=": float.__le__,
    "==": float.__eq__,
}


@dataclass(frozen=True)
class Compiled:
    """``query`` is None where the rule cannot be told: ``unknown`` says what it lacks.

    ``unknown`` beside a query are names whose part of the rule was left out.
    """

    query: PromCondition | None
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class RuleCompiler:
    """Compiles rules for servers with these flags; ``constants`` are objectives and assumptions."""

    promql: PromQL
    flags: Flags
    constants: Mapping[str, float] = field(default_factory=dict)
    objectives: JudgedObjectives = field(default_factory=lambda: judged_objectives(None))

    def rule(self, clause: Clause) -> Compiled:
        unknown: dict[str, None] = {}
        query = self._clause(clause, unknown)
        return Compiled(query, tuple(unknown))

    def signal(self, name: str) -> str | None:
        """A signal's query; None where the server lacks its metrics."""
        return self._text(SIGNALS[name])

    def _text(self, signal: Signal) -> str | None:
        texts = [f"({self.promql.text(node)})" for node in self._sources(signal)]
        return f"({' or '.join(texts)})" if len(texts) > 1 else next(iter(texts), None)

    def metrics(self, clause: Clause) -> set[str]:
        """Catalog keys that a rule's signals read, and the figures of its objectives."""
        signals = [SIGNALS[name] for name in clause.names if name in SIGNALS]
        signals += [figure for name in clause.names for _, figure in self._bounds(name)]
        return set().union(*(metrics_of(node) for signal in signals for node in self._sources(signal)))

    def _sources(self, signal: Signal) -> list[Node]:
        """The first source whose metrics the server has. Where that is unknown, those before the first that
        every server has, too."""
        usable = [node for node in signal.sources if all(map(self._has, metrics_of(node)))]
        blind = self.promql.available is None
        optional = len(list(takewhile(lambda node: blind and metrics_of(node) & OPTIONAL, usable)))
        return usable[: optional + 1]

    def _has(self, key: str) -> bool:
        available = self.promql.available
        suffix = "_count" if METRICS[key].kind == "histogram" else ""
        return available is None or any(name + suffix in available for name in METRICS[key].names)

    def _clause(self, clause: Clause, unknown: dict[str, None]) -> PromCondition | None:
        if isinstance(clause, Relation):
            return self._comparison(clause, unknown)
        parts = [self._clause(part, unknown) for part in clause.parts]
        every = isinstance(clause, All)
        if (not every) in parts:  # one False decides "and", one True decides "or"
            return not every
        texts = [part for part in parts if isinstance(part, str)]
        if None in parts and (every or not texts):
            return None
        if not texts:
            return every
        word = "and" if every else "or"
        return texts[0] if len(texts) == 1 else f"({f' {word} '.join(texts)})"

    def _comparison(self, comparison: Relation, unknown: dict[str, None]) -> PromCondition | None:
        left, right = self._value(comparison.left, unknown), self._value(comparison.right, unknown)
        if left is None or right is None:
            return None
        sign = comparison.operator
        if isinstance(left, float):
            if isinstance(right, float):
                return _TRUTH[sign](left, right)
            left, sign, right = right, _MIRRORED[sign], left
        if isinstance(right, float):
            if math.isinf(right):
                return (right > 0) == (sign in ("<", "<="))
            return f"({left} {sign} {_number(right)})"
        return f"({left} {sign} {right})"

    def _value(self, expression: Expression, unknown: dict[str, None]) -> Value | None:
        return self._node(expression.tree, unknown)

    def _node(self, node: ast.expr, unknown: dict[str, None]) -> Value | None:
        match node:
            case ast.Constant(value=int() | float() as value):
                return float(value)
            case ast.Name(id=name):
                found = self._name(name)
                if found is None:
                    unknown[name] = None
                return found
            case ast.UnaryOp(operand=operand):
                inner = self._node(operand, unknown)
                return -inner if isinstance(inner, float) else inner and f"(-1 * {inner})"
            case ast.Call(func=ast.Name(id=name), args=args):
                values = [self._node(argument, unknown) for argument in args]
                return _extreme(name, values)
            case ast.BinOp(left=left, op=op, right=right):
                return _arithmetic(self._node(left, unknown), _SIGNS[type(op)], self._node(right, unknown))
        raise AssertionError(ast.dump(node))  # the language's whitelist let it pass

    def _name(self, name: str) -> Value | None:
        if name in SIGNALS:
            return self.signal(name)
        if (now := name.removeprefix(BASELINE)) != name:
            return self._a_week_ago().signal(now) if now in SIGNALS else None
        if name in MISSED:
            beyond = [self._beyond(bound, figure) for bound, figure in self._bounds(name)]
            return _extreme("max", beyond) if beyond else 0.0
        if name in self.constants:
            return float(self.constants[name])
        reading = self.flags.reading(name)
        if isinstance(reading, Number) and (reading.exact or self.flags.known[name].certain):
            return float(reading.point)
        return self._drafts() if name == "num_speculative_tokens" else None

    def _a_week_ago(self) -> RuleCompiler:
        return replace(self, promql=replace(self.promql, offset_ms=self.promql.offset_ms + WEEK_MS))

    def _bounds(self, name: str) -> list[tuple[Bound, Signal]]:
        """The objectives that a name of :data:`MISSED` stands for, with their figures."""
        own = [bound for bound in self.objectives.bounds if family_of(bound.metric) in MISSED.get(name, ())]
        return [(bound, figure) for bound in own if (figure := figure_of(bound.metric)) is not None]

    def _beyond(self, bound: Bound, figure: Signal) -> str | None:
        """1 for the engines that miss an objective, by the interpolated quantile; a rate only where requests
        wait."""
        text, waiting = self._text(figure), self.signal("waiting_mean")
        if bound.op == "<=" or text is None:
            return text and f"({text} > bool {bound.limit:.10g})"
        return waiting and f"(({text} < bool {bound.limit:.10g}) * ({waiting} >= bool 1))"

    def _drafts(self) -> Value | None:
        """The speculative families exist only while speculation is on."""
        drafted = self.signal("tokens_drafted_per_draft")
        if drafted is None:
            return 0.0
        running = self.signal("running_last")
        return running and f"(ceil({drafted}) or 0 * {running})"


def _arithmetic(left: Value | None, sign: str, right: Value | None) -> Value | None:
    if left is None or right is None:
        return None
    if isinstance(left, float) and isinstance(right, float):
        match sign:
            case "+":
                return left + right
            case "-":
                return left - right
            case "*":
                return left * right
        return left / right if right else None
    if isinstance(left, str) and isinstance(right, str):
        return f"({left} {sign} {right})"
    return f"({_number(left)} {sign} {_number(right)})"


def _extreme(name: str, values: Sequence[Value | None]) -> Value | None:
    """``min`` or ``max``; PromQL has them for a vector and a constant, two vectors are compared."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    pick = min if name == "min" else max
    constants = [value for value in known if isinstance(value, float)]
    vectors = [value for value in known if isinstance(value, str)]
    if not vectors:
        return pick(constants)
    sign, beyond, clamp = ("<=", "<", "clamp_max") if name == "min" else (">=", ">", "clamp_min")
    joined = vectors[0]
    for vector in vectors[1:]:
        joined = f"(({joined} {sign} {vector}) or ({vector} {beyond} {joined}))"
    return f"{clamp}({joined}, {_number(pick(constants))})" if constants else joined


def _number(value: Value) -> str:
    if isinstance(value, str):
        return value
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.10g}"
