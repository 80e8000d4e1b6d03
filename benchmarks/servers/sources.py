"""Python source of a wheel as text: its classes, constants and calls. Nothing of it is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = object()
"""An expression that is no constant."""
MAX_DEPTH = 20
"""Of names that stand for names."""


@dataclass(frozen=True)
class Field:
    """Of a dataclass. ``annotation``: as written; ``default``: None where there is none."""

    name: str
    annotation: ast.expr
    default: ast.expr | None


@dataclass
class Sources:
    """Every file of a wheel, parsed. Names are taken to be unique in it: the first definition counts."""

    trees: dict[str, ast.Module] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    names: dict[str, ast.expr] = field(default_factory=dict)
    """What is assigned to a name at the top of a file."""

    @classmethod
    def of(cls, files: Mapping[str, str]) -> Sources:
        found = cls()
        for path, text in sorted(files.items()):
            tree = found.trees[path] = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found.classes.setdefault(node.name, node)
            for name, value in _assignments(tree.body):
                found.names.setdefault(name, value)
        return found

    def fields(self, name: str) -> dict[str, Field]:
        """Of a dataclass and those that it inherits from, by name."""
        found: dict[str, Field] = {}
        node = self.classes.get(name)
        if node is None:
            return found
        for base in reversed(node.bases):
            found |= self.fields(ast.unparse(base).rpartition(".")[2])
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                found[item.target.id] = Field(item.target.id, item.annotation, item.value)
        return found

    def value(
        self, node: ast.expr | None, local: Mapping[str, ast.expr] | None = None, depth: int = 0
    ) -> Any:
        """What an expression is, as far as constants say; UNKNOWN where they do not."""
        if node is None or depth > MAX_DEPTH:
            return UNKNOWN
        local = local or {}

        def inner(part: ast.expr) -> Any:
            return self.value(part, local, depth + 1)

        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                spread = [
                    inner(part.value) if isinstance(part, ast.Starred) else [inner(part)] for part in parts
                ]
                if any(values is UNKNOWN or UNKNOWN in values for values in spread):
                    return UNKNOWN
                return [value for values in spread for value in values]
            case ast.Dict(keys=[], values=[]):
                return {}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = inner(operand)
                return -value if isinstance(value, int | float) else UNKNOWN
            case ast.BinOp(left=left, op=operator, right=right):
                return _combined(inner(left), operator, inner(right))
            case ast.Name(id=name) if name in local:
                return self.value(local[name], {k: v for k, v in local.items() if k != name}, depth + 1)
            case ast.Name(id=name) if name in self.names:
                return self.value(self.names[name], {}, depth + 1)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in self.classes:
                known = self.fields(owner).get(name)
                return self.value(known.default if known else self._member(owner, name), {}, depth + 1)
            case ast.Attribute(attr="value", value=whole):  # of a member of an enumeration
                return inner(whole)
            case ast.Call(
                func=ast.Name(id="field" | "Field") | ast.Attribute(attr="field"), keywords=given, args=args
            ):
                options = {word.arg: word.value for word in given}
                if "default" in options or args:
                    return inner(options.get("default") or args[0])
                factory = options.get("default_factory")
                made = ast.unparse(factory) if factory is not None else ""
                return {"list": [], "dict": {}, "set": []}.get(made.partition("[")[0], UNKNOWN)
            case ast.Call(func=ast.Name(id="list" | "tuple" | "sorted"), args=[only]):
                return inner(only)
            case ast.Call(func=ast.Name(id="get_args"), args=[alias]):
                return self.choices(alias)
        return UNKNOWN

    def choices(self, annotation: ast.expr | None, depth: int = 0) -> Any:
        """The words that a ``Literal`` allows, through aliases and unions; UNKNOWN where it is none."""
        if annotation is None or depth > MAX_DEPTH:
            return UNKNOWN
        match annotation:
            case ast.Constant(value=str(text)):
                return self.choices(ast.parse(text, mode="eval").body, depth + 1)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=inside):
                return self.value(
                    inside if isinstance(inside, ast.Tuple) else ast.Tuple([inside], ast.Load())
                )
            case ast.Subscript(value=ast.Name(id="Optional" | "Annotated" | "A"), slice=inside):
                first = inside.elts[0] if isinstance(inside, ast.Tuple) else inside
                return self.choices(first, depth + 1)
            case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
                return self._any_choices(parts, depth)
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                return self._any_choices([left, right], depth)
            case ast.Name(id=name) if name in self.names:
                return self.choices(self.names[name], depth + 1)
        return UNKNOWN

    def _any_choices(self, parts: list[ast.expr], depth: int) -> Any:
        found = [choices for part in parts if (choices := self.choices(part, depth + 1)) is not UNKNOWN]
        return [choice for choices in found for choice in choices] if found else UNKNOWN

    def _member(self, owner: str, name: str) -> ast.expr | None:
        """What a class assigns to a name without an annotation, as an enumeration does."""
        return dict(_assignments(self.classes[owner].body)).get(name)


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for item in body:
        match item:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value
            case ast.If(body=inside) | ast.Try(body=inside):
                yield from _assignments(inside)


def _combined(left: Any, operator: ast.operator, right: Any) -> Any:
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    try:
        match operator:
            case ast.Add():
                return left + right
            case ast.Mult():
                return left * right
            case ast.Sub():
                return left - right
            case ast.Div():
                return left / right
            case ast.LShift():
                return left << right
            case ast.Pow():
                return left**right
    except (TypeError, ZeroDivisionError, OverflowError):
        return UNKNOWN
    return UNKNOWN


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {word.arg: word.value for word in call.keywords if word.arg}


def local_names(function: ast.AST) -> dict[str, ast.expr]:
    """What is assigned to a name within a function. Of several the last counts: a default stands in the last
    branch."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                found[name] = value
    return found
