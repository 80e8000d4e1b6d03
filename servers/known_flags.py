"""The server's current flags, each with where it is known from."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from servers.connection import HIDDEN
from servers.flags import defaults
from servers.flags.defaults import Platform
from servers.flags.rules import Rule
from servers.flags.words import vocabulary
from servers.kind import ServerKind
from servers.kinds import VLLM
from servers.kinds.vllm import pool_tokens
from servers.logs.log_facts import LogFacts
from servers.reading import Missing, Number, Reading

Origin = Literal["given", "config file", "log", "metrics", "inferred", "default", "guessed"]
"""Who says so. ``config file``: the file that the given command names. ``default``: not set, and this
platform has just one; ``guessed``: it may be another."""

_SECRET = re.compile(r"(^|_)(api_keys?|token|password)$")
# Known only from metrics, a log or the command line: there is no default to guess.
_OBSERVED = ("max_model_len", "block_size", "num_gpu_blocks", "kv_cache_tokens", "max_loras")
SWITCHES = frozenset({"enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"})
FLAG_NAMES = frozenset([*defaults.NAMES, *_OBSERVED])
"""The flags that rules may name. Switches are 0 or 1; num_gpu_blocks_override is 0 where it is not set."""


@dataclass(frozen=True)
class Flag:
    """One flag's value. ``number`` is what rules compute with, a range where the value is not certain."""

    name: str
    value: Any
    origin: Origin
    number: Number

    @property
    def certain(self) -> bool:
        """Whether it was said, or can be nothing else."""
        return self.origin not in ("inferred", "guessed")

    @property
    def unset(self) -> bool:
        return self.origin in ("default", "guessed")

    def bounded(self, number: Number) -> Flag:
        """The same flag, with what else is known about its value."""
        return replace(self, value=_typed(number.point), number=replace(number, vague="flag"))


@dataclass(frozen=True)
class Flags:
    """All flags of one engine."""

    known: Mapping[str, Flag]
    kind: ServerKind = VLLM
    version: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    """As the user or the log gave them, with those that no rule names."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Of what is in ``raw``."""
    unknown: tuple[str, ...] = ()
    """Those given that no release of this kind of server has, as far as is known here."""
    complete: bool = False
    """Whether what is not in ``raw`` is not set: the command is known."""

    def reading(self, name: str) -> Reading:
        if name in self.known:
            return self.known[name].number
        return Missing(name, "flag", "not known; pass --flags 'vllm serve …' or --log FILE")

    def value(self, name: str) -> Any:
        """The current value as it would be typed; None where it is not set or not known."""
        return self.known[name].value if name in self.known else self.raw.get(name)

    def judged_by(self) -> Iterator[Flag]:
        """Every flag that is known or given, as it would be typed, without secrets."""
        for name, flag in self.known.items():
            yield replace(flag, value=bool(flag.value)) if name in SWITCHES else flag
        for name, value in self.raw.items():
            if name not in self.known:
                hidden = _SECRET.search(name) is not None
                shown = HIDDEN if hidden else value
                yield Flag(name, shown, self.origins[name], Number.exactly(_number(value) or 0.0))

    def with_flag(self, flag: Flag) -> Flags:
        return replace(self, known={**self.known, flag.name: flag})

    def unavailable(self, name: str, value: Any = None) -> str | None:
        """Why the running server cannot take this flag, or this value of it; None where it can."""
        if name == "num_speculative_tokens":
            return self.kind.unavailable("speculative_config", self.version)
        return self.kind.unavailable(name, self.version, value)


def resolve(
    given: Mapping[str, Any] | None,
    log: LogFacts | None,
    cache_config: Mapping[str, str] | None,
    *,
    kind: ServerKind,
    version: str | None,
    from_file: Collection[str] = (),
) -> Flags:
    """Gather the flags of one engine; what the user says beats the log, which beats the metrics.

    ``from_file``: those of ``given`` that a config file says. A flag that no release has may change anything
    that is not stated, so no default is taken for certain beside it.
    """
    config = cache_config or {}
    unknown = tuple(_unknown(given or {}, kind))
    complete = (given is not None and not unknown) or (log is not None and log.complete)
    told = {"kv_cache_dtype": config["cache_dtype"]} if "cache_dtype" in config else {}
    platform = _platform({**told, **(log.flags if log else {}), **(given or {})}, log, config, version)
    known = {name: _fallback(name, kind, platform, complete) for name in defaults.NAMES}
    raw: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    layers: tuple[tuple[Origin, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("metrics", told, _from_metrics(config)),
        ("log", log.flags if log else {}, _from_log(log) if log else {}),
        ("given", given or {}, given or {}),
    )
    for origin, said, values in layers:
        raw |= said
        origins |= {
            name: "config file" if name in from_file and origin == "given" else origin for name in said
        }
        for name, value in _numbers(values).items():
            source = "speculative_config" if name == "num_speculative_tokens" else name
            known[name] = Flag(name, _typed(value), origins.get(source, origin), Number.exactly(value))
    return Flags(_in_harmony(known, kind.rules), kind, platform.version, raw, origins, unknown, complete)


def _unknown(given: Mapping[str, Any], kind: ServerKind) -> Iterable[str]:
    table = vocabulary(kind.name)
    if not table.spelled:  # its releases are not known
        return
    for name in given:
        own = kind.spelling.own(name)
        if not {name, own} & {*table.kinds, *table.spelled, *table.older}:
            yield own


def _platform(
    raw: Mapping[str, Any],
    log: LogFacts | None,
    cache_config: Mapping[str, str],
    version: str | None,
) -> Platform:
    """The CPU build shows in the metrics by its block size, which was not chosen and which no GPU has."""
    version = version or (log.version if log else None)
    device = "cpu" if version and version.endswith("+cpu") else log.device if log else None
    looks_like_cpu = (cache_config.get("block_size"), cache_config.get("user_specified_block_size")) == (
        "128",
        "False",
    )
    parallel = (_number(raw.get(f"{kind}_parallel_size")) or 1 for kind in ("tensor", "pipeline"))
    return Platform(
        version=version,
        device=device or ("cpu" if looks_like_cpu else None),
        stated=device is not None,
        processes=max(1, round(math.prod(parallel))),
    )


def _in_harmony(known: Mapping[str, Flag], rules: Iterable[Rule]) -> dict[str, Flag]:
    """Narrow what is not stated by the rules between flags: a step's budget covers every sequence.

    A default of ``max_num_seqs`` is lowered to a smaller budget; a budget is no smaller than the sequences.
    """
    found = dict(known)
    for rule in rules:
        flag, least = found.get(rule.flag), rule.comparison.right
        if flag is None or rule.comparison.operator != ">=" or not rule.applies(_values(found, rule.when)):
            continue
        other = found.get(least.text)
        if other is not None and other.unset and flag.certain:
            found[other.name] = other.bounded(other.number.minimum(flag.number))
        if flag.unset and all(name in found and found[name].certain for name in least.names):
            number = least.value(lambda name: found[name].number)
            if isinstance(number, Number):
                found[flag.name] = flag.bounded(flag.number.maximum(number))
    return found


def _values(known: Mapping[str, Flag], names: Iterable[str]) -> dict[str, Any]:
    return {name: known[name].value for name in names if name in known and known[name].certain}


def inferred(name: str, value: float, low: float, high: float) -> Flag:
    """A flag that the metrics give away, although none of them holds it."""
    return Flag(name, _typed(value), "inferred", Number(value, low, high, "flag"))


def _fallback(name: str, kind: ServerKind, platform: Platform, complete: bool) -> Flag:
    """What holds where the flag is not set, or not known."""
    default = kind.default(name, platform)
    if complete and default.exact:
        return Flag(name, _typed(default.point), "default", default)
    number = default if complete else defaults.conceivable(name, default)
    return Flag(name, _typed(number.point), "guessed", number)


def _from_log(log: LogFacts) -> dict[str, Any]:
    pool = {"kv_cache_tokens": log.kv_cache_tokens} if log.kv_cache_tokens else {}
    return {**log.flags, **pool}


def _from_metrics(labels: Mapping[str, str]) -> dict[str, Any]:
    """What ``cache_config_info`` holds, and ``max_loras``."""
    values: dict[str, Any] = {
        name: labels[name]
        for name in (
            "block_size",
            "num_gpu_blocks",
            "gpu_memory_utilization",
            "enable_prefix_caching",
            "max_loras",
        )
        if name in labels
    }
    for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if name in labels:  # "None": not set, which is 0 here
            values[name] = _number(labels[name]) or 0
    tokens = _number(labels.get("kv_cache_size_tokens"))
    concurrency = _number(labels.get("kv_cache_max_concurrency"))
    if tokens and concurrency:
        values["max_model_len"] = round(tokens / concurrency)
    if pool := pool_tokens(labels):
        values["kv_cache_tokens"] = pool
    return values


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name in FLAG_NAMES:
        number = _number(values.get(name))
        if number is not None:
            numbers[name] = number
    speculation = values.get("speculative_config")
    if isinstance(speculation, Mapping):
        numbers["num_speculative_tokens"] = _number(speculation.get("num_speculative_tokens")) or 1.0
    elif values.get("speculative_algorithm") and (
        tokens := _number(values.get("speculative_num_draft_tokens"))
    ):
        numbers["num_speculative_tokens"] = tokens - 1  # SGLang counts the token before the drafts
    return numbers


def _typed(value: float) -> int | float:
    """Whole numbers as such: flags are typed that way."""
    return int(value) if math.isfinite(value) and value == int(value) else value


def _number(value: Any) -> float | None:
    if value is None or value in ("None", "auto"):
        return None
    if value in ("True", "False"):
        return float(value == "True")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
