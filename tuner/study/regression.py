"""``--baseline``: has the optimum moved since an earlier study?

The earlier study's recommendation becomes the baseline, so that the confirmation measures both side by side
on fresh runs. The optimum moved when those prove another config better, or when the old one misses the SLO.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import optuna

from servers.errors import UserError
from servers.slo.bounds import format_value, metric_label
from servers.slo.objective import Slo
from tuner.runs.result import Measurement, Reading, TrialResult, without_nan
from tuner.study.confirmation import words
from tuner.study.outcome import ESTIMATE, Outcome
from tuner.workers.storage import StorageError, open_storage, sqlite_file

SHOWN = ("itl_es99", "itl_p99", "ttft_es95", "ttft_p95", "throughput")
"""Compared with what was measured then, beside the objective."""
KEY = "recommendation"
"""Where a study keeps it: among the study's attributes, and in the report."""


class PreviousError(UserError):
    """``--baseline`` names something that recommends nothing; the message says what to give."""


@dataclass(frozen=True)
class Recommendation:
    """What a study came to: the flags to use, which may be the user's own."""

    study: str
    where: str
    """As ``--baseline`` gave it; "" for a study's own."""
    sentence: str
    flags: Mapping[str, Any]
    figures: Mapping[str, Reading]
    """Of these flags, on fresh runs where there were any."""
    load: str
    job: Mapping[str, Any]

    @property
    def slo(self) -> str:
        """What the study was for, as ``--slo`` gave it."""
        return str(self.job["slo"])

    def to_json(self) -> dict[str, Any]:
        return dict(without_nan(asdict(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        figures = Measurement.from_json({"readings": data["figures"], "window": 0.0, "verdict": ""})
        return cls(**{**data, "figures": figures.readings})


def recommendation(
    study: str,
    outcome: Outcome,
    baseline: TrialResult,
    flags: Mapping[str, Any],
    load: str,
    job: Mapping[str, Any],
) -> Recommendation | None:
    """What ``outcome`` recommends, started with ``flags``; None where it recommends nothing."""
    if outcome.kind not in ("better", "baseline"):
        return None
    confirmation = outcome.confirmation
    if confirmation is not None:
        measured: Measurement | None = confirmation.candidate if outcome.best else confirmation.baseline
    else:
        measured = (outcome.best or baseline).measurement
    figures = measured.readings if measured else {}
    return Recommendation(study, "", outcome.sentence, dict(flags), figures, load, without_nan(job))


def read_previous(where: str, runs: Path) -> Recommendation:
    """The recommendation of an earlier study. Raises PreviousError.

    ``where``: an output directory or its report.json, the name of a study under ``runs``, or
    ``STORAGE-URL#STUDY``.
    """
    url, separator, name = where.rpartition("#")
    data = _from_storage(where, url, name) if separator and "://" in url else _from_report(where, runs)
    try:
        return Recommendation.from_json({**data, "where": where})
    except (KeyError, TypeError, AttributeError):
        raise PreviousError(f"--baseline {where}: was made by another version of vtune") from None


def _from_storage(where: str, url: str, name: str) -> Mapping[str, Any]:
    file = sqlite_file(url)
    if file is not None and not file.exists():  # it would be made
        raise PreviousError(f"--baseline {where}: there is no file {file}")
    try:
        storage = open_storage(url)
    except StorageError as error:
        raise PreviousError(str(error).replace("--storage", "--baseline", 1)) from None
    try:
        attributes = optuna.load_study(study_name=name, storage=storage).user_attrs
    except KeyError:
        known = ", ".join(optuna.get_all_study_names(storage)) or "none"
        raise PreviousError(f"--baseline {where}: no study {name} in there. It has: {known}") from None
    finally:
        storage.remove_session()
    if not attributes.get(KEY):
        raise PreviousError(
            f"--baseline {where}: that study has recommended nothing. Finish it, or name another"
        )
    found: Mapping[str, Any] = attributes[KEY]
    return found


def _from_report(where: str, runs: Path) -> Mapping[str, Any]:
    path = next((p for p in (Path(where), runs / where) if p.exists()), None)
    if path is None:
        raise PreviousError(
            f"--baseline {where}: no such file, directory or study. Give the --out directory of an earlier "
            f"study or its report.json, its name where it lies in {runs}, or STORAGE-URL#STUDY"
        )
    file = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PreviousError(f"--baseline {file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise PreviousError(
            f"--baseline {file}: no JSON ({error}). Give the study's directory, or the report.json in it"
        ) from None
    if not isinstance(report, dict) or not report.get(KEY):
        said = report.get("sentence") if isinstance(report, dict) else None
        raise PreviousError(f"--baseline {file}: recommends nothing" + (f" ({said})" if said else ""))
    found: Mapping[str, Any] = report[KEY]
    return found


@dataclass(frozen=True)
class Regression:
    """Whether the optimum moved."""

    previous: Recommendation
    moved: bool
    sentence: str
    missed: tuple[str, ...]
    """Bounds that the old flags miss on today's load, each with its value and interval."""
    figures: tuple[tuple[str, Reading, Reading], ...]
    """(metric, the old flags then, the old flags today)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "previous": self.previous.to_json(),
            "moved": self.moved,
            "sentence": self.sentence,
            "missed": list(self.missed),
            "figures": [
                {"metric": metric, "then": without_nan(asdict(then)), "today": without_nan(asdict(now))}
                for metric, then, now in self.figures
            ],
        }


def compare_with(
    previous: Recommendation, outcome: Outcome, baseline: TrialResult, slo: Slo
) -> Regression | None:
    """The verdict on ``previous``, whose flags are the study's baseline; None for an interrupted study."""
    if outcome.kind == "interrupted":
        return None
    confirmation, estimate = outcome.confirmation, ESTIMATE * outcome.sentence.startswith(ESTIMATE)
    outcome = replace(outcome, sentence=outcome.sentence.removeprefix(ESTIMATE))
    today = confirmation.baseline if confirmation else baseline.measurement
    missed = _missed(slo, today) if today else (baseline.reason or "it does not serve",)
    better = outcome.kind == "better"
    who = f"{estimate}The optimum of {previous.study}"
    if previous.slo != slo.text:
        who += f", which was for the SLO {previous.slo},"
    if missed:
        sentence = f"{who} moved: its flags miss the SLO today ({'; '.join(missed)}). {_instead(outcome)}"
    elif better:
        sentence = f"{who} moved: {_instead(outcome)}"
    else:
        sentence = f"{who} has not moved: its flags hold the SLO today, and {_stands(outcome, slo)}"
    return Regression(previous, bool(missed) or better, sentence, missed, _figures(previous, today, slo))


def _instead(outcome: Outcome) -> str:
    return outcome.sentence if outcome.kind == "better" else f"Nothing better was found: {outcome.sentence}"


def _stands(outcome: Outcome, slo: Slo) -> str:
    """What was put against the old flags."""
    if outcome.confirmation is None:
        return "no other config measured better"
    change = outcome.confirmation.change(slo.objective.name)
    size = f"{metric_label(change.figure)} {words(change)}"
    return f"the best other config is not proven better on fresh runs ({size})"


def _missed(slo: Slo, measured: Measurement) -> tuple[str, ...]:
    found = []
    for bound in slo.bounds:
        reading = measured.reading(bound.metric, bound.cls)
        if bound.violation(reading.value) > 0:
            found.append(f"{metric_label(bound.name)} {show(bound.metric, reading)}, the bound is {bound}")
    return tuple(found)


def _figures(
    previous: Recommendation, today: Measurement | None, slo: Slo
) -> tuple[tuple[str, Reading, Reading], ...]:
    names = dict.fromkeys((slo.objective.name, *SHOWN))
    if previous.slo != slo.text:  # what counts as good was another thing then
        names.pop("goodput", None)
    now = today.readings if today else {}
    return tuple(
        (name, previous.figures[name], now[name])
        for name in names
        if {name} <= now.keys() & previous.figures.keys()
    )


def show(metric: str, reading: Reading) -> str:
    """``138 ms (95 % interval 121 … 160 ms)``; without an interval, the samples behind it."""
    value = format_value(metric, reading.value)
    if reading.low == reading.low and reading.high == reading.high:
        low, high = (format_value(metric, edge) for edge in (reading.low, reading.high))
        return f"{value} (95 % {low} … {high})"
    return f"{value} (n={reading.n})" if reading.n else value
