"""What may be varied around a baseline, and the rules that a config must hold before any launch.

An axis is one parameter of the search; a knob like ``speculative_config`` spreads over several axes, named
``flag.key``. Axes are ladders, not free numbers: a measurement can tell neighbours apart, the values are
those that people write, and a config that was measured is recognised when it returns.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from optuna.trial import BaseTrial, FixedTrial

from servers.flags.rules import RULES, Rule
from servers.kinds import KINDS
from tuner.space.axis import Axis, Param, Value, is_number
from tuner.space.config import (
    LOOKUPS,
    Config,
    config_key,
    effective,
    flatten,
    numbers_of,
    render_value,
    speculation_of,
)
from tuner.space.file import SpaceFile
from tuner.space.knobs import (
    DRAFTS,
    KNOBS,
    METHOD,
    SPECULATION,
    THRESHOLD,
    Knob,
    SpaceError,
    Surroundings,
    default_of,
    geometric,
    knobs_of,
)

__all__ = [
    "DRAFTS",
    "RULES",
    "SPECULATION",
    "THRESHOLD",
    "Axis",
    "Config",
    "Rule",
    "Space",
    "SpaceError",
    "Surroundings",
    "Value",
    "build_space",
    "config_key",
    "effective",
    "geometric",
    "render_value",
]


@dataclass(frozen=True)
class Space:
    """The axes searched around a baseline. ``max_model_len`` is the model's context length in tokens."""

    axes: tuple[Axis, ...]
    baseline: Config
    max_model_len: int
    rules: tuple[Rule, ...] = RULES
    around: Surroundings = field(default_factory=Surroundings)
    notes: tuple[str, ...] = ()
    """What is left alone although it is searched by default, and why."""

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis.flag for axis in self.axes))

    def suggest(self, trial: BaseTrial) -> dict[str, Any]:
        """The config that the sampler proposes."""
        chosen: dict[str, Value] = {}
        for axis in self.axes:
            if axis.exists(chosen):
                chosen[axis.name] = axis.suggest(trial)
        return self._assemble(chosen)

    def params(self, config: Config) -> dict[str, Param]:
        """The sampler's parameters for ``config``, moved onto the ladders (else the baseline's)."""
        values = flatten({**self.baseline, **config})
        return {a.name: a.param(values[a.name]) for a in self.axes if a.exists(values) and a.name in values}

    def snap(self, config: Config) -> dict[str, Any]:
        """``config`` with every searched flag moved onto its ladder."""
        return self.config(self.params(config))

    def config(self, params: Mapping[str, Value]) -> dict[str, Any]:
        """The config of the sampler's parameters; one that depends on another must be there if it applies."""
        return self.suggest(FixedTrial(dict(params)))

    def moved(self, config: Config, axis: Axis, value: Value) -> dict[str, Any]:
        """``config`` with another value of one axis; what exists only beside that takes its first value."""
        whole = {other.name: other.param(other.values[0]) for other in self.axes}
        return self.config({**whole, **self.params(config), axis.name: axis.param(value)})

    def refusals(self, config: Config) -> list[str]:
        """Why ``config`` must not be launched; empty when it may."""
        flat = flatten(config)
        numbers = {**self._lengths, **numbers_of(flat)}
        found = [
            f"{rule.flag}={render_value(config.get(rule.flag))}: {rule.text}"
            for rule in self._live_rules
            if rule.broken(flat, numbers)
        ]
        plan = self.around.memory
        if plan and (short := plan.refusal(config, self.baseline, int(numbers["max_model_len"]))):
            found.append(short)
        return found

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
        return math.prod(self._choices(axis) for axis in self.axes if axis.needs is None)

    def untried(self, tried: Iterable[str], rng: random.Random) -> dict[str, Any] | None:
        """A random config that breaks no rule and whose key is not in ``tried``; None when none is left."""
        seen = set(tried)
        fresh = [c for c in self.sample(rng, 4096) if config_key(c) not in seen and not self.refusals(c)]
        return rng.choice(fresh) if fresh else None

    def sample(self, rng: random.Random, limit: int) -> Iterator[dict[str, Any]]:
        """Every config of a space of at most ``limit``, else so many at random; some may be there twice."""
        return self._every() if self.size <= limit else self._random(rng, limit)

    def _choices(self, axis: Axis) -> int:
        """Values of an axis, each times those of the axes that exist beside it."""
        children = [other for other in self.axes if other.needs == axis.name]
        return sum(
            math.prod(self._choices(child) for child in children if child.exists({axis.name: value}))
            for value in axis.values
        )

    def _every(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield self._assemble(dict(zip((axis.name for axis in self.axes), values, strict=True)))

    def _random(self, rng: random.Random, n: int) -> Iterator[dict[str, Any]]:
        for _ in range(n):
            yield self._assemble({axis.name: rng.choice(axis.values) for axis in self.axes})

    def _assemble(self, chosen: Mapping[str, Value]) -> dict[str, Any]:
        config = dict(self.baseline)
        there: dict[str, Value] = {}
        nested: dict[str, dict[str, Any]] = {}
        for axis in self.axes:
            if axis.name not in chosen or not axis.exists(there):
                continue
            there[axis.name] = chosen[axis.name]
            flag, _, key = axis.name.partition(".")
            if key:
                nested.setdefault(flag, {})[key] = chosen[axis.name]
            else:
                config[flag] = chosen[axis.name]
        for flag, values in nested.items():
            whole = {**(self.baseline.get(flag) or {}), **values}
            config[flag] = speculation_of(whole) if flag == SPECULATION else whole
        return config

    @cached_property
    def _live_rules(self) -> tuple[Rule, ...]:
        """Those whose names a config can have at all: the others would be silent each time."""
        flags = {name.rpartition(".")[2] for name in (*flatten(self.baseline), *(a.name for a in self.axes))}
        there = flags | self._lengths.keys()
        return tuple(rule for rule in self.rules if rule.compared <= there)

    @cached_property
    def _lengths(self) -> dict[str, float]:
        lengths = self.around.numbers({})
        if self.around.longest_request is None:  # then nothing is known to be too short for it
            del lengths["longest_request"]
        return lengths


def build_space(
    baseline: Config,
    max_model_len: int,
    *,
    fix: Sequence[str] = (),
    vary: Mapping[str, tuple[Value, ...] | None] | None = None,
    around: Surroundings | None = None,
    file: SpaceFile | None = None,
) -> Space:
    """The axes for a model of ``max_model_len`` tokens around ``baseline`` (effective, see the module).

    ``fix`` names flags to leave at the baseline's value (``all``: every one that ``vary`` does not name);
    ``vary`` adds flags, with the values to try, or None for the flag's own range. ``file`` replaces the knobs
    that are searched by default, and adds rules. Raises SpaceError.
    """
    around = replace(around or Surroundings(), max_model_len=max_model_len)
    vary = dict(vary or {})
    _check_names(fix, vary, around)
    wanted, notes = _wanted(baseline, fix, vary, around, file)
    whole = {**{k.flag: default_of(k, around.server) for k in wanted if k.flag not in baseline}, **baseline}
    if "max_model_len" in whole:
        whole["max_model_len"] = whole["max_model_len"] or max_model_len
    numbers = around.numbers(numbers_of(flatten(whole)))
    values = flatten(whole)
    tied, without = _tied(wanted, whole)
    made = [knob.axis(numbers, values.get(knob.name)) for knob in _in_order(tied)]
    axes = tuple(axis for axis in made if len(axis.values) > 1 or vary.get(axis.name))
    notes += without + [
        f"{axis.name} is not varied: only {render_value(axis.values[0])} is left here"
        for axis in made
        if axis not in axes
    ]
    if not axes:
        raise SpaceError("nothing is left to vary. Fix fewer flags, or --vary one.")
    rules = (*KINDS[around.server].rules, *(file.rules if file else ()))
    _check_rules(file.rules if file else (), {**numbers, **values, **dict.fromkeys(a.name for a in axes)})
    return Space(axes, whole, max_model_len, rules, around, tuple(notes))


def _wanted(
    baseline: Config,
    fix: Sequence[str],
    vary: Mapping[str, tuple[Value, ...] | None],
    around: Surroundings,
    file: SpaceFile | None,
) -> tuple[list[Knob], list[str]]:
    """The knobs to search, and notes on those that are left out of the default ones."""
    own = knobs_of(around.server)
    default = file.knobs if file else tuple(knob for knob in own if knob.main)
    kept: list[Knob] = []
    notes: list[str] = []
    for knob in default:
        explicit = vary.get(knob.flag) or vary.get(knob.name)
        named = knob.flag in vary or knob.name in vary
        if explicit or (not named and {knob.flag, knob.name, "all"} & set(fix)):
            continue
        if reason := around.absent(knob, baseline):
            if named or file:
                raise SpaceError(f"{knob.name}: cannot be varied: {reason}.")
            notes.append(f"{knob.flag} is not varied: {reason}")
            continue
        kept.append(around.narrowed(knob))
    for name, values in vary.items():
        if values is not None:
            knob = _explicit(name, values, baseline, own)
            if reason := around.absent(knob, baseline):
                raise SpaceError(f"--vary {name}: {reason}.")
            kept.append(knob)
        elif not any(knob.name == name or knob.flag == name for knob in kept):
            kept += [_by_name(knob, baseline, around) for knob in own if knob.name == name]
    return kept, list(dict.fromkeys(notes))


def _by_name(knob: Knob, baseline: Config, around: Surroundings) -> Knob:
    """A knob that was asked for. Raises SpaceError where it cannot matter."""
    if reason := around.absent(knob, baseline):
        raise SpaceError(f"--vary {knob.name}: {reason}.")
    narrowed = around.narrowed(knob)
    if knob.values and len(narrowed.values) < 2:
        raise SpaceError(f"--vary {knob.name}: this server takes only {render_value(narrowed.values[0])}.")
    return narrowed


def _tied(wanted: Sequence[Knob], baseline: Config) -> tuple[list[Knob], list[str]]:
    """The knobs, each tied to what it depends on (another knob, or the baseline's value), and notes on those
    that lack it."""
    names = {knob.name for knob in wanted}
    values = flatten(baseline)
    kept: list[Knob] = []
    notes: list[str] = []
    for knob in wanted:
        if knob.name.partition(".")[2] in LOOKUPS:
            if METHOD in names:
                knob = replace(knob, needs=METHOD, needs_value="ngram")
            elif values.get(METHOD, "ngram") != "ngram":
                continue
        if knob.needs is None or knob.needs in names:
            kept.append(knob)
        elif values.get(knob.needs):
            kept.append(replace(knob, needs=None, needs_value=None))
        else:
            notes.append(f"{knob.name} is not varied: it needs {knob.needs}")
    return kept, notes


def _in_order(knobs: Sequence[Knob]) -> list[Knob]:
    """Each behind the one that it needs. Raises SpaceError for those that need each other."""
    ordered: dict[str, Knob] = {}
    left = list(knobs)
    while left:
        ready = [knob for knob in left if knob.needs is None or knob.needs in ordered]
        if not ready:
            raise SpaceError(f"{left[0].name}: needs {left[0].needs}, which is not there without it.")
        ordered[ready[0].name] = ready[0]
        left.remove(ready[0])
    return list(ordered.values())


def _check_names(
    fix: Sequence[str], vary: Mapping[str, tuple[Value, ...] | None], around: Surroundings
) -> None:
    """Raises SpaceError for a flag that is not known."""
    own = knobs_of(around.server)
    known = {name for knob in own for name in (knob.flag, knob.name)}
    for flag in fix:
        if flag != "all" and flag not in known and flag not in vary:
            raise SpaceError(
                f"--fix {flag}: not a flag that is varied{_near(flag, known)}. Varied are: "
                f"{', '.join(sorted(known))}."
            )
    for flag, values in vary.items():
        if flag in fix:
            raise SpaceError(f"{flag}: both --fix and --vary. Drop one.")
        if flag in known:
            continue
        if any(flag in (knob.flag, knob.name) for knob in KNOBS):
            raise SpaceError(f"--vary {flag}: {KINDS[around.server].label} has no such flag.")
        offered = around.offered
        if offered is not None and around.spelling(flag.partition(".")[0]) not in offered:
            near = _near(flag, {*known, *offered.flags})
            raise SpaceError(f"--vary {flag}: {around.program} has no such flag{near}.")
        if values is None:
            near = _near(flag, known)
            raise SpaceError(
                f"--vary {flag}: has no range of its own{near}. Give the values: --vary {flag}=A,B."
            )


def _check_rules(rules: Sequence[Rule], names: Iterable[str]) -> None:
    """Raises SpaceError for a constraint on what no config has: a slip of the pen would be silent."""
    known = {
        part for name in (*names, *(knob.name for knob in KNOBS)) for part in (name, name.rpartition(".")[2])
    }
    for rule in rules:
        for name in sorted(rule.compared | rule.when.keys()):
            if name not in known:
                raise SpaceError(f"--space: constraint {rule.holds!r}: no flag {name}{_near(name, known)}.")


def _explicit(name: str, values: tuple[Value, ...], baseline: Config, own: Sequence[Knob]) -> Knob:
    """Raises SpaceError for values that are none, and for words where the baseline is a number."""
    current = flatten(baseline).get(name)
    for value in values:
        odd = not isinstance(value, str | int | float) or (
            isinstance(value, float) and not math.isfinite(value)
        )
        if odd or (is_number(current) and not is_number(value)):
            wanted = "a number" if is_number(current) else "a number, a switch or a word"
            raise SpaceError(f"--vary {name}: {json.dumps(value)} is not {wanted}.")
    known = next((knob for knob in own if knob.name == name), Knob(name))
    every = (*values,) if current is None else (current, *values)
    return Knob(
        name,
        tuple(dict.fromkeys(every)),
        ordered=all(map(is_number, every)),
        default=known.default,
        needs=known.needs,
        needs_value=known.needs_value,
    )


def _near(flag: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(flag, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """``max_num_batched_tokens 512 -> 128, max_num_seqs 16 -> 12``."""
    return ", ".join(f"{flag} {render_value(a)} -> {render_value(b)}" for flag, (a, b) in changes.items())
