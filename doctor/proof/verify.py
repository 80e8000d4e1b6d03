"""The proof of a cure: bring the symptom about, let the doctor find it, do what it says, measure in pairs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.experiment import Experiment, ExperimentError, ExperimentSide
from doctor.diagnosis.finding import Diagnosis, Finding, Prescription
from doctor.diagnosis.judged_objectives import judged_objectives
from doctor.diagnosis.playbook import Playbook
from doctor.diagnosis.quantity import quantity
from doctor.diagnosis.verification_status import fingerprint
from doctor.metrics.sources import Scrapes
from doctor.proof.experiment_load import describe_load, schedule
from doctor.proof.experiment_target import Stage, opened
from doctor.proof.proof_metrics import is_invalid, notes_of, rows_of, verdict_of
from doctor.proof.result import Proof, Symptom
from loadgen.compare import Comparison, compare
from loadgen.measure.record import Records
from loadgen.plan.workload import Schedule
from servers.flags.words import render
from servers.kinds import BUNDLED

_SYMPTOM_SEED = 0
Tell = Callable[[str], None]


class Interrupted(Exception):
    """A stop was asked for; nothing is left running."""


@dataclass(frozen=True)
class Terms:
    """How much is measured. ``seconds`` None: as the experiment says."""

    pairs: int = 4
    seconds: float | None = None
    seed: int = 0


def prove(
    book: Playbook,
    number: int,
    stage: Stage,
    terms: Terms,
    *,
    tell: Tell = lambda _: None,
    stop: threading.Event | None = None,
) -> Proof:
    """Carry out the experiment ``number`` of a page on ``stage``.

    Raises TargetFailed, ExperimentError, Interrupted.
    """
    return _Trial(book, number, stage, terms, tell, stop or threading.Event()).proof()


def promised(book: Playbook, experiment: Experiment) -> Mapping[str, str]:
    """What an experiment is judged by: its own claims, where the page's do not fit it."""
    return experiment.folklore or experiment.claims or book.expect


class _Trial:
    """One experiment on its way."""

    def __init__(
        self, book: Playbook, number: int, stage: Stage, terms: Terms, tell: Tell, stop: threading.Event
    ) -> None:
        self.book, self.number, self.stage, self.terms = book, number, stage, terms
        self.experiment: Experiment = book.reproduction.experiments[number]
        self.seconds = terms.seconds or self.experiment.seconds
        self.tell, self.stop = tell, stop

    def proof(self) -> Proof:
        sick, diagnosis = self.experiment.sick, None
        if self.book.when.parts:
            diagnosis = self._diagnosis()
        symptom, prescription = self._found(diagnosis)
        folklore = bool(self.experiment.folklore)
        changes: Mapping[str, Any] = {} if prescription is None or folklore else prescription.changes
        cured = self.experiment.cured(changes)
        blank = self._blank(symptom, prescription, cured)
        if self.book.when.parts and (not symptom.rank or (prescription is None and not folklore)):
            why = () if not symptom.rank else (self._not_prescribed(diagnosis),)
            return replace(blank, notes=why)
        if cured == sick:
            raise ExperimentError(
                f"{self.book.id}: nothing stands for the advice; say under instead: what to do otherwise"
            )
        found = self._compare(cured)
        rows = rows_of(
            found.pairs, promised(self.book, self.experiment), judged_objectives(self.experiment.slo).values
        )
        invalid = is_invalid(found, self.stage.simulated)
        return replace(
            blank,
            verdict=verdict_of(rows, len(found.pairs), invalid),
            rows=rows,
            pairs=len(found.pairs),
            notes=notes_of(found, self.stage.simulated),
            invalid=invalid,
        )

    # The symptom.

    def _diagnosis(self) -> Diagnosis:
        earlier = self.experiment.earlier
        before = None if earlier is None else self._run(earlier, "the time before")
        records = self._run(self.experiment.sick, "the symptom")
        return diagnose(
            Scrapes(records.scrapes, self.stage.name),
            self._flags(self.experiment.sick),
            self.experiment.slo,
            assume=self.experiment.assume,
            kind=None if self.stage.simulated else BUNDLED,
            baseline=None if before is None else Scrapes(before.scrapes, "the time before"),
            baseline_flags=None if earlier is None else self._flags(earlier),
        )

    def _flags(self, side: ExperimentSide) -> dict[str, Any]:
        return {**self.stage.defaults, **side.engine}

    def _run(self, side: ExperimentSide, what: str) -> Records:
        self.tell(what)
        with opened(self.stage, side) as server:
            records = server.run(self._schedule(side, _SYMPTOM_SEED), stop=self.stop)
        self._raise_if_stopped()
        return records

    def _found(self, diagnosis: Diagnosis | None) -> tuple[Symptom, Prescription | None]:
        if diagnosis is None:
            return Symptom(0, ()), None
        roots = [finding for finding in diagnosis.findings if finding.suppressed_by is None]
        ids = tuple(dict.fromkeys(finding.id for finding in roots))
        rank = ids.index(self.book.id) + 1 if self.book.id in ids[:2] else 0
        if not rank:
            return Symptom(0, ids), None
        finding = next(finding for finding in roots if finding.id == self.book.id)
        return Symptom(rank, ids, _evidence(finding)), self._prescription(finding)

    def _prescription(self, finding: Finding) -> Prescription | None:
        wanted = self.experiment.remedy
        if wanted is not None:
            return next((p for p in finding.prescriptions if p.remedy == wanted), None)
        with_flags = [p for p in finding.prescriptions if p.changes]
        return next(iter([*with_flags, *finding.prescriptions]), None)

    def _not_prescribed(self, diagnosis: Diagnosis | None) -> str:
        given = [] if diagnosis is None else [
            p.args or p.text for f in diagnosis.findings if f.id == self.book.id for p in f.prescriptions
        ]  # fmt: skip
        return f"the doctor prescribed something else: {'; '.join(given) or 'nothing'}"

    # The proof.

    def _schedule(self, side: ExperimentSide, seed: int) -> Schedule:
        return schedule(side.load, seed=seed, seconds=self.seconds, warmup=side.warmup)

    def _compare(self, cured: ExperimentSide) -> Comparison:
        sick = self.experiment.sick
        same = (sick.load, sick.warmup) == (cured.load, cured.warmup)
        first = 1 + self.terms.seed
        found = compare(
            self.stage,
            {"side": sick},
            {"side": cured},
            lambda seed: self._schedule(sick, seed),
            b_schedule_for=None if same else lambda seed: self._schedule(cured, seed),
            seeds=range(first, first + self.terms.pairs),
            metrics=("failed",),
            restart=self.experiment.restart,
            progress=lambda done, planned, what: self.tell(f"{what} (run {done + 1} of {planned})"),
            stop=self.stop,
        )
        self._raise_if_stopped()
        return found

    def _raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise Interrupted

    def _blank(self, symptom: Symptom, prescription: Prescription | None, cured: ExperimentSide) -> Proof:
        """Everything but what the pairs will say."""
        experiment, sick = self.experiment, self.experiment.sick
        folklore = bool(experiment.folklore)
        remedy = experiment.remedy if prescription is None else prescription.remedy
        if folklore and remedy is None:
            remedy = 0
        words = _otherwise(sick, cured)
        said = "" if prescription is None else prescription.args or prescription.text
        return Proof(
            playbook=self.book.id,
            experiment=self.number,
            verdict="not reproduced",
            folklore=folklore,
            remedy=remedy,
            remedy_print="" if remedy is None else fingerprint(self.book, remedy),
            prescribed=(self.book.refutes or "") if folklore else said,
            where=self.stage.name,
            model=sick.model or self.stage.model,
            simulated=self.stage.simulated,
            estimate=getattr(self.stage.target_of(sick), "estimate", ""),
            load="; ".join(map(describe_load, sick.load)) + f"; {self.seconds:g} s",
            instead=words,
            before=self.stage.launch_command({"side": sick}),
            after=self.stage.launch_command({"side": cured}),
            pairs=0,
            seconds=self.seconds,
            symptom=symptom,
            rows=(),
            engine=engine_version(),
        )


def engine_version() -> str:
    """Of this package: the engine is bundled."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vtune-llm")
    except PackageNotFoundError:
        return "unknown"


def _evidence(finding: Finding) -> tuple[str, ...]:
    return tuple(f"{item.signal} = {quantity(item.value, item.unit)}" for item in finding.evidence)


def _otherwise(sick: ExperimentSide, cured: ExperimentSide) -> str:
    """What side B does otherwise, beside flags."""
    words = []
    if sick.load != cured.load:
        words.append("; ".join(map(describe_load, cured.load)))
    if sick.replicas != cured.replicas:
        words.append(f"{cured.replicas} replicas instead of {sick.replicas}")
    if sick.routing != cured.routing:
        words.append(f"{cured.routing} routing instead of {sick.routing}")
    if sick.timeout != cured.timeout:
        words.append(f"clients wait {cured.timeout:g} s instead of {sick.timeout:g} s")
    if sick.warmup != cured.warmup:
        words.append("warmed up" if cured.warmup else "not warmed up")
    if sick.engine != cured.engine:
        words.append("flags: " + " ".join(render(cured.engine)) if words else "")
    return "; ".join(filter(None, words))
