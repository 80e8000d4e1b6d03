"""Where a command is written down that starts a server: Compose, Kubernetes and Helm YAML, a JSON list of
arguments, a systemd unit."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from servers.flags.words import FlagError, one_line_each, render, vocabulary

_YAML = re.compile(r"\s*(---|-\s|\[|[\w.-]+:(\s|$))")
"""How a document begins that is no command line."""
_EXEC = re.compile(r"^ExecStart=[-@:+!]*(.*)$", re.MULTILINE)
_ENVIRONMENT = re.compile(r"^Environment=(.*)$", re.MULTILINE)
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_ARGUMENTS = ("entrypoint", "command", "args")
"""In the order in which a container runtime puts them together."""
_MORE = ("extraArgs", "extra_args", "additionalArgs")


@dataclass(frozen=True)
class Launch:
    """``words``: without the image, which is "" where there is none. ``name``: of the service, for people."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    image: str = ""
    name: str = ""


def read_launches(text: str) -> list[Launch] | None:
    """What a document starts; None for text that is a command line. Raises FlagError."""
    text = one_line_each(text)
    if unit := _EXEC.search(text):
        lines = " ".join(_ENVIRONMENT.findall(text))
        pairs = (item.partition("=") for item in shlex.split(lines))
        return [Launch(_split(unit[1]), {name: value for name, _, value in pairs})]
    first = next((line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"), "")
    if not _YAML.match(first):
        return None
    import yaml

    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise FlagError(f"neither a command nor YAML: {str(error).splitlines()[0]}") from None
    if all(isinstance(item, list) and all(isinstance(word, str) for word in item) for item in documents):
        return [Launch(list(item)) for item in documents if item]
    return list(_launches(documents, "", _container)) or list(_launches(documents, "", _values))


def _launches(
    node: Any, name: str, read: Callable[[Mapping[str, Any], str], Launch | None]
) -> Iterator[Launch]:
    """What ``read`` makes of the outermost mappings that it takes for a launch. ``name``: of the node."""
    if isinstance(node, list):
        for item in node:
            yield from _launches(item, name, read)
    elif isinstance(node, Mapping):
        if (launch := read(node, name)) is not None:
            yield launch
        else:
            for key, item in node.items():
                yield from _launches(item, str(key), read)


def _container(node: Mapping[str, Any], name: str) -> Launch | None:
    """One with a command or arguments."""
    parts: list[Any] = [part for key in _ARGUMENTS if _is_words(part := node.get(key))]
    if not parts:
        return None
    words = [word for part in parts for word in _split(part)]
    own = str(node.get("name") or node.get("container_name") or name)
    return Launch(words, _environment(node), str(node.get("image") or ""), own)


def _values(node: Mapping[str, Any], name: str) -> Launch | None:
    """One of a chart's values that holds flags under their own names, as ``maxNumSeqs: 32``."""
    known = vocabulary("vllm").kinds
    flags = {
        flag: value
        for key, value in node.items()
        if (flag := _CAMEL.sub(r"_\1", str(key)).lower().replace("-", "_")) in known
        and isinstance(value, str | int | float | bool)
    }
    more = [word for key in _MORE if _is_words(node.get(key)) for word in _split(node[key])]
    if more or (flags and any(_CAMEL.search(str(key)) for key in node)):
        return Launch([*render(flags), *more], _environment(node), name=name)
    return None


def _is_words(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(word, str | int | float) for word in value)
    )


def _split(value: str | list[Any]) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    try:
        return shlex.split(value)
    except ValueError as error:
        raise FlagError(f"the command's quotes do not match ({error}): {value[:200]}") from None


def _environment(node: Mapping[str, Any]) -> dict[str, str]:
    """Of Compose's ``environment``, as a mapping or a list, and Kubernetes' ``env``."""
    found: dict[str, str] = {}
    for given in (node.get("environment"), node.get("env")):
        if isinstance(given, Mapping):
            found |= {str(name): str(value) for name, value in given.items()}
        for item in given if isinstance(given, list) else ():
            if isinstance(item, str):
                name, _, value = item.partition("=")
                found[name] = value
            elif isinstance(item, Mapping) and "value" in item:
                found[str(item.get("name"))] = str(item["value"])
    return found
