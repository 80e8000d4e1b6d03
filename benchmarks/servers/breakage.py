"""What a new release breaks: each metric, knob and playbook that lost what it reads or writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from doctor.diagnosis.playbook import Playbook, load_all
from doctor.metrics.signals import SIGNALS, metrics_of
from servers.facts import Flag, Releases
from servers.kind import ServerKind
from servers.metrics.catalog import ELSEWHERE, METRICS, bare
from tuner.space.knobs import knobs_of


@dataclass(frozen=True)
class _Release:
    kind: ServerKind
    flags: Mapping[str, Flag]
    keys: frozenset[str]
    """Of the catalog: metrics that it exposes unasked."""

    def takes(self, flag: str) -> bool:
        flag = "speculative_config" if flag == "num_speculative_tokens" else flag
        return self.kind.spelling.own(flag, self.flags) in self.flags

    def tells(self, signal: str) -> bool:
        return any(metrics_of(source) <= self.keys for source in SIGNALS[signal].sources)


def broken(kind: ServerKind, releases: Releases, older: str, newer: str) -> list[str]:
    """What ``older`` has and ``newer`` lacks of all that vtune reads and writes, a line for each."""
    before, after = (_release(kind, releases, version) for version in (older, newer))
    lines = [
        f"metric {key}: {newer} exposes none of {', '.join(kind.metrics[key])}"
        for key in sorted(before.keys - after.keys)
    ]
    lines += [
        f"knob {knob.flag}: {newer} has no such flag"
        for knob in knobs_of(kind.name)
        if before.takes(knob.flag) and not after.takes(knob.flag)
    ]
    for book in load_all():
        lines += [f"playbook {book.id}: {lost}" for lost in _lost(book, before, after)]
    return lines


def _release(kind: ServerKind, releases: Releases, version: str) -> _Release:
    exposed = {name for name, fact in releases.metrics_at(version).items() if not fact.hidden}
    keys = {
        key for key, names in kind.metrics.items() if any(bare(METRICS[key], n) in exposed for n in names)
    }
    return _Release(kind, releases.flags_at(version), frozenset(keys | ELSEWHERE.keys()))


def _lost(book: Playbook, before: _Release, after: _Release) -> Iterator[str]:
    asked = set(book.when.names).union(*(remedy.needs.names for remedy in book.remedies))
    for signal in sorted(asked & SIGNALS.keys()):
        if before.tells(signal) and not after.tells(signal):
            yield f"nothing is left that tells {signal}"
    written = {name for remedy in book.remedies for name in (*remedy.settings, *remedy.unset)}
    for flag in sorted((asked - SIGNALS.keys()) | written):
        if before.takes(flag) and not after.takes(flag):
            yield f"there is no {flag} any more"
