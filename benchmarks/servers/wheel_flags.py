"""The flags that a released server registers, read off its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.servers.sources import UNKNOWN, Field, Sources, keywords, local_names

Flag = dict[str, Any]
"""``options``: long forms first; ``kind``: of servers.flags.words; ``default``, ``choices`` where known."""
SIZES = ("human_readable_int", "human_readable_int_or_auto")
_SWITCHES = ("store_true", "store_false", "BooleanOptionalAction", "StoreBoolean")
_MANY = re.compile(r"\b(list|List|tuple|Tuple|set|Set|Sequence|frozenset)\b")


def read_flags(sources: Sources, paths: re.Pattern[str], frontends: tuple[str, ...]) -> dict[str, Flag]:
    """By name in snake case. ``paths``: of the files that register flags. ``frontends``: dataclasses each
    field of which is a flag."""
    found: dict[str, Flag] = {}
    sizes = _human_readable(sources)
    for path, tree in sources.trees.items():
        if paths.fullmatch(path):
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef):
                    for name, flag in _registered(sources, function, sizes):
                        found.setdefault(name, flag)
    for frontend in frontends:
        for name, item in sources.fields(frontend).items():
            given = _of_field(sources, item, sizes)
            if given and name not in found and (own := _of_metadata(sources, item)) is not None:
                found[name] = {**given, **own}
    return dict(sorted(found.items()))


def _registered(
    sources: Sources, function: ast.FunctionDef, sizes: frozenset[str]
) -> Iterator[tuple[str, Flag]]:
    local = local_names(function)
    for call in ast.walk(function):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument")):
            continue
        options = [o for a in call.args if isinstance(o := sources.value(a, local), str) and o[:1] == "-"]
        long = [option for option in options if option.startswith("--")]
        if not long:
            continue
        given = keywords(call)
        name = sources.value(given.get("dest")) if "dest" in given and len(long) > 1 else long[0]
        name = str(name).lstrip("-").replace("-", "_")
        flag: Flag = {"options": sorted(options, key=lambda o: not o.startswith("--"))}
        for word in call.keywords:
            if word.arg is None:
                flag |= _of_spread(sources, word.value, local, sizes)
        flag |= _of_keywords(sources, given, local)
        flag.setdefault("kind", "text")
        yield long[0].lstrip("-").replace("-", "_") if name in ("None", "") else name, flag


def _of_spread(
    sources: Sources, spread: ast.expr, local: Mapping[str, ast.expr], sizes: frozenset[str]
) -> Flag:
    """Of ``**model_kwargs["dtype"]``, where ``model_kwargs = get_kwargs(ModelConfig)``, and of a literal
    mapping that begins with one."""
    match spread:
        case ast.Subscript(value=ast.Name(id=variable), slice=ast.Constant(value=str(key))):
            match local.get(variable):
                case ast.Call(args=[ast.Name(id=cls), *_]):
                    item = sources.fields(cls).get(key)
                    return _of_field(sources, item, sizes) if item else {}
        case ast.Dict(keys=keys, values=values):
            flag: Flag = {}
            for word, value in zip(keys, values, strict=True):
                if word is None:
                    flag |= _of_spread(sources, value, local, sizes)
                elif isinstance(word, ast.Constant):
                    flag |= _of_keywords(sources, {str(word.value): value}, local)
            return flag
    return {}


def _of_field(sources: Sources, item: Field, sizes: frozenset[str]) -> Flag:
    if "ClassVar" in ast.unparse(item.annotation) or item.name.startswith("_"):
        return {}
    flag: Flag = {"kind": "size" if item.name in sizes else _kind(sources, item.annotation)}
    if (choices := sources.choices(item.annotation)) is not UNKNOWN:
        flag["choices"] = choices
        if all(isinstance(choice, int) for choice in choices):
            flag["kind"] = "int"
    if (default := sources.value(item.default)) is not UNKNOWN:
        flag["default"] = default
    return flag


def _of_keywords(sources: Sources, given: Mapping[str, ast.expr], local: Mapping[str, ast.expr]) -> Flag:
    flag: Flag = {}
    action = ast.unparse(given["action"]) if "action" in given else ""
    if any(word in action for word in _SWITCHES):
        flag["kind"] = "switch"
        if "store_true" in action:
            flag["default"] = False
    elif "nargs" in given and sources.value(given["nargs"]) in ("+", "*"):
        flag["kind"] = "many"
    elif "type" in given:
        flag["kind"] = _kind_of_type(ast.unparse(given["type"]))
    if "choices" in given and isinstance(choices := sources.value(given["choices"], local), list):
        flag["choices"] = choices
    if "default" in given:
        default = given["default"]
        match default:  # SGLang: _declared_default("name")
            case ast.Call(func=ast.Name(id="_declared_default"), args=[ast.Constant(value=name)]):
                item = sources.fields("ServerArgs").get(str(name))
                value = sources.value(item.default) if item else UNKNOWN
            case _:
                value = sources.value(default, local)
        if value is not UNKNOWN:
            flag["default"] = value
    return flag


def _kind_of_type(written: str) -> str:
    if written in SIZES:
        return "size"
    for kind in ("int", "float"):
        if re.search(rf"\b{kind}\b", written):
            return kind
    if "json" in written or "dict" in written.lower() or written.endswith("Config"):
        return "json"
    if "bool" in written:
        return "switch"
    return "text"


def _kind(sources: Sources, annotation: ast.expr) -> str:
    """As ``get_kwargs`` of vLLM decides: the first that the annotation contains."""
    text = ast.unparse(annotation)
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        text = annotation.value
    text = re.sub(r"^(A|Annotated)\[(.*?), .*\]$", r"\2", text, flags=re.DOTALL)
    words = re.findall(r"\w+", text)
    if len(words) == 1 and words[0] in sources.names and sources.choices(annotation) is UNKNOWN:
        return _kind(sources, sources.names[words[0]])  # an alias
    if any(_is_config(sources, word) for word in words):
        return "json"
    if "bool" in words:
        return "text" if "str" in words else "switch"
    if sources.choices(annotation) is not UNKNOWN:
        return "text"
    outer = re.sub(r"\b(dict|Dict|Mapping)\[.*\]", "dict", text)
    if _MANY.search(outer) and "dict" not in outer:
        return "many"
    for kind in ("int", "float"):
        if kind in re.findall(r"\w+", outer):
            return kind
    return "json" if "dict" in outer.lower() else "text"


def _is_config(sources: Sources, word: str) -> bool:
    return word in sources.classes and word.endswith("Config")


def _human_readable(sources: Sources) -> frozenset[str]:
    """Names of the flags of vLLM that take 16k for 16,000 and 16K for 16,384."""
    found = {"max_model_len"}
    for tree in sources.trees.values():
        for node in ast.walk(tree):
            match node:
                case ast.Assign(
                    targets=[ast.Name(id="human_readable_int_args" | "human_readable_ints")], value=value
                ):
                    found |= set(sources.value(value))
                case ast.Compare(left=ast.Name(id="name"), comparators=[ast.Set() as names]) if (
                    "max_num_batched_tokens" in ast.unparse(names)
                ):
                    found |= set(sources.value(names))
    return frozenset(found)


def _of_metadata(sources: Sources, item: Field) -> Flag | None:
    """What a field's annotation says itself, in SGLang's ``A[T, Arg(…)]``; None for one that is no flag."""
    flag: Flag = {"options": [_long(item.name)]}
    for call in ast.walk(item.annotation):
        kind = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if kind == "Derived":
            return None
        if kind == "Arg" and isinstance(call, ast.Call):
            given = keywords(call)
            if sources.value(given.get("no_cli")) is True:
                return None
            name, aliases = (sources.value(given.get(key)) for key in ("cli_name", "aliases"))
            first = name if isinstance(name, str) else item.name
            flag["options"] = [_long(first), *map(_long, aliases if isinstance(aliases, list) else ())]
            flag |= _of_keywords(
                sources, {k: given[k] for k in ("choices", "nargs", "action") if k in given}, {}
            )
    return flag


def _long(name: str) -> str:
    return name if name.startswith("-") else "--" + name.replace("_", "-")
