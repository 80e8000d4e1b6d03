"""Spellings of vLLM's command line that the option parser does not have, rewritten to those that it has."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import typer
from typer.core import TyperCommand


class ServeCommand(TyperCommand):
    """``--speculative-config.method ngram`` for JSON options; ``--served-model-name a b`` for lists."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        json_flags = {flag for option in options if _takes_json(option) for flag in option.opts}
        list_flags = {
            flag for option in options if getattr(option, "multiple", False) for flag in option.opts
        }
        return super().parse_args(ctx, join_dotted(spread_lists(args, list_flags), json_flags))


def normalize(token: str) -> str:
    """vLLM takes --max_num_seqs for --max-num-seqs; what follows a dot is the key of a JSON object."""
    name, dot, key = token.partition(".")
    return f"{name.replace('_', '-')}{dot}{key}"


def spread_lists(args: list[str], flags: Collection[str]) -> list[str]:
    """``--name a b`` as ``--name a --name b``, for each of ``flags``."""
    spread: list[str] = []
    flag: str | None = None
    """The list option that takes further values, if one has its first value."""
    words = iter(args)
    for word in words:
        if word.startswith("-"):
            head, equals, _ = word.partition("=")
            flag = normalize(head) if normalize(head) in flags else None
            spread.append(word)
            if flag is not None and not equals:
                spread += [value for value in (next(words, None),) if value is not None]
        else:
            spread += [word] if flag is None else [flag, word]
    return spread


def join_dotted(args: list[str], flags: Collection[str]) -> list[str]:
    """``--config.key value``, for each of ``flags``, as one ``--config '{"key": value}'`` at the end.

    Keys may be nested, values are JSON or else text. A ``--config`` beside them is the object that they
    complete. Raises BadParameter.
    """
    objects: dict[str, dict[str, Any]] = {}
    whole: dict[str, str] = {}
    rest: list[str] = []
    for word, flag, path, value in _words(args, flags):
        if not flag:
            rest.append(word)
        elif path:
            _put(objects.setdefault(flag, {}), path.split("."), value, word)
        else:
            whole[flag] = value
    for flag, text in whole.items():
        if flag in objects:
            objects[flag] = {**_object(flag, text), **objects[flag]}
        else:
            rest += [flag, text]
    for flag, found in objects.items():
        rest += [flag, json.dumps(found)]
    return rest


def _words(args: list[str], flags: Collection[str]) -> Iterator[tuple[str, str, str, str]]:
    """Each word; for one of ``flags``, with its normal name, the path behind its first dot, and its value."""
    words = iter(args)
    for word in words:
        head, equals, value = word.partition("=")
        flag, _, path = normalize(head).partition(".")
        if flag not in flags:
            yield word, "", "", ""
            continue
        if not equals:
            try:
                value = next(words)
            except StopIteration:
                raise typer.BadParameter(f"{head} needs a value") from None
        yield word, flag, path, value


def _put(target: dict[str, Any], path: list[str], value: str, word: str) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise typer.BadParameter(f"{word}: {key} is an object here, and had a value before")
    try:
        target[path[-1]] = json.loads(value)
    except ValueError:
        target[path[-1]] = value


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{flag} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{flag} must be a JSON object")
    return value


def _takes_json(option: Any) -> bool:
    return getattr(option, "metavar", None) == "JSON"
