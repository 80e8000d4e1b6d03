"""What a study did not try, and why: by knob, and by what kept configs from being measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.runs.result import TrialResult
from tuner.search.crashes import Crashes, cause_of, codes_of
from tuner.search.inactive_knobs import inactive
from tuner.space.space import Space, config_key, render_value


@dataclass(frozen=True)
class KnobCoverage:
    """One axis: the values that a server was measured with, and those that none was."""

    name: str
    tried: tuple[str, ...]
    untried: tuple[str, ...]
    failed: tuple[str, ...]
    """Those with which servers only failed."""
    forbidden: tuple[str, ...]
    """Of the untried, those that would fail beside the best config's others: less than what failed does not
    suffice."""
    inactive: tuple[str, ...] = ()
    """Of the untried, those that change what no trial was ever short of."""


@dataclass(frozen=True)
class Coverage:
    knobs: tuple[KnobCoverage, ...]
    configs: int
    """How many the space holds."""
    launched: int
    refused: Mapping[str, int]
    """Rule -> proposals that broke it, which cost no launch."""
    failed: Mapping[str, int]
    """Why servers did not serve -> how often."""
    stopped: int
    """Trials that a short measurement sufficed for."""
    held: Mapping[str, Any]
    """Flags of the baseline that were not varied."""


def coverage(results: Sequence[TrialResult], space: Space) -> Coverage:
    """``results``: every trial of the study. The best config's neighbours stand for what is forbidden."""
    launched = [r for r in results if r.launched]
    served = [r for r in launched if r.status != "failed"]
    refused = Counter(
        rule
        for r in results
        if r.status == "refused"
        for rule in (_rule(part) for part in r.reason.split("; "))
    )
    broken = [r for r in launched if r.status == "failed"]
    failed = Counter(cause_of(r.reason) or r.reason.partition(":")[0] for r in broken)
    middle = next((r.config for r in reversed(served) if r.feasible), space.baseline)
    return Coverage(
        knobs=tuple(_knobs(launched, served, space, middle)),
        configs=space.size,
        launched=len({config_key(r.config) for r in launched}),
        refused=dict(refused.most_common()),
        failed=dict(failed.most_common()),
        stopped=sum(r.status == "stopped" for r in launched),
        held={flag: value for flag, value in space.baseline.items() if flag not in space.flags},
    )


def _rule(reason: str) -> str:
    """The rule alone, without the value that broke it."""
    flag, _, rest = reason.partition("=")
    text = rest.partition(": ")[2]
    return f"{flag}: {text}" if text else reason


def _knobs(
    launched: Sequence[TrialResult],
    served: Sequence[TrialResult],
    space: Space,
    middle: Mapping[str, Any],
) -> list[KnobCoverage]:
    crashes = Crashes.learnt(space, launched)
    found = []
    for axis in space.axes:
        ran = {space.params(r.config).get(axis.name) for r in served}
        tried_at_all = {space.params(r.config).get(axis.name) for r in launched}
        words: dict[str, list[str]] = {
            "tried": [],
            "untried": [],
            "failed": [],
            "forbidden": [],
            "inactive": [],
        }
        for value in axis.values:
            param, word = axis.param(value), render_value(value)
            if param in ran:
                words["tried"].append(word)
            elif param in tried_at_all:
                words["failed"].append(word)
            else:
                words["untried"].append(word)
                if crashes.forbids(space.moved(middle, axis, value)):
                    words["forbidden"].append(word)
                alone = space.params(space.moved(space.baseline, axis, value))
                if inactive(space, launched, np.array([codes_of(space, alone)]))[0]:
                    words["inactive"].append(word)
        found.append(KnobCoverage(axis.name, **{name: tuple(items) for name, items in words.items()}))
    return found
