"""What an experiment showed, its words for people, and its documented JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from doctor.diagnosis.expectation import Outcome
from loadgen.measure.estimator import Estimate
from loadgen.measure.rounding import significant
from loadgen.output.escape import printable

SCHEMA = "vtune.proof/1"
ProofVerdict = Literal["verified", "refuted", "inconclusive", "not reproduced"]
_LABELS = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "end-to-end",
    "p50": "P50",
    "p90": "P90",
    "p95": "P95",
    "p99": "P99",
    "kv": "KV usage",
    "slo": "SLO",
}


@dataclass(frozen=True)
class ProofMetric:
    """One figure on both sides. ``expected`` None: shown, not promised."""

    figure: str
    change: Estimate
    expected: str | None
    outcome: Outcome | None

    @property
    def words(self) -> str:
        """``ITL P99 -63 % [-71, -52]``."""
        return f"{label(self.figure)} {self.change.percent}"


@dataclass(frozen=True)
class Symptom:
    """What the doctor said of the sick side. ``rank`` 0: it did not find the playbook's symptom."""

    rank: int
    found: tuple[str, ...]
    """Ids of the findings that nothing else explains, in order."""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proof:
    """One experiment's outcome."""

    playbook: str
    experiment: int
    """Which of the page's experiments, from 0."""
    verdict: ProofVerdict
    folklore: bool
    """What was tried is folklore: refuting it is what the page promises."""
    remedy: int | None
    """Which of the page's cures was tried."""
    remedy_print: str
    """Fingerprint of that cure, so that a proof does not outlive the cure's wording."""
    prescribed: str
    """The flags as the doctor printed them, or what stood for its advice."""
    where: str
    """The target: bundled, or simulated:…"""
    model: str
    simulated: bool
    estimate: str
    """Of a simulated device: what its figures are estimated from."""
    load: str
    instead: str
    """What side B did otherwise, beside flags; "" where nothing."""
    before: str
    after: str
    """Launch commands of both sides."""
    pairs: int
    seconds: float
    symptom: Symptom
    rows: tuple[ProofMetric, ...]
    notes: tuple[str, ...] = ()
    engine: str = ""
    """Version of the engine that was measured."""
    invalid: bool = False
    """Whether the runs may not be believed; ``notes`` say why."""

    @property
    def verification(self) -> str:
        """What this says about the cure: verified, verified in simulation, refuted, or not verified."""
        good, bad = ("refuted", "verified") if self.folklore else ("verified", "refuted")
        if self.verdict == good:
            return "verified in simulation" if self.simulated else "verified"
        return "refuted" if self.verdict == bad else "not verified"

    @property
    def headline(self) -> str:
        """``verified: ITL P99 -63 % [-71, -52], TTFT P95 +6 % [-2, +14]``."""
        if self.verdict == "not reproduced":
            found = ", ".join(self.symptom.found) or "nothing"
            return f"not reproduced: the doctor found {found}"
        return headline(self.verdict, self.rows, self.simulated, self.folklore)

    def text(self) -> str:
        """Everything, for a terminal."""
        lines = [f"{self.playbook}, experiment {self.experiment + 1} on {self.where}"]
        if self.simulated:
            lines.append(f"  ESTIMATE, nothing was measured: {self.model} on {self.estimate}")
        lines += [f"  load: {self.load}", f"  before: {self.before}"]
        if self.symptom.rank:
            lines.append(f"  doctor: finding {self.symptom.rank} is {self.playbook}")
        elif self.symptom.found:
            lines.append(f"  doctor: found {', '.join(self.symptom.found)}")
        lines += [f"    {line}" for line in self.symptom.evidence]
        if self.prescribed:
            lines.append(f"  {'folklore' if self.folklore else 'cure'}: {self.prescribed}")
        if self.instead:
            lines.append(f"  side B: {self.instead}")
        if self.rows:
            lines += [f"  after:  {self.after}", f"  {self.pairs} interleaved pairs of {self.seconds:g} s:"]
            lines += [f"    {line}" for line in proof_table(self.rows)]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(map(printable, [*lines, self.headline]))

    def to_json(self) -> dict[str, Any]:
        """Plain values; nan and infinity become None."""
        found: dict[str, Any] = finite(
            {"schema": SCHEMA, **asdict(self), "standing": self.verification, "headline": self.headline}
        )
        return found


def headline(
    verdict: ProofVerdict, rows: Sequence[ProofMetric], simulated: bool, folklore: bool = False
) -> str:
    """A verdict with the figures that were promised; a simulation is called one."""
    what: str = verdict
    if folklore and verdict in ("refuted", "verified"):
        what += " (the folklore)"
    if simulated and verdict in ("refuted", "verified"):
        what += " in simulation"
    shown = [row.words for row in rows if row.expected is not None]
    return f"{what}: {', '.join(shown)}"


def label(figure: str) -> str:
    """``itl_p99{class=chat}`` as people say it."""
    name, brace, cls = figure.partition("{class=")
    words = " ".join(_LABELS.get(word, word) for word in name.split("_"))
    return words + (f" of {cls.removesuffix('}')}" if brace else "")


def proof_table(rows: Sequence[ProofMetric]) -> list[str]:
    """Aligned lines: figure, both sides, change, what was expected and whether it came."""
    cells = [
        (
            label(row.figure),
            metric_value(row.figure, row.change.a),
            metric_value(row.figure, row.change.b),
            row.change.percent if not math.isnan(row.change.ratio) else "",
            "" if row.expected is None else f"expected: {row.expected} ({row.outcome})",
        )
        for row in rows
    ]
    widths = [max(len(cell[n]) for cell in cells) for n in range(5)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def metric_value(figure: str, value: float) -> str:
    """A value with its unit: latencies in ms, the rest as it is."""
    from doctor.metrics.signals import SIGNALS

    name = figure.partition("{")[0]
    if math.isnan(value):
        return "n/a"
    seconds = name in SIGNALS and SIGNALS[name].unit == "s"
    client = name.split("_")[0] in ("ttft", "itl", "tpot", "e2e", "max") and not name.endswith("_slo")
    return f"{significant(1e3 * value)} ms" if seconds or client else significant(value)


def finite(value: Any) -> Any:
    """``value`` with None for every number that JSON cannot write."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
