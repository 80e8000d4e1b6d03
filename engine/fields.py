"""JSON objects from outside, checked against msgspec Structs. What is wrong is told by field, rule and value.

A field's rule is the ``description`` of its :class:`msgspec.Meta`, and for plain types is in ``_RULES``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from engine.errors import EngineUserError

S = TypeVar("S", bound=Struct)
INT64 = 1 << 63
Integer = Annotated[int, Meta(ge=-INT64, le=INT64 - 1, description="must be an integer")]
NaturalNumber = Annotated[int, Meta(ge=0, le=INT64 - 1, description="must be an integer of at least 0")]
PositiveInteger = Annotated[int, Meta(ge=1, le=INT64 - 1, description="must be an integer of at least 1")]
_RULES = {bool: "must be true or false", str: "must be a string", float: "must be a number"}
MAX_SHOWN_CHARACTERS = 40
"""Of a refused value that the message repeats."""


class FieldError(EngineUserError):
    """A field breaks its rule. ``path`` is its name, with those around it: ``outer.inner[3]``."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}".lstrip())
        self.path = path

    @classmethod
    def of(cls, path: str, rule: str, value: object) -> FieldError:
        return cls(path, f"{rule}, got {describe(value)}")


def read_fields(value: object, kind: type[S]) -> S:
    """``value``, the decoded JSON, as a Struct. Raises FieldError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), value, kind) from None


def describe(value: object) -> str:
    """A value for a message, cut where it is long."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    shown = value[: MAX_SHOWN_CHARACTERS + 1] if isinstance(value, str) else value
    text = json.dumps(shown, default=str)  # YAML has dates, too
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def _explain(message: str, value: Any, kind: Any) -> FieldError:
    """msgspec's message, which ends with the path, in terms of the fields."""
    if " - at `key`" in message:
        return FieldError("", "keys must be strings")
    what, _, path = message.partition(" - at `$")
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        if name:
            value, kind = value[name], _types(kind)[name]
        else:
            items = next(get_args(part) for part in _parts(kind) if _is_list(part))
            value, kind = value[int(index)], items[0]
    path = path.removesuffix("`").removeprefix(".")
    if missing := re.match("Object missing required field `(.*)`", what):
        return FieldError(f"{path}.{missing[1]}".removeprefix("."), "is missing")
    if unknown := re.match("Object contains unknown field `(.*)`", what):
        return FieldError(path, f"unknown key {describe(unknown[1])}; known are {', '.join(_types(kind))}")
    rule = "must be below 2**63" if what.endswith(f"<= {INT64 - 1}") else _rule(kind)
    return FieldError.of(path, rule, value)


def _rule(kind: Any) -> str:
    parts = list(_parts(kind))
    for part in parts:
        if isinstance(part, Meta) and part.description:
            return part.description
    if any(map(_is_list, parts)):
        return "must be a list"
    return next((_RULES[part] for part in parts if part in _RULES), "must be an object")


def _types(kind: Any) -> dict[str, Any]:
    """Field types of the Struct that ``kind`` is, or may be."""
    struct = next(part for part in _parts(kind) if isinstance(part, type) and issubclass(part, Struct))
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def _parts(kind: Any) -> Iterator[Any]:
    """``kind``, and what an Annotated or a union consists of, the outermost Meta first."""
    yield kind
    if get_origin(kind) in (Annotated, Union, UnionType):
        for part in reversed(get_args(kind)):
            yield from _parts(part)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple)
