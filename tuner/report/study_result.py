"""What a study came to, kept in it, so that every worker can say it and one that comes later too."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import optuna
from rich.console import Console

from servers.files import write_atomically
from tuner.report.facts import report_facts
from tuner.report.report import write_report
from tuner.study.loads import Advice, compare_loads
from tuner.study.optimize import BUSY_SHARE, Optimizer
from tuner.study.outcome import ESTIMATE, Outcome
from tuner.study.regression import KEY
from tuner.workers.machine import NOTABLE_SHARE

RESULT_KEY = "verdict"


@dataclass(frozen=True)
class StudyResult:
    exit_code: int
    lines: tuple[str, ...]
    """For people: the sentence, and how to launch it and go back."""
    report: str
    """The whole report, as JSON."""
    files: tuple[str, ...]
    """Where the report lies, on ``host``; "" for this one."""
    launched: int
    """Trials that the study had then: with more, another verdict is due."""
    host: str = ""
    problem: str = ""
    """Why there is no report."""

    def show(self, console: Console, as_json: bool) -> None:
        """On stdout; where the report lies on ``console``."""
        sys.stdout.write((self.report.rstrip() if as_json else "\n".join(self.lines)) + "\n")
        sys.stdout.flush()
        if self.problem:
            console.print(f"error: {self.problem}", markup=False, highlight=False, soft_wrap=True)
        where = f" on {self.host}" if self.host not in ("", platform.node()) else ""
        for file in self.files:
            console.print(f"report{where}: {file}", markup=False, highlight=False, soft_wrap=True)

    def brought_to(self, place: Path) -> Self:
        """With its report copied to ``place`` too; as it is where that lies on another machine.

        Raises OSError.
        """
        lying = [Path(file) for file in self.files]
        if self.host not in ("", platform.node()) or not all(file.is_file() for file in lying):
            return self
        for file in lying:
            write_atomically(place / file.name, [file.read_text(encoding="utf-8")])
        return replace(self, files=tuple(str(place / file.name) for file in lying))

    @property
    def reported(self) -> bool:
        """Whether its report still lies where it was written."""
        return bool(self.files) and all(Path(file).is_file() for file in self.files)

    def save(self, record: optuna.Study) -> None:
        record.set_user_attr(RESULT_KEY, asdict(self))

    @classmethod
    def of(cls, record: optuna.Study, launched: int | None = None) -> Self | None:
        """The study's verdict, by whichever worker; with ``launched`` only that on so many trials."""
        saved: Mapping[str, Any] | None = record.user_attrs.get(RESULT_KEY)
        if saved is None or launched not in (None, saved["launched"]):
            return None
        return cls(**{**saved, "lines": tuple(saved["lines"]), "files": tuple(saved["files"])})


def finish_study(optimizer: Optimizer) -> StudyResult:
    """Search, confirm and report; of a study's workers one confirms, and all return what that one found. So
    does a study that is called again and searches no further: the same runs would be taken for fresh ones.

    Raises SetupFailed, KeyboardInterrupt.
    """
    ended, record = optimizer.search(), optimizer.record

    def known() -> StudyResult | None:
        found = StudyResult.of(record, optimizer.launched())
        return found if found is not None and (optimizer.coordination.shared or found.reported) else None

    with optimizer.coordination.sole("verdict", lambda: known() is not None) as mine:
        if mine:
            outcome = optimizer.conclude(ended)
            result = conclude(optimizer, outcome, compare_loads(optimizer, outcome))
            if (other := known()) is not None:  # of a worker that took this one for dead meanwhile
                return other
            replace(result, host=platform.node(), problem="").save(record)
            return result
    found = known()
    assert found is not None, "one of the workers came to a verdict"
    return found


def conclude(optimizer: Optimizer, outcome: Outcome, advice: Advice | None = None) -> StudyResult:
    """The verdict on ``outcome``, with its report written once there is something to report."""
    if optimizer.bench.target.estimate:
        outcome = replace(outcome, sentence=f"{ESTIMATE}{outcome.sentence}")
    if (busy := optimizer.record.user_attrs.get(BUSY_SHARE, 0.0)) >= NOTABLE_SHARE:
        told = f". The machine was busy: other programs took {busy:.0%} of its processors' time"
        outcome = replace(outcome, sentence=outcome.sentence + told)
    if not optimizer.begun:
        lines, report = (outcome.sentence,), _report_text([], outcome)
        return StudyResult(outcome.exit_code, lines, report, files=(), launched=0)
    facts = report_facts(optimizer, outcome, advice)
    if facts.recommendation is not None:
        optimizer.record.set_user_attr(KEY, facts.recommendation.to_json())
    paths, problem = [], ""
    try:
        paths = write_report(facts)
    except OSError as error:  # such as a full disk: what was found is said all the same
        problem = f"the report cannot be written: {error}. All that was measured is kept in the study."
    return StudyResult(
        exit_code=facts.exit_code,
        lines=facts.lines,
        report=_report_text(paths, outcome),
        files=tuple(map(str, paths)),
        launched=optimizer.launched(),
        problem=problem,
    )


def _report_text(files: Sequence[Path], outcome: Outcome) -> str:
    """The report that was written, as JSON; what there is to say where none was."""
    written = next((file for file in files if file.suffix == ".json"), None)
    said = {"verdict": outcome.kind, "sentence": outcome.sentence}
    return written.read_text() if written else json.dumps(said)
