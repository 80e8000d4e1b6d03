"""The rules' little language: numbers, names, ``+ - * /``, ``min``, ``max``, one comparison.

Parsed with ``ast`` against a whitelist and never executed as Python. It has two evaluators. Over readings
(``value``, ``judge``) it is three-valued: true, false, or cannot tell, with the names that stand in the way.
Over plain numbers (``on_numbers``) it is closures, for a search that asks thousands of times.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from servers.errors import UserError
from servers.reading import Missing, Number, Reading

Lookup = Callable[[str], Reading]
Numbers = Mapping[str, float]

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_CALLS: Mapping[str, Callable[[Number, Number], Number]] = {"min": Number.minimum, "max": Number.maximum}
_COMPARISONS = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "=="}
_NUMBER_CALLS: Mapping[str, Callable[..., float]] = {"min": min, "max": max}
_NUMBER_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}


class ExpressionError(UserError):
    """Text outside the language. The message says which part, and what is allowed."""


@dataclass(frozen=True)
class Expression:
    """Arithmetic over names. ``text`` is as written, ``tree`` its whitelisted syntax tree."""

    text: str
    tree: ast.expr

    @property
    def names(self) -> frozenset[str]:
        return _names(self.tree)

    def value(self, lookup: Lookup) -> Number | tuple[Missing, ...]:
        """The number, or everything that is missing for it."""
        missing: list[Missing] = []
        number = _value(self.tree, lookup, missing)
        return tuple(missing) if number is None else number

    def on_numbers(self) -> Callable[[Numbers], float]:
        """The value of given numbers, as a function that raises KeyError for a name that is missing, and
        ZeroDivisionError."""
        return _closure(self.tree)


@dataclass(frozen=True)
class Relation:
    """``left operator right``."""

    text: str
    left: Expression
    operator: str
    right: Expression

    @property
    def names(self) -> frozenset[str]:
        return self.left.names | self.right.names

    def judge(self, lookup: Lookup) -> Truth:
        """True or false where the values' ranges decide it, else cannot tell."""
        left, right = self.left.value(lookup), self.right.value(lookup)
        if isinstance(left, Number) and isinstance(right, Number):
            answer = _compare(left, self.operator, right)
            return Truth(answer, () if answer is not None else _inexact(self.names, lookup))
        missing = [part for part in (left, right) if not isinstance(part, Number)]
        return Truth(None, tuple(dict.fromkeys(item for part in missing for item in part)))

    def on_numbers(self) -> Callable[[Numbers], bool]:
        """Whether it holds of given numbers, as a function that raises as that of an expression does."""
        left, right = self.left.on_numbers(), self.right.on_numbers()
        compare = _NUMBER_COMPARISONS[self.operator]
        return lambda numbers: compare(left(numbers), right(numbers))


@dataclass(frozen=True)
class Truth:
    """``value`` None is "cannot tell", because of ``missing``."""

    value: bool | None
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True)
class All:
    """Every part holds."""

    parts: tuple[Clause, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(part.names for part in self.parts))

    def judge(self, lookup: Lookup) -> Truth:
        return _join([part.judge(lookup) for part in self.parts], decisive=False)


@dataclass(frozen=True)
class AnyOf:
    """At least one part holds."""

    parts: tuple[Clause, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(part.names for part in self.parts))

    def judge(self, lookup: Lookup) -> Truth:
        return _join([part.judge(lookup) for part in self.parts], decisive=True)


Clause = Relation | All | AnyOf


def without(clause: Clause, absent: Collection[str]) -> Clause | None:
    """``clause`` without the branches that ask for one of these names; None where it cannot do without."""
    if isinstance(clause, Relation):
        return clause if clause.names.isdisjoint(absent) else None
    kept = tuple(part for whole in clause.parts if (part := without(whole, absent)) is not None)
    if isinstance(clause, All):
        return All(kept) if len(kept) == len(clause.parts) else None
    return AnyOf(kept) if kept else None


def parse_expression(text: str) -> Expression:
    """Raises ExpressionError."""
    tree = _parse(text)
    _check(tree, text)
    return Expression(text, tree)


def parse_comparison(text: str) -> Relation:
    """Raises ExpressionError."""
    tree = _parse(text)
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        raise ExpressionError(f"{text!r}: write one comparison, such as itl_p99 > 4 * itl_p50")
    sign = _COMPARISONS.get(type(tree.ops[0]))
    if sign is None:
        raise ExpressionError(f"{text!r}: only > >= < <= == compare")
    for side in (tree.left, tree.comparators[0]):
        _check(side, text)
    left, right = (
        Expression(ast.get_source_segment(text.strip(), side) or text, side)
        for side in (tree.left, tree.comparators[0])
    )
    return Relation(text.strip(), left, sign, right)


def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError(f"{text!r}: not an expression ({error})") from None


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Name():
            pass
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _check(left, text)
            _check(right, text)
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as args, keywords=[]) if name in _CALLS:
            for argument in args:
                _check(argument, text)
        case _:
            part = ast.unparse(node)
            raise ExpressionError(f"{text!r}: {part!r} is not allowed; use numbers, names, + - * /, min, max")


def _names(node: ast.expr) -> frozenset[str]:
    match node:
        case ast.Name(id=name):
            return frozenset([name])
        case ast.Call(args=args):
            return frozenset().union(*map(_names, args))
        case ast.UnaryOp(operand=operand):
            return _names(operand)
        case ast.BinOp(left=left, right=right):
            return _names(left) | _names(right)
    return frozenset()


def _value(node: ast.expr, lookup: Lookup, missing: list[Missing]) -> Number | None:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Number.exactly(float(value))
        case ast.Name(id=name):
            reading = lookup(name)
            if isinstance(reading, Missing):
                missing.append(reading)
                return None
            return reading
        case ast.UnaryOp(operand=operand):
            inner = _value(operand, lookup, missing)
            return None if inner is None else -inner
        case ast.Call(func=ast.Name(id=name), args=args):
            values = [_value(argument, lookup, missing) for argument in args]
            found = [value for value in values if value is not None]
            return reduce(_CALLS[name], found) if len(found) == len(values) else None
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, lookup, missing), _value(right, lookup, missing)
            if a is None or b is None:
                return None
            try:
                return _ARITHMETIC[type(op)](a, b)
            except ZeroDivisionError:
                missing.append(Missing(ast.unparse(right), "empty", "is 0, nothing can be divided by it"))
                return None
    raise AssertionError(ast.dump(node))  # the whitelist let it pass


def _closure(node: ast.expr) -> Callable[[Numbers], float]:
    match node:
        case ast.Constant(value=int() | float() as value):
            constant = float(value)
            return lambda numbers: constant
        case ast.Name(id=name):
            return lambda numbers: numbers[name]
        case ast.UnaryOp(operand=operand):
            inner = _closure(operand)
            return lambda numbers: -inner(numbers)
        case ast.Call(func=ast.Name(id=name), args=args):
            call, parts = _NUMBER_CALLS[name], [_closure(argument) for argument in args]
            return lambda numbers: call(*(part(numbers) for part in parts))
        case ast.BinOp(left=left, op=op, right=right):
            a, b, join = _closure(left), _closure(right), _ARITHMETIC[type(op)]
            return lambda numbers: join(a(numbers), b(numbers))
    raise AssertionError(ast.dump(node))  # the whitelist let it pass


def _compare(left: Number, sign: str, right: Number) -> bool | None:
    match sign:
        case ">":
            return left.exceeds(right)
        case "<":
            return right.exceeds(left)
        case ">=":
            below = right.exceeds(left)
            return None if below is None else not below
        case "<=":
            above = left.exceeds(right)
            return None if above is None else not above
    if left.exact and right.exact:
        return left.point == right.point
    return False if left.exceeds(right) or right.exceeds(left) else None


def _inexact(names: frozenset[str], lookup: Lookup) -> tuple[Missing, ...]:
    """The names whose ranges left a comparison undecided."""
    vague = []
    for name in sorted(names):
        reading = lookup(name)
        if isinstance(reading, Number) and not reading.exact:
            span = f"somewhere in [{reading.low:g}, {reading.high:g}]"
            why = f"not given ({span}); pass --flags or --log" if reading.vague == "flag" else span
            vague.append(Missing(name, reading.vague, why))
    return tuple(vague)


def _join(truths: list[Truth], *, decisive: bool) -> Truth:
    """Kleene's and (decisive=False), or (decisive=True)."""
    if any(truth.value is decisive for truth in truths):
        return Truth(decisive)
    missing = tuple(dict.fromkeys(item for truth in truths for item in truth.missing))
    if any(truth.value is None for truth in truths):
        return Truth(None, missing)
    return Truth(not decisive)
