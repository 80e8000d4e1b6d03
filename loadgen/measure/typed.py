"""JSON back to the frozen dataclasses that it was written from, each value checked against its annotation."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Read = Callable[[Any, str], Any]
SHOWN = 40
"""Characters of a wrong value that a message repeats."""


def from_json(kind: type[T], value: Any, where: str) -> T:
    """An instance of the dataclass ``kind``. Raises ValueError; the message begins with ``where``.

    Knows int, float, str, bool, None and their unions, literals, enums by value, tuples, mappings, and
    dataclasses.
    """
    annotation: Any = kind
    made: T = _reader(annotation)(value, where)
    return made


@cache
def _reader(kind: Any) -> Read:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        return _union([_reader(argument) for argument in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return _sequence(_reader(arguments[0]))
    if origin is tuple:
        return _fixed([_reader(argument) for argument in arguments])
    if is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value, where: kind(value)
    return _plain(origin or kind)


def _plain(kind: Any) -> Read:
    """bool is no int here, and an int is a float."""
    accepted: Any = {float: (int, float), Mapping: dict}.get(kind, kind)

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{where} is {_shown(value)}")
        return value

    return read


def _literal(words: tuple[Any, ...]) -> Read:
    def read(value: Any, where: str) -> Any:
        if value not in words:
            raise ValueError(f"{where} is {_shown(value)}")
        return value

    return read


def _union(options: list[Read]) -> Read:
    def read(value: Any, where: str) -> Any:
        for option in options:
            try:
                return option(value, where)
            except ValueError:
                continue
        raise ValueError(f"{where} is {_shown(value)}")

    return read


def _sequence(item: Read) -> Read:
    def read(value: Any, where: str) -> Any:
        return tuple(item(part, where) for part in _list(value, where))

    return read


def _fixed(items: list[Read]) -> Read:
    def read(value: Any, where: str) -> Any:
        if len(_list(value, where)) != len(items):
            raise ValueError(f"{where} has {len(value)} items, not {len(items)}")
        return tuple(item(part, where) for item, part in zip(items, value, strict=True))

    return read


def _dataclass(kind: Any) -> Read:
    hints = get_type_hints(kind)
    readers = {f.name: _reader(hints[f.name]) for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {_shown(value)}")
        if missing := sorted(required - set(value)):
            raise ValueError(f"{where} lacks {missing[0]}")
        if unknown := sorted(set(value) - set(readers)):
            raise ValueError(f"{where} has an unknown {unknown[0]}")
        return kind(**{name: readers[name](part, f"{where}.{name}") for name, part in value.items()})

    return read


def _list(value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
