"""What changes for a command from one release of its server to another, by the facts of both wheels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from servers.command import ServerCommand
from servers.errors import UserError
from servers.facts import Flag, Metric, Releases, releases_of, version_of
from servers.kind import ServerKind
from servers.kinds import VLLM
from servers.metrics.catalog import METRICS, bare


@dataclass(frozen=True)
class Change:
    """``before``, ``after``: of the older and the newer release, in words."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class ReleaseChanges:
    """Flags as one types them; metrics as the source names them, without a suffix."""

    server: str
    older: str
    newer: str
    refused: tuple[str, ...]
    """Why the newer release does not start with the command."""
    defaults: tuple[Change, ...]
    """Of flags that the command does not give."""
    flags_gone: tuple[str, ...]
    """That the command does not give."""
    flags_new: tuple[str, ...]
    metrics_gone: tuple[Change, ...]
    metrics_new: tuple[str, ...]
    metrics_changed: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def release_changes(command: ServerCommand, older: str, newer: str) -> ReleaseChanges:
    """Raises UserError for a server without wheels, and for a release outside those that are known."""
    kind = command.kind or VLLM
    releases = releases_of(kind.name)
    if releases is None:
        raise UserError(f"{kind.label} has no wheels whose flags and metrics are known: vLLM and SGLang have")
    for version in (older, newer):
        _refuse_unknown(version, releases, kind)
    before, after = releases.flags_at(older), releases.flags_at(newer)
    given = {kind.spelling.own(name, release) for name in command.flags for release in (before, after)}
    gone_metrics, new_metrics, changed_metrics = _metrics(kind, releases, older, newer)
    return ReleaseChanges(
        kind.label,
        older,
        newer,
        tuple(_refusals(kind, command, older, newer)),
        tuple(
            Change(_typed(name), _default(before[name]), _default(after[name]))
            for name in sorted((before.keys() & after.keys()) - given)
            if before[name].default != after[name].default
        ),
        _typed_all(set(before) - given, after),
        _typed_all(after, before),
        gone_metrics,
        new_metrics,
        changed_metrics,
    )


def _refuse_unknown(version: str, releases: Releases, kind: ServerKind) -> None:
    first, last = releases.releases[0], releases.releases[-1]
    if re.match(r"v?\d+\.\d+", version) is None:
        raise UserError(f"{version!r} is no release of {kind.label}; write e.g. {last}")
    if not releases.versions[0] <= version_of(version) <= releases.versions[-1]:
        raise UserError(f"{kind.label} {version} is not known: releases from {first} to {last} are")


def _refusals(kind: ServerKind, command: ServerCommand, older: str, newer: str) -> Iterator[str]:
    for name, value in command.flags.items():
        was, now = (kind.spelling.own(name, kind.offered(version)) for version in (older, newer))
        if reason := kind.unavailable(name, newer, value):
            yield reason
        elif was != now:
            yield f"{kind.label} {newer} has no {_typed(was)}: write {_typed(now)}"


def _metrics(
    kind: ServerKind, releases: Releases, older: str, newer: str
) -> tuple[tuple[Change, ...], tuple[str, ...], tuple[Change, ...]]:
    """(gone, new, changed)."""
    before, after = (
        {name: fact for name, fact in releases.metrics_at(version).items() if not fact.hidden}
        for version in (older, newer)
    )
    hidden = releases.metrics_at(newer).keys() - after.keys()
    gone = []
    for name in sorted(before.keys() - after.keys()):
        instead = "shown with --show-hidden-metrics-for-version alone" if name in hidden else "gone"
        if other := _successor(kind, name, after):
            instead += f"; {other} instead"
        gone.append(Change(name, before[name].type, instead))
    changed = [
        Change(name, *told)
        for name in sorted(before.keys() & after.keys())
        for told in _differences(before[name], after[name])
    ]
    return tuple(gone), tuple(sorted(after.keys() - before.keys())), tuple(changed)


def _successor(kind: ServerKind, name: str, after: Mapping[str, Metric]) -> str | None:
    """The metric of the newer release that tells the same quantity."""
    for key, names in kind.metrics.items():
        own = [bare(METRICS[key], each) for each in names]
        if name in own:
            return next((each for each in own if each in after), None)
    return None


def _differences(before: Metric, after: Metric) -> Iterator[tuple[str, str]]:
    if before.type != after.type:
        yield before.type, after.type
    if set(before.labels) != set(after.labels):
        yield f"labels {', '.join(before.labels) or 'none'}", f"labels {', '.join(after.labels) or 'none'}"
    if before.buckets and after.buckets and before.buckets != after.buckets:
        yield f"buckets {_bounds(before.buckets)}", f"buckets {_bounds(after.buckets)}"


def _bounds(buckets: Iterable[float]) -> str:
    return " ".join(f"{bound:g}" for bound in buckets)


def _default(flag: Flag) -> str:
    """A wheel says no constant where the server chooses at its start, or where there is none."""
    return "none, or chosen at the start" if flag.default is None else str(flag.default)


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")


def _typed_all(names: Iterable[str], other: Mapping[str, Flag]) -> tuple[str, ...]:
    """Those that the ``other`` release takes in no form."""
    taken = {option for flag in other.values() for option in flag.options}
    return tuple(
        typed for name in sorted(names) if name not in other and (typed := _typed(name)) not in taken
    )
