"""Experiments: how a playbook's symptom is brought about, and what stands for its cure.

``reproduce:`` in a playbook's front matter is one experiment, a list of them (a page has several cures), or
``none, because …`` where nothing can be shown. It says where it runs (``target``: the bundled engine,
or a device that is simulated), with which flags and under which load; the cure is what the doctor then
prescribes. Advice in words cannot be typed, so ``instead`` says what stands for it: other flags, another
load, more replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from doctor.diagnosis.expectation import ExpectationError, parse_expectation
from servers.errors import UserError

BUNDLED_MODEL = "bundled"
SIMULATED = "simulated:"
NONE = re.compile(r"none, because \S.*", re.DOTALL)
ROUTINGS = ("random", "least-loaded", "prefix-aware", "length-pooled")


class ExperimentError(UserError):
    """A ``reproduce:`` that cannot be run. The message says key, and what to write."""


@dataclass(frozen=True)
class RequestStream:
    """One kind of request, and how it arrives: ``clients`` that each ask again when they are answered, or
    ``rate`` per second whatever the server does. Lengths are tokens, (least, most)."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    clients: int | None = None
    rate: float | None = None
    even: bool = False
    """Of a rate: evenly spaced; else Poisson."""
    shared: int = 0
    """Tokens of the prompt that all prompts of a group have in common, after ``header`` own ones."""
    header: int = 0
    groups: int = 1
    think: float = 0.0
    """Seconds between a client's answer and its next request."""
    starts: float = 0.0
    """Seconds after the start of the load."""
    temperature: float = 0.0
    priority: int = 0


@dataclass(frozen=True)
class ExperimentSide:
    """Everything about one side of an experiment."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    load: tuple[RequestStream, ...] = ()
    replicas: int = 1
    routing: str = "least-loaded"
    timeout: float = 600.0
    """Seconds after which a client hangs up."""
    warmup: bool = True
    """Whether requests of every kind go before the load."""
    model: str | None = None
    """Where it is another than the experiment's."""

    def with_flags(self, changes: Mapping[str, Any]) -> ExperimentSide:
        """``changes`` laid over the flags; None drops one."""
        merged = {**self.engine, **changes}
        return replace(self, engine={name: value for name, value in merged.items() if value is not None})


@dataclass(frozen=True)
class Experiment:
    """One way to bring a symptom about, and to show what its cure does."""

    sick: ExperimentSide
    instead: Mapping[str, Any]
    """What the cure changes beside, or in place of, the flags that the doctor prescribes."""
    remedy: int | None
    """Which of the playbook's cures is tried; None: the first that the doctor prescribes."""
    target: str
    model: str
    seconds: float
    slo: str | None
    assume: Mapping[str, float]
    claims: Mapping[str, str]
    """What is expected of which figure, where the experiment sees more than ``expect`` says."""
    folklore: Mapping[str, str]
    """The same as a widespread belief has it, on a page that refutes it: ``instead`` does what it advises."""
    earlier: ExperimentSide | None
    """The time before, for rules that compare with a baseline."""
    acceptance: float
    """Of drafts, on a simulated device."""
    restart: bool
    """Whether every run gets a server of its own."""

    @property
    def simulated(self) -> bool:
        return self.target.startswith(SIMULATED)

    def cured(self, changes: Mapping[str, Any]) -> ExperimentSide:
        """The sick side with the prescribed flags, and with what stands for advice."""
        return overlaid(self.sick, self.instead).with_flags(changes)


@dataclass(frozen=True)
class Reproduction:
    """What a page says about its proof: experiments, or why there is none."""

    experiments: tuple[Experiment, ...] = ()
    why_none: str = ""


def read_reproduction(value: Any) -> Reproduction:
    """From the front matter. Raises ExperimentError."""
    if isinstance(value, str):
        if not NONE.fullmatch(value):
            raise ExperimentError(f"{value!r}: write an experiment, or 'none, because …'")
        return Reproduction(why_none=value.removeprefix("none, because ").strip())
    items = value if isinstance(value, list) else [value]
    if not items:
        raise ExperimentError("is empty: write an experiment, or 'none, because …'")
    return Reproduction(tuple(_experiment(_mapping("an experiment", item)) for item in items))


def overlaid(side: ExperimentSide, changes: Mapping[str, Any]) -> ExperimentSide:
    """``side`` with other flags laid over its own, and everything else replaced. Raises ExperimentError."""
    known = {**_SIDE, "engine": lambda key, value: dict(_mapping(key, value))}
    read = {key: _known(known, key)(key, value) for key, value in changes.items()}
    engine = read.pop("engine", {})
    return replace(side, **read).with_flags(engine)


def _experiment(given: Mapping[str, Any]) -> Experiment:
    side = {key: value for key, value in given.items() if key in {*_SIDE, "engine"} and key != "model"}
    rest = {key: _known(_OWN, key)(key, value) for key, value in given.items() if key not in side}
    sick = overlaid(ExperimentSide(), side)
    if not sick.load:
        raise ExperimentError("load: is missing; write a list of streams")
    earlier, instead = rest.get("earlier"), rest.get("instead", {})
    overlaid(sick, instead)
    experiment = Experiment(
        sick=sick,
        instead=instead,
        remedy=rest.get("remedy"),
        target=rest.get("target", BUNDLED_MODEL),
        model=rest.get("model", BUNDLED_MODEL),
        seconds=rest.get("seconds", 12.0),
        slo=rest.get("slo"),
        assume=rest.get("assume", {}),
        claims=rest.get("claims", {}),
        folklore=rest.get("folklore", {}),
        earlier=None if earlier is None else overlaid(sick, earlier),
        acceptance=rest.get("acceptance", 0.6),
        restart=rest.get("restart", False),
    )
    sides = [sick, experiment.cured({})]
    if not experiment.simulated and any(side.replicas > 1 or side.model for side in sides):
        raise ExperimentError("replicas, model: of a simulated device only; write target: simulated:h100")
    return experiment


def _stream(key: str, value: Any) -> RequestStream:
    given = dict(_mapping(key, value))
    read = {name: _known(_STREAM, name)(f"{key}.{name}", item) for name, item in given.items()}
    for name in ("name", "prompt", "output"):
        if name not in read:
            raise ExperimentError(f"{key}.{name}: is missing")
    stream = RequestStream(**read)
    if (stream.clients is None) == (stream.rate is None):
        raise ExperimentError(f"{key}: needs either clients or a rate")
    if stream.shared + stream.header >= stream.prompt[0] and stream.shared:
        raise ExperimentError(f"{key}: shared and header leave nothing of a prompt of {stream.prompt[0]}")
    return stream


def _known(known: Mapping[str, Callable[[str, Any], Any]], key: Any) -> Callable[[str, Any], Any]:
    if key not in known:
        raise ExperimentError(f"{key}: unknown key; known: {', '.join(known)}")
    return known[key]


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ExperimentError(f"{key}: must be a mapping, not {value!r}")
    return value


def _number(least: float) -> Callable[[str, Any], float]:
    def read(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ExperimentError(f"{key}: must be a number, {least:g} or more, not {value!r}")
        return float(value)

    return read


def _whole(least: int) -> Callable[[str, Any], int]:
    def read(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ExperimentError(f"{key}: must be a whole number, {least} or more, not {value!r}")
        return value

    return read


def _length(key: str, value: Any) -> tuple[int, int]:
    pair = value if isinstance(value, list) else [value, value]
    if len(pair) != 2:
        raise ExperimentError(f"{key}: write a length, or [least, most]")
    low, high = (_whole(1)(key, item) for item in pair)
    if low > high:
        raise ExperimentError(f"{key}: write [least, most], not [{low}, {high}]")
    return low, high


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ExperimentError(f"{key}: must be true or false, not {value!r}")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ExperimentError(f"{key}: must be text, not {value!r}")
    return value


def _where(key: str, value: Any) -> str:
    text = _text(key, value)
    if text != BUNDLED_MODEL and not text.startswith(SIMULATED):
        raise ExperimentError(f"{key}: write {BUNDLED_MODEL}, or {SIMULATED}h100 and the like")
    return text


def _routing(key: str, value: Any) -> str:
    if value not in ROUTINGS:
        raise ExperimentError(f"{key}: must be one of {', '.join(ROUTINGS)}")
    return str(value)


def _load(key: str, value: Any) -> tuple[RequestStream, ...]:
    if not isinstance(value, list) or not value:
        raise ExperimentError(f"{key}: must be a list of streams")
    return tuple(_stream(f"{key}[{number}]", item) for number, item in enumerate(value))


def _numbers(key: str, value: Any) -> dict[str, float]:
    return {str(name): _number(0)(f"{key}.{name}", item) for name, item in _mapping(key, value).items()}


def _expectations(key: str, value: Any) -> dict[str, str]:
    """Of signals or of the client's figures, which may name a class."""
    read = {str(name): str(text) for name, text in _mapping(key, value).items()}
    for name, text in read.items():
        try:
            parse_expectation(text)
        except ExpectationError as error:
            raise ExperimentError(f"{key}.{name}: {error}") from None
    return read


_STREAM: Mapping[str, Callable[[str, Any], Any]] = {
    "name": _text,
    "prompt": _length,
    "output": _length,
    "clients": _whole(1),
    "rate": _number(0.001),
    "even": _switch,
    "shared": _whole(0),
    "header": _whole(0),
    "groups": _whole(1),
    "think": _number(0),
    "starts": _number(0),
    "temperature": _number(0),
    "priority": _whole(0),
}
_SIDE: Mapping[str, Callable[[str, Any], Any]] = {
    "load": _load,
    "replicas": _whole(1),
    "routing": _routing,
    "timeout": _number(0.1),
    "warmup": _switch,
    "model": _text,
}
_OWN: Mapping[str, Callable[[str, Any], Any]] = {
    "target": _where,
    "model": _text,
    "seconds": _number(1),
    "slo": _text,
    "assume": _numbers,
    "remedy": _whole(0),
    "instead": _mapping,
    "claims": _expectations,
    "folklore": _expectations,
    "earlier": _mapping,
    "acceptance": _number(0),
    "restart": _switch,
}
