"""What the doctor prescribes, as configs to try first: of the baseline's own trial, or of a saved report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from doctor.finding import SCHEMA
from tuner.runs.findings import TrialFinding
from tuner.space.space import SPECULATION, Space

MOST = 3
"""Prescriptions that are tried before the search decides itself."""


class FindingsError(ValueError):
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
    """(flags, why), at most MOST: those that the space searches, moved onto its ladders, and that no rule
    refuses. What is to be dropped other than speculation stays.
    """
    seen: list[dict[str, Any]] = [dict(space.baseline)]
    for item in items:
        changes = {
            flag: value
            for flag, value in item["set"].items()
            if flag in space.flags and (value is not None or flag == SPECULATION)
        }
        config = space.snap({**space.baseline, **changes})
        if config in seen or space.refusals(config):
            continue
        seen.append(config)
        yield changes, f"doctor: {item['id']}"
        if len(seen) > MOST:
            return
