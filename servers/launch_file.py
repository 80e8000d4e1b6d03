"""Where a command is written down that starts a server: Compose, Kubernetes, Helm, KServe and Ray YAML, JSON,
units of systemd and programs of supervisord."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from servers.flags.words import FlagError, render, vocabulary
from servers.shell_words import expanded, split_words

_YAML = re.compile(r"\s*(---|-\s|\[|\{|[\w.-]+:(\s|$))")
"""How a document begins that is no command line."""
_UNIT = re.compile(r"^(ExecStart|Environment)=[-@:+!|]*((?:\\\n|.)*)$", re.MULTILINE)
_PROGRAM = re.compile(r"^\[program:([^\]]+)\]$(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
_KEY = re.compile(r"^(command|environment)\s*=((?:[^\n]|\n[ \t]+(?=\S))*)$", re.MULTILINE)
_SETTING = re.compile(r"""([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^,\s]*)""")
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_KUBERNETES = re.compile(r"\$\((\w+)\)")
_SUPERVISED = re.compile(r"%\(ENV_(\w+)\)s")
_CONTINUED = re.compile(r"\\[ \t]*\n|\\\s+(?=-)")
"""Also where YAML has folded the lines into one."""
_SCRIPT = re.compile(r"\b(vllm|sglang|vtune|lmdeploy)\b[^\n]*\bserve\b|-m\s+(vllm|sglang)\.")
_VARIABLES = ("environment", "env", "envs", "variables")
_ARGUMENTS = ("entrypoint", "command", "args")
"""In the order in which a container runtime puts them together."""
_MORE = re.compile(
    r"((extra|additional|more|server|engine|vllm|sglang)_)+(args?|arguments|flags|cli_args)|cli_args|flags"
)
"""Names, in snake case, of what charts append to the arguments."""
_FROM_VARIABLES = re.compile(r"SM_[A-Z]+_")


@dataclass(frozen=True)
class Launch:
    """``words``: without the image, which is "" where there is none. ``name``: of the service, for people."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    image: str = ""
    name: str = ""


def read_launches(text: str) -> list[Launch] | None:
    """What a document starts; None for text that is a command line. Raises FlagError."""
    text = text.replace("\r\n", "\n")
    if re.search(r"^ExecStart=", text, re.MULTILINE):
        return list(_units(text))
    if programs := _PROGRAM.findall(text):
        return [launch for name, section in programs for launch in _program(name, section)]
    first = next((line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"), "")
    if not _YAML.match(first):
        return None
    documents = _documents(text)
    if all(isinstance(item, list) and all(isinstance(word, str) for word in item) for item in documents):
        return [Launch([_filled(word, {}) for word in item]) for item in documents if item]
    return list(_launches(documents, ""))


def _documents(text: str) -> list[Any]:
    import yaml

    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        if "{{" in text:
            raise FlagError("a template: give what it becomes, as 'helm template' prints it") from None
        raise FlagError(f"neither a command nor YAML: {str(error).splitlines()[0]}") from None


def _units(text: str) -> Iterator[Launch]:
    """Of systemd: an empty ``ExecStart=`` undoes those before it."""
    env: dict[str, str] = {}
    started: list[str] = []
    for key, value in _UNIT.findall(text):
        if key == "ExecStart":
            started = [*started, value] if value.strip() else []
        else:
            pairs = (word.partition("=") for word in _split(value))
            env |= {name: given for name, _, given in pairs}
    for line in started:
        own, words = split_words(line, env)
        yield Launch(words, {**env, **own})


def _program(name: str, section: str) -> Iterator[Launch]:
    """Of supervisord, which expands ``%(ENV_X)s`` and nothing else."""
    keys = {key: re.sub(r"\s;.*", "", value).strip() for key, value in _KEY.findall(section)}
    env = {found[1]: found[2].strip("\"'") for found in _SETTING.finditer(keys.get("environment", ""))}
    if command := keys.get("command"):
        yield Launch(_split(_SUPERVISED.sub(lambda found: _known(found, env), command)), env, name=name)


def _launches(node: Any, name: str) -> Iterator[Launch]:
    """Those of the outermost mappings that start something. ``name``: of the node."""
    if isinstance(node, list):
        for item in node:
            yield from _launches(item, name)
    elif isinstance(node, Mapping):
        if (launch := _container(node, name) or _values(node, name)) is not None:
            if other := next(_flags_within(node), None):
                raise FlagError(
                    f"flags stand in {name or 'the document'} and in {other} within it: give one command "
                    "with all of them"
                )
            yield launch
            return
        for key, item in node.items():
            if isinstance(item, str) and _SCRIPT.search(item):
                yield Launch(["bash", "-c", item], _environment(node), name=str(key))
            elif _is_words(item) and _SCRIPT.search("\n".join(map(str, item))):
                yield Launch(["bash", "-c", "\n".join(map(str, item))], _environment(node), name=str(key))
            else:
                yield from _launches(item, str(key))


def _flags_within(node: Mapping[str, Any]) -> Iterator[str]:
    """Names of mappings below that hold flags by their names."""
    for key, item in node.items():
        if isinstance(item, Mapping) and not (_is_flag(key) or _MORE.fullmatch(_snake(key))):
            if _values(item, "") is not None:
                yield str(key)
            yield from _flags_within(item)


def _container(node: Mapping[str, Any], name: str) -> Launch | None:
    """One with a command or arguments, or with variables that its image makes flags of."""
    own = {str(key).lower(): item for key, item in node.items()}
    env, image = _environment(node), own.get("image")
    if isinstance(image, Mapping):
        image = ":".join(str(image[key]) for key in ("repository", "tag") if image.get(key))
    parts: list[Any] = [part for key in _ARGUMENTS if _is_words(part := own.get(key))]
    if not parts and not (image and any(map(_FROM_VARIABLES.match, env))):
        return None
    for key in _ARGUMENTS:
        if isinstance(own.get(key), list) and not _is_words(own[key]):
            raise FlagError(f"{key}: an item is no text: write each flag and each value in quotes")
    in_cluster = any(isinstance(item, Mapping) for item in _listed(own.get("env")))
    words = [_filled(word, env) for word in (*chain.from_iterable(map(_split, parts)), *_more_words(node))]
    if not in_cluster:
        words = [expanded(word, {}) for word in words]
    return Launch(words, env, str(image or ""), str(own.get("name") or own.get("container_name") or name))


def _values(node: Mapping[str, Any], name: str) -> Launch | None:
    """One of a chart's values, or of Ray's, that holds flags under their names, as ``maxNumSeqs: 32``."""
    flags = {
        flag: value
        for key, value in node.items()
        if _nearly_flag(flag := _snake(key), value) or _is_flag(key)
    }
    more = _more_words(node)
    if more or any("_" in flag for flag in flags):
        return Launch([*render(flags), *more], _environment(node), name=name)
    return None


def _more_words(node: Mapping[str, Any]) -> list[str]:
    """What a chart appends, as words or as a mapping of flags."""
    words: list[str] = []
    for key, value in node.items():
        if _MORE.fullmatch(_snake(key)):
            if _is_words(value):
                words += _split(value)
            elif isinstance(value, Mapping):
                words += render({_snake(flag): item for flag, item in value.items()})
    return words


def _snake(key: Any) -> str:
    return _CAMEL.sub(r"_\1", str(key)).lower().replace("-", "_")


def _is_flag(key: Any) -> bool:
    return _snake(key) in vocabulary("vllm").kinds


def _nearly_flag(flag: str, value: Any) -> bool:
    """A name that was meant for a flag's, which is refused as any misspelt one."""
    return isinstance(value, int | float) and bool(
        difflib.get_close_matches(flag, [known for known in vocabulary("vllm").kinds if "_" in known], 1, 0.8)
    )


def _is_words(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(word, str | int | float) for word in value)
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _split(value: str | list[Any]) -> list[str]:
    """As a container runtime does: no shell is involved, so ``>`` and ``|`` are words like others."""
    if isinstance(value, list):
        return [str(word) for word in value]
    try:
        return shlex.split(_CONTINUED.sub(" ", value))
    except ValueError as error:
        raise FlagError(f"the command's quotes do not match ({error}): {value[:200]}") from None


def _filled(word: str, env: Mapping[str, str]) -> str:
    """With ``$(NAME)`` filled in, as Kubernetes does."""
    return _KUBERNETES.sub(lambda found: _known(found, env), word)


def _known(found: re.Match[str], env: Mapping[str, str]) -> str:
    return env.get(found[1], f"${{{found[1]}}}")


def _environment(node: Mapping[str, Any]) -> dict[str, str]:
    """Of Compose's ``environment``, as a mapping or a list, Kubernetes' ``env`` and others'."""
    found: dict[str, str] = {}
    for key, given in node.items():
        if str(key).lower() not in _VARIABLES:
            continue
        if isinstance(given, Mapping):
            found |= {str(name): str(value) for name, value in given.items()}
        for item in _listed(given):
            if isinstance(item, str):
                name, _, value = item.partition("=")
                found[name] = value
            elif isinstance(item, Mapping) and "value" in item:
                found[str(item.get("name"))] = str(item["value"])
    return found
