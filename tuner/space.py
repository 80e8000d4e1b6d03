"""What may be varied: knobs as ladders of values, and the rules that a config must hold before any launch.

A config maps flag names (vLLM's, snake case) to values and is *effective*: every knob has a value in it,
defaults filled in. An axis is one parameter of the search; a knob like ``speculative_config`` spreads over
several axes, named ``flag.key``. Axes are ladders, not free numbers: a measurement can tell neighbours apart,
the values are those that people write, and a config that was measured is recognised when it returns.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import BaseTrial, FixedTrial

Config = Mapping[str, Any]
Value = int | float | str | bool
"""What a rung of a ladder can be."""

SPECULATION = "speculative_config"
DRAFTS = f"{SPECULATION}.num_speculative_tokens"
THRESHOLD = "long_prefill_token_threshold"

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bundled": {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 128,
        "gpu_memory_utilization": 0.92,
        "long_prefill_token_threshold": 0,
        "speculative_config": None,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "scheduling_policy": "fcfs",
    },
    # vLLM chooses the first two by device and usage; these are the values of most GPUs.
    "vllm": {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.92,
        "long_prefill_token_threshold": 0,
        "speculative_config": None,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "scheduling_policy": "fcfs",
    },
}
LOOKUP_DEFAULTS: Mapping[str, tuple[int, int]] = {"bundled": (2, 4), "vllm": (5, 5)}
"""prompt_lookup_min and prompt_lookup_max of a speculative config that gives neither."""


class SpaceError(ValueError):
    """``--fix`` or ``--vary`` names something that cannot be fixed or varied."""


@dataclass(frozen=True)
class Axis:
    """One parameter of the search. Of ordered values the sampler sees the index into ``values``."""

    name: str
    values: tuple[Value, ...]
    ordered: bool = True
    needs: str | None = None
    """The axis that must have a true value for this one to exist."""

    @property
    def flag(self) -> str:
        return self.name.partition(".")[0]

    def suggest(self, trial: BaseTrial) -> Value:
        if self.ordered:
            return self.values[trial.suggest_int(self.name, 0, len(self.values) - 1)]
        return trial.suggest_categorical(self.name, self.values)

    def param(self, value: Value) -> Value:
        """The sampler's parameter for the rung nearest to ``value`` (by ratio, where positive)."""
        if not self.ordered:
            return value
        index = range(len(self.values))
        if value in self.values:
            return self.values.index(value)
        return min(index, key=lambda i: _distance(self.values[i], value))


def _distance(a: Any, b: Any) -> float:
    return abs(math.log(a / b)) if a > 0 and b > 0 else math.inf


@dataclass(frozen=True)
class Rule:
    """A config that breaks it is refused without a launch."""

    flag: str
    text: str
    broken: Callable[[Config, int], bool]
    """(config, max_model_len) -> True where the rule is broken."""


def _drafts(config: Config) -> int:
    speculation = config.get(SPECULATION)
    return speculation.get("num_speculative_tokens", 1) if speculation else 0


RULES = (
    Rule(
        "max_num_batched_tokens",
        "must be at least max_num_seqs, or a step cannot serve every sequence",
        lambda c, _: c["max_num_batched_tokens"] < c["max_num_seqs"],
    ),
    Rule(
        "max_num_batched_tokens",
        "must be at least max_model_len when chunked prefill is off, or a long prompt fits no step",
        lambda c, length: not c["enable_chunked_prefill"] and c["max_num_batched_tokens"] < length,
    ),
    Rule(
        THRESHOLD,
        "must be below max_num_batched_tokens, or it does nothing",
        lambda c, _: c[THRESHOLD] >= c["max_num_batched_tokens"],
    ),
    Rule(
        "max_num_batched_tokens",
        "must be at least 1 + num_speculative_tokens, or nothing is ever admitted",
        lambda c, _: 1 + _drafts(c) > c["max_num_batched_tokens"],
    ),
    Rule(
        SPECULATION,
        "prompt_lookup_min must not exceed prompt_lookup_max",
        lambda c, _: (
            bool(c[SPECULATION])
            and c[SPECULATION].get("prompt_lookup_min", 1) > c[SPECULATION].get("prompt_lookup_max", 99)
        ),
    ),
)


@dataclass(frozen=True)
class Space:
    """The axes searched around a baseline. ``max_model_len`` is the model's context length in tokens."""

    axes: tuple[Axis, ...]
    baseline: Config
    max_model_len: int
    rules: tuple[Rule, ...] = RULES

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis.flag for axis in self.axes))

    def suggest(self, trial: BaseTrial) -> dict[str, Any]:
        """The config that the sampler proposes."""
        chosen: dict[str, Value] = {}
        for axis in self.axes:
            if axis.needs is None or chosen.get(axis.needs):
                chosen[axis.name] = axis.suggest(trial)
        return self._assemble(chosen)

    def params(self, config: Config) -> dict[str, Value]:
        """The sampler's parameters for ``config``, moved onto the ladders (else the baseline's)."""
        values = _flatten({**self.baseline, **config})
        axes = [a for a in self.axes if a.needs is None or values.get(a.needs)]
        return {axis.name: axis.param(values[axis.name]) for axis in axes if axis.name in values}

    def snap(self, config: Config) -> dict[str, Any]:
        """``config`` with every searched flag moved onto its ladder."""
        return self.config(self.params(config))

    def config(self, params: Mapping[str, Value]) -> dict[str, Any]:
        """The config of the sampler's parameters; one that depends on another must be there if it applies."""
        return self.suggest(FixedTrial(dict(params)))

    def refusals(self, config: Config) -> list[str]:
        """Why ``config`` must not be launched; empty when it may."""
        return [
            f"{rule.flag}={render_value(config[rule.flag])}: {rule.text}"
            for rule in self.rules
            if rule.broken(config, self.max_model_len)
        ]

    def changes(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Flag -> (baseline's value, config's value), for flags that differ."""
        return {
            flag: (self.baseline.get(flag), value)
            for flag, value in config.items()
            if value != self.baseline.get(flag)
        }

    @property
    def size(self) -> int:
        """How many distinct configs there are, those that rules refuse included."""
        independent = math.prod(len(a.values) for a in self.axes if a.needs is None and not self._children(a))
        dependent = (
            sum(math.prod(len(c.values) for c in self._children(a)) if value else 1 for value in a.values)
            for a in self.axes
            if self._children(a)
        )
        return independent * math.prod(dependent)

    def untried(self, tried: Iterable[str], rng: random.Random) -> dict[str, Any] | None:
        """A random config that breaks no rule and whose key is not in ``tried``; None when none is left."""
        seen = set(tried)
        fresh = [c for c in self.draw(rng, 4096) if config_key(c) not in seen and not self.refusals(c)]
        return rng.choice(fresh) if fresh else None

    def draw(self, rng: random.Random, limit: int) -> Iterator[dict[str, Any]]:
        """Every config of a space of at most ``limit``, else so many at random; some may be there twice."""
        return self._every() if self.size <= limit else self._random(rng, limit)

    def _children(self, axis: Axis) -> list[Axis]:
        return [other for other in self.axes if other.needs == axis.name]

    def _every(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield self._assemble(dict(zip((axis.name for axis in self.axes), values, strict=True)))

    def _random(self, rng: random.Random, n: int) -> Iterator[dict[str, Any]]:
        for _ in range(n):
            yield self._assemble({axis.name: rng.choice(axis.values) for axis in self.axes})

    def _assemble(self, chosen: Mapping[str, Value]) -> dict[str, Any]:
        config = dict(self.baseline)
        nested: dict[str, dict[str, Any]] = {}
        for axis in self.axes:
            if axis.name not in chosen:
                continue
            flag, _, key = axis.name.partition(".")
            if key:
                nested.setdefault(flag, {})[key] = chosen[axis.name]
            else:
                config[flag] = chosen[axis.name]
        for flag, values in nested.items():
            drafts = values.get("num_speculative_tokens", 1)
            config[flag] = {"method": "ngram", **values} if drafts else None
        return config


def build_space(
    baseline: Config,
    max_model_len: int,
    *,
    fix: Sequence[str] = (),
    vary: Mapping[str, tuple[Value, ...] | None] | None = None,
) -> Space:
    """The axes for a model of ``max_model_len`` tokens around ``baseline`` (effective, see the module).

    ``fix`` names flags to leave at the baseline's value (``all``: every one that ``vary`` does not name);
    ``vary`` adds flags, with the values to try, or None for the flag's own range. Raises SpaceError.
    """
    vary = dict(vary or {})
    known = {axis.flag for axis in _axes(baseline, max_model_len)} | set(_CHOICES)
    for flag in fix:
        if flag != "all" and flag not in known:
            raise SpaceError(
                f"--fix {flag}: not a flag that is varied. Varied are: {', '.join(sorted(known))}."
            )
    for flag, values in vary.items():
        if values is None and flag not in known:
            raise SpaceError(f"--vary {flag}: has no range of its own. Give the values: --vary {flag}=A,B.")
        if flag in fix:
            raise SpaceError(f"{flag}: both --fix and --vary. Drop one.")
    axes = [
        axis for axis in _axes(baseline, max_model_len) if axis.flag not in vary or vary[axis.flag] is None
    ]
    axes = [axis for axis in axes if axis.flag in vary or not {axis.flag, "all"} & set(fix)]
    for flag, values in vary.items():
        if values is not None:
            axes.append(_explicit(flag, values, baseline.get(flag)))
        elif flag in _CHOICES:
            axes.append(Axis(flag, _CHOICES[flag], ordered=False))
    if not axes:
        raise SpaceError("nothing is left to vary. Fix fewer flags, or --vary one.")
    return Space(tuple(axes), baseline, max_model_len)


_CHOICES: Mapping[str, tuple[Value, ...]] = {
    "enable_chunked_prefill": (True, False),
    "enable_prefix_caching": (True, False),
    "scheduling_policy": ("fcfs", "priority"),
}


def _axes(baseline: Config, max_model_len: int) -> list[Axis]:
    """The knobs of the default search, ranged by the model and by the baseline's values."""
    tokens, seqs = baseline["max_num_batched_tokens"], baseline["max_num_seqs"]
    memory = baseline["gpu_memory_utilization"]
    threshold = baseline[THRESHOLD]
    speculation = baseline[SPECULATION] or {}
    axes = [
        Axis("max_num_batched_tokens", geometric(max(32, tokens // 32), max(4 * tokens, 2048), tokens)),
        Axis("max_num_seqs", geometric(max(4, seqs // 16), min(4 * seqs, max(seqs, 1024)), seqs)),
        Axis("gpu_memory_utilization", tuple(sorted({0.75, 0.8, 0.85, 0.9, 0.95, memory}))),
        # Off stands at the end: no threshold behaves like one that no prompt reaches.
        Axis(THRESHOLD, (*geometric(max(32, max_model_len // 128), max_model_len // 4, threshold), 0)),
        Axis(DRAFTS, _including((0, 1, 2, 3, 4, 5), _drafts(baseline))),
        Axis(
            f"{SPECULATION}.prompt_lookup_min",
            _including((1, 2, 3), speculation.get("prompt_lookup_min")),
            needs=DRAFTS,
        ),
        Axis(
            f"{SPECULATION}.prompt_lookup_max",
            _including((3, 4, 5), speculation.get("prompt_lookup_max")),
            needs=DRAFTS,
        ),
    ]
    if speculation.get("method", "ngram") != "ngram":  # a draft model is the user's choice, and none of ours
        axes = [axis for axis in axes if axis.flag != SPECULATION]
    return axes


def geometric(low: int, high: int, include: int = 0) -> tuple[int, ...]:
    """Powers of two and the steps half-way (…, 128, 192, 256, …) in [low, high], and ``include`` if > 0."""
    steps = {base * 2**power for base in (2, 3) for power in range(31)}
    chosen = {step for step in steps if low <= step <= high}
    return tuple(sorted(chosen | ({include} if include > 0 else set())))


def _including(values: tuple[int, ...], value: int | None) -> tuple[Value, ...]:
    return tuple(sorted({*values, *([] if value is None else [value])}))


def _explicit(flag: str, values: tuple[Value, ...], baseline: Any) -> Axis:
    """Raises SpaceError for values that are none, and for words where the baseline is a number."""
    for value in values:
        odd = not isinstance(value, str | int | float) or (
            isinstance(value, float) and not math.isfinite(value)
        )
        if odd or (_is_number(baseline) and not _is_number(value)):
            wanted = "a number" if _is_number(baseline) else "a number, a switch or a word"
            raise SpaceError(f"--vary {flag}: {json.dumps(value)} is not {wanted}.")
    every = dict.fromkeys(values if baseline is None else (baseline, *values))
    numeric = all(map(_is_number, every))
    return Axis(flag, tuple(sorted(every)) if numeric else tuple(every), ordered=numeric)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flatten(config: Config) -> dict[str, Any]:
    """Nested flags as ``flag.key``; speculation that is off has 0 drafts."""
    flat = {flag: value for flag, value in config.items() if not isinstance(value, Mapping)}
    flat[DRAFTS] = _drafts(config)
    for flag, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{flag}.{key}": item for key, item in value.items()}
    return flat


def effective(flags: Config, server: str) -> dict[str, Any]:
    """What ``server`` (a key of DEFAULTS) started with ``flags`` runs with: every default filled in."""
    config = {**DEFAULTS[server], **flags}
    speculation = config[SPECULATION]
    if speculation and speculation.get("method") == "ngram":
        low, high = LOOKUP_DEFAULTS[server]
        low = min(speculation.get("prompt_lookup_min", low), speculation.get("prompt_lookup_max", high))
        high = max(speculation.get("prompt_lookup_max", high), low)
        lookup = {"prompt_lookup_min": low, "prompt_lookup_max": high}
        config[SPECULATION] = {"num_speculative_tokens": _drafts(config), **lookup, **speculation}
    return config


def config_key(config: Config) -> str:
    """A canonical text: two configs have the same key exactly when they set the same."""
    return json.dumps(config, sort_keys=True)


def render_value(value: Any) -> str:
    """A value as the command line has it; objects as compact JSON, None as ``off``."""
    if value is None:
        return "off"
    return json.dumps(value) if isinstance(value, bool | Mapping) else str(value)
