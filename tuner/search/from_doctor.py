"""What the doctor prescribes, of the baseline's own trial or of a saved report: configs to try first, and the
side of the baseline to search first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from doctor.diagnosis.finding import SCHEMA
from servers.errors import UserError
from tuner.runs.findings import TrialFinding
from tuner.search.crashes import Codes, codes_of
from tuner.space.space import SPECULATION, Space

MAX_PRESCRIPTIONS = 3
"""Prescriptions that are tried before the search decides itself."""


@dataclass(frozen=True)
class Hints:
    """Where a doctor's prescriptions point to: up to ``until`` launches only that side of the baseline is
    searched.

    Not for good, for a finding may be wrong. ``directions``: by axis, +1 for more.
    """

    directions: Mapping[str, int]
    until: int

    @classmethod
    def of(cls, items: Iterable[Mapping[str, Any]], space: Space, until: int) -> Hints:
        """``items``: as :func:`of_trial` gives them. What two of them pull to both sides is left alone."""
        own = space.params(space.baseline)
        told: dict[str, set[int]] = {}
        for item in items:
            wanted = space.params({**space.baseline, **_searched(item["set"], space)})
            for axis in space.axes:
                a, b = own.get(axis.name), wanted.get(axis.name)
                if axis.ordered and isinstance(a, int) and isinstance(b, int) and a != b:
                    told.setdefault(axis.name, set()).add(1 if b > a else -1)
        return cls({name: min(signs) for name, signs in told.items() if len(signs) == 1}, until)

    def allow(self, space: Space, codes: Codes) -> NDArray[np.bool_]:
        """Which of (m, d) configs are not on the other side. ``codes``: see ``crashes.codes_of``."""
        own = codes_of(space, space.params(space.baseline))
        sign = np.array([self.directions.get(axis.name, 0) for axis in space.axes])
        against = (sign * (codes - own) < 0) & (codes >= 0) & (own >= 0)
        return ~against.any(axis=1)


class FindingsError(UserError):
    """``--from-doctor`` names a file that is not the doctor's."""


def read_findings(path: Path) -> tuple[dict[str, Any], ...]:
    """``vtune doctor --format json``: id and new flags of every prescription, causes first.

    Raises FindingsError.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FindingsError(f"--from-doctor {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FindingsError(f"--from-doctor {path}: not JSON ({error}). {_MAKE}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else None
        raise FindingsError(f"--from-doctor {path}: schema {schema!r}, expected {SCHEMA!r}. {_MAKE}")
    try:
        return tuple(
            {"id": str(finding["id"]), "set": dict(prescription["set"])}
            for finding in data["findings"]
            if finding.get("suppressed_by") is None
            for prescription in finding["prescriptions"]
            if prescription["set"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FindingsError(f"--from-doctor {path}: a finding lacks {error}. {_MAKE}") from None


_MAKE = "Make it with 'vtune doctor … --format json > findings.json'."


def of_trial(findings: Iterable[TrialFinding]) -> Iterator[dict[str, Any]]:
    """The same of a trial's own findings."""
    for finding in findings:
        if finding.suppressed_by is None:
            yield from ({"id": finding.id, "set": dict(changes)} for changes in finding.prescriptions)


def prescribed(items: Iterable[Mapping[str, Any]], space: Space) -> Iterator[tuple[dict[str, Any], str]]:
    """(flags, why), at most MAX_PRESCRIPTIONS: those that the space searches, moved onto its ladders, and
    that no rule refuses. What is to be dropped other than speculation stays.
    """
    seen: list[dict[str, Any]] = [dict(space.baseline)]
    for item in items:
        changes = _searched(item["set"], space)
        config = space.snap({**space.baseline, **changes})
        if config in seen or space.refusals(config):
            continue
        seen.append(config)
        yield changes, f"doctor: {item['id']}"
        if len(seen) > MAX_PRESCRIPTIONS:
            return


def _searched(changes: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """Those of flags that the space searches. What is to be dropped other than speculation stays."""
    return {
        flag: value
        for flag, value in changes.items()
        if flag in space.flags and (value is not None or flag == SPECULATION)
    }
