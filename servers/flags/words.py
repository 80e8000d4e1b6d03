"""Flags as words of a command line: read, typed by what a flag takes, and written back.

Names are vLLM's in snake case (``max_num_seqs``), values are typed (``12``, ``0.9``, ``True``, parsed JSON).
``None`` stands for "not given". The words are those of an argument vector (see :mod:`servers.shell_words`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

from servers.errors import UserError
from servers.facts import Flag, releases_of

Kind = Literal["switch", "int", "size", "float", "json", "text", "many"]


class FlagError(UserError):
    """A command line that cannot be read. The message says which word, why, and what to write."""


_OWN: dict[str, Kind] = {"device_memory": "int", "api_key": "text", "optimization_level": "int"}
"""What only the bundled engine has, and what is given as one word although its server takes several."""


@dataclass(frozen=True)
class Vocabulary:
    """The flags of a program, over all releases of it that are known."""

    kinds: Mapping[str, Kind]
    """What a flag's value is, as in the newest release that has it. Others are guessed from their text."""
    short: Mapping[str, str]
    """``tp`` -> ``tensor_parallel_size``."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Every long form that abbreviations may stand for -> its flag."""
    older: Mapping[str, str] = field(default_factory=dict)
    """Those that the release in question does not have."""


def _kind(spans: Sequence[tuple[str, str | None, Flag]]) -> Kind:
    """As in the newest release. A switch stays one: what only warns that it is deprecated takes no value."""
    kinds = [flag.kind for _, _, flag in spans]
    return cast("Kind", "switch" if "switch" in kinds and kinds[-1] == "text" else kinds[-1])


@cache
def vocabulary(server: str, version: str | None = None) -> Vocabulary:
    """Of a kind of server by its name, of one ``version`` (None: the newest). Where no releases of a server
    are known: vLLM's, without abbreviations."""
    releases = releases_of(server)
    if releases is None:
        known = vocabulary("vllm")
        return Vocabulary(known.kinds, known.short)
    kinds = {name: _kind(spans) for name, spans in releases.flags.items()} | _OWN
    short: dict[str, str] = {}
    spelled: dict[str, str] = {}
    older: dict[str, str] = {}
    for name, spans in releases.flags.items():
        has = spans[-1][1] is None if version is None else releases.flag(name, version) is not None
        for option in {f"--{name}", *(option for _, _, flag in spans for option in flag.options)}:
            if option.startswith("--"):
                form = option[2:].replace("-", "_")
                # Where two flags share a form, as two tables of SGLang do, it is the flag of that name.
                (spelled if has else older)[form] = form if form in kinds else name
            else:
                short[option[1:]] = name
    return Vocabulary(kinds, short, spelled, older)


_PARTS = {
    "spec_method": ("speculative_config", "method"),
    "spec_model": ("speculative_config", "model"),
    "spec_tokens": ("speculative_config", "num_speculative_tokens"),
}
"""Flags that are one key of a JSON flag."""
_SUFFIX = dict(
    zip("kmgtKMGT", [10**3, 10**6, 10**9, 10**12, 1 << 10, 1 << 20, 1 << 30, 1 << 40], strict=True)
)
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
UNKNOWN = re.compile(r"\$\{[^{}]*\}|\$\(|\{\{.*?\}\}|%[A-Z_]{2,}%|^\$\w+$", re.DOTALL)
"""What only a shell or a template can fill in: ``${SEQS}``, ``$(nproc)``, ``{{ .Values.seqs }}``."""
_OF_MODEL = re.compile(r"MODEL|CKPT|CHECKPOINT|WEIGHTS|REPO|PATH|DIR|NAME|HF|LLM|_ID\b|\b1\b", re.IGNORECASE)
_OF_FLAGS = re.compile(r"ARG|FLAG|OPT|PARAM|EXTRA|CMD|COMMAND|CONF|[@*]", re.IGNORECASE)
"""Names of variables that hold one thing, and such as may hold any number of flags."""
_NAMING = frozenset(
    [
        "model",
        "model_path",
        "tokenizer",
        "tokenizer_path",
        "revision",
        "served_model_name",
        "host",
        "port",
        "root_path",
        "uds",
        "api_key",
        "hf_token",
        "download_dir",
        "chat_template",
        "lora_modules",
        "lora_paths",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_ca_certs",
        "master_addr",
        "master_port",
        "node_rank",
        "dist_init_addr",
        "nccl_port",
        "data_parallel_address",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_rpc_port",
        "generation_config",
        "tool_parser_plugin",
        "otlp_traces_endpoint",
        "allowed_local_media_path",
    ]
)
"""Flags that say where or under which name, never how fast: what stands in a variable there may stay so."""
_PROSE = frozenset({"chat_template"})
"""Flags whose value is text of any kind."""
_DASHES = "‐‑‒–—―−"
_SEVERAL = re.compile(r"\s(--[A-Za-z]{2}|-(tp|pp|dp|ep)\b)")
"""A flag within a word."""


def render(flags: Mapping[str, Any], many: Collection[str] = ()) -> list[str]:
    """The flags as words for an argument vector, in the mapping's order.

    True becomes ``--flag``, False ``--no-flag``, None nothing, a mapping or list JSON (for a flag that takes
    several words, vLLM's or one of ``many``: those words). ``parse_command`` of the result gives them back.
    """
    words: list[str] = []
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(option if value else "--no-" + option[2:])
        elif (name in many or vocabulary("vllm").kinds.get(name) == "many") and isinstance(
            value, (list, tuple)
        ):
            words += [option, *map(str, value)]
        elif isinstance(value, (Mapping, list, tuple)):
            words += [option, json.dumps(value)]
        else:
            item = str(value)
            joined = not item or _is_flag(item)
            words += [f"{option}={item}"] if joined else [option, item]
    return words


def parse_flags(
    words: Sequence[str], table: Vocabulary, many: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """(flags by name, words that belong to no flag). ``table``: the program's flags. ``many``: more flags
    that take several words.

    Raises FlagError.
    """
    flags: dict[str, Any] = {}
    positional: list[str] = []
    for word in words:
        if word[:1] in _DASHES and word[1:].lstrip(_DASHES + "-")[:1].isalpha():
            raise FlagError(
                f"{word!r} begins with a typographic dash: write '--{word.lstrip(_DASHES + '-')}'"
            )
    pending = iter(_Words(words))
    for word in pending:
        if not _is_flag(word):
            positional.append(word)
            continue
        if joined := re.fullmatch(r"-([A-Za-z]+)(\d+|\{.*\})", word, re.DOTALL):  # -tp8, -O3, -O{…}
            level = joined[1] == "O" and joined[2].isdecimal()
            option = "--optimization-level" if level else f"-{joined[1]}"
            word = f"{option}={joined[2]}"
        written, has_value, text = word.partition("=")
        if re.search(r"\s", written):
            raise several(word)
        if UNKNOWN.search(written):
            raise FlagError(f"{word}: which flag it is, is not known here. Write it out")
        name, keys = _name(written, table)
        name = _whole(written, name, table)
        if name in _PARTS:
            name, key = _PARTS[name]
            keys = [key]
        if name.startswith("no_") and name not in table.kinds:
            if has_value:
                raise FlagError(f"{word}: takes no value. Write {written}")
            _store(flags, name[3:], keys, False)
            continue
        kind: Kind | None = "many" if name in many else table.kinds.get(name) if not keys else None
        values = [text] if has_value else pending.values(kind)
        _refuse_unclear(name, written, values)
        _store(flags, name, keys, _value(written, kind, values, name))
    return flags, positional


def _refuse_unclear(name: str, written: str, values: Sequence[str]) -> None:
    """A value that is not known and matters, or that holds flags of its own."""
    for at, text in enumerate(values if name not in _PROSE else ()):
        if text[:1] not in ("{", "[") and _SEVERAL.search(text):
            raise several(f"{written} {text}")
        if (unknown := _unknown(text)) and (name not in _NAMING or at or _OF_FLAGS.search(unknown)):
            raise FlagError(
                f"{written} {text}: what {unknown} stands for is not known here. Write the value itself, or "
                "set the variable in front of the command: X=64; vllm serve …"
            )


def _unknown(text: str) -> str | None:
    """What is not known of a value: in JSON, of the values in it."""
    try:
        leaves = [item for item in _leaves(json.loads(text)) if isinstance(item, str)]
    except json.JSONDecodeError:
        leaves = [text]
    return next((match[0] for item in leaves if (match := UNKNOWN.search(item))), None)


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping | list):
        for item in node.values() if isinstance(node, Mapping) else node:
            yield from _leaves(item)
    else:
        yield node


def model_of(word: str) -> str:
    """``word``, which stands where a model is named. Raises FlagError where it may be flags."""
    if _SEVERAL.search(word):
        raise several(word)
    match = UNKNOWN.search(word)
    if match and match[0] == word and (_OF_FLAGS.search(word) or not _OF_MODEL.search(word)):
        raise FlagError(
            f"{word}: what it stands for is not known here, and it may be flags. Write them out, or set the "
            "variable in front of the command: X='--max-num-seqs 64'; vllm serve MODEL $X"
        )
    return word


class _Words(Iterator[str]):
    """The words of a command line, of which a flag may take the following ones as its values."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._at = 0

    def __next__(self) -> str:
        if self._at >= len(self._words):
            raise StopIteration
        self._at += 1
        return self._words[self._at - 1]

    def __iter__(self) -> _Words:
        return self

    def values(self, kind: Kind | None) -> list[str]:
        """Take the words that are a flag's values: none, one, or for ``many`` all up to the next flag."""
        taken: list[str] = []
        while self._at < len(self._words) and not _is_flag(self._words[self._at]):
            word = self._words[self._at]
            if taken and kind != "many":
                break
            if kind == "switch" and word.lower() not in ("true", "false"):
                break
            taken.append(word)
            self._at += 1
        return taken


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not _NUMBER.fullmatch(word)


def _name(written: str, table: Vocabulary) -> tuple[str, list[str]]:
    """``--speculative-config.method`` -> ("speculative_config", ["method"])."""
    if written.startswith("--"):
        name, *keys = written[2:].split(".")
        if any("-" in key for key in keys):
            raise FlagError(f"{written}: keys behind a dot have underscores, as in JSON")
        return name.replace("-", "_"), keys
    short, *keys = written[1:].split(".")
    if short not in table.short:
        known = ", -".join(table.short)
        raise FlagError(f"{written}: no such short flag. Write its long form; known: -{known}")
    return table.short[short], keys


def _whole(written: str, name: str, table: Vocabulary) -> str:
    """``name``, or the only flag that it abbreviates, as argparse takes it: among those of the release, else
    of older ones."""
    if name in table.kinds or name in _PARTS:
        return name
    negated = name.startswith("no_")
    for spelled in (table.spelled, table.older):
        if name in spelled:
            return spelled[name]
        begun = name[3:] if negated else name
        meant = sorted({flag for form, flag in spelled.items() if form.startswith(begun)})
        if negated:
            meant = [flag for flag in meant if table.kinds[flag] == "switch"]
        if len(meant) > 1 and begun not in meant:
            forms = ", ".join("--" + "no-" * negated + other.replace("_", "-") for other in meant[:6])
            raise FlagError(
                f"{written} is short for several flags ({forms}). Write out the one that is meant"
            )
        if meant:
            return "no_" * negated + (begun if begun in meant else meant[0])
    return name


def _value(written: str, kind: Kind | None, texts: list[str], name: str) -> Any:
    """The typed value of a flag from the words given to it."""
    if not texts:
        if kind in (None, "switch"):
            return True
        raise FlagError(f"{written} needs a value: write '{written} VALUE'")
    if kind == "many":
        return [_guess(written, text) for text in texts]
    text = texts[0]
    if name in _NAMING and UNKNOWN.search(text):
        return text
    match kind:
        case "switch":
            if text.lower() not in ("true", "false"):
                raise FlagError(f"{written}={text}: is a switch. Write {written} or --no-{written[2:]}")
            return text.lower() == "true"
        case "int" | "size":
            return _integer(written, text, kind)
        case "float":
            if not _NUMBER.fullmatch(text):
                raise FlagError(f"{written} {text}: must be a number")
            return float(text)
        case "text":
            return text
        case _:
            return _guess(written, text)


def _integer(written: str, text: str, kind: Kind) -> int | str:
    if re.fullmatch(r"-?\d+(_\d+)*", text):
        return int(text)
    if kind == "size":  # vLLM's human-readable integers: 16k is 16,000 and 16K is 16,384
        if text == "auto":
            return text
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text):
            return int(float(match[1]) * _SUFFIX[match[2]])
    raise FlagError(f"{written} {text}: must be a whole number")


def _guess(written: str, text: str) -> Any:
    """JSON for what looks like JSON, numbers for what looks like numbers, else the text."""
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise FlagError(
                f"{written} {text}: is not JSON ({error}). Put it in single quotes, with double quotes "
                f"inside: {written} '{{\"key\": 1}}'"
            ) from None
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _store(flags: dict[str, Any], name: str, keys: Sequence[str], value: Any) -> None:
    """Set ``flags[name]``, or the item of its JSON object that ``keys`` lead to."""
    if not keys:
        flags.pop(name, None)  # the last one wins, and stands where it was written
        flags[name] = value
        return
    node = flags[name] = dict(flags[name]) if isinstance(flags.get(name), dict) else {}
    for key in keys[:-1]:
        inner = node.get(key)
        node[key] = dict(inner) if isinstance(inner, dict) else {}
        node = node[key]
    if (last := keys[-1]).endswith("+"):  # vLLM's way to name the items of a list one by one
        before = node.get(last[:-1])
        items = value.split(",") if isinstance(value, str) else [value]
        node[last[:-1]] = [
            *(before if isinstance(before, list) else ()),
            *(_guess(name, str(item)) for item in items),
        ]
    else:
        node[last] = value


def several(word: str) -> FlagError:
    return FlagError(
        f"{word!r} is one word that holds several: the server gets it whole, and refuses it. Write each flag "
        "and each value as a word, or an item of the list, of its own"
    )


def stray(word: str) -> FlagError:
    """A word that is neither a flag nor a value."""
    if UNKNOWN.search(word):
        return FlagError(
            f"{word}: what it stands for is not known here, and it may be flags. Write them out, or set the "
            "variable in front of the command"
        )
    if _SEVERAL.search(word):
        return several(word)
    return FlagError(f"{word!r} belongs to no flag: is a quote, a dash or a trailing backslash missing?")
