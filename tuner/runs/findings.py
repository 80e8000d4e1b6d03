"""What the doctor says of a trial: every rule judged on the trial's own scrapes and flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.finding import Finding
from doctor.diagnosis.judged_objectives import JUDGED, JudgedObjectives
from doctor.diagnosis.playbook import PlaybookError
from doctor.metrics.sources import Scrapes
from servers.errors import SourceError
from servers.kind import ServerKind
from servers.kinds import VLLM
from servers.slo.bounds import Bound, family_of


@dataclass(frozen=True)
class TrialFinding:
    """One rule that held while a trial was loaded; what of the doctor's finding a study keeps."""

    id: str
    """The playbook's: see ``vtune playbook show ID``."""
    severity: str
    """info, warning or critical."""
    title: str
    evidence: Mapping[str, float]
    """Signal -> value, in the signal's unit (seconds, a share, tokens, …)."""
    prescriptions: tuple[Mapping[str, Any], ...] = ()
    """New values of flags, in the order in which the playbook gives them; None drops a flag."""
    suppressed_by: str | None = None
    """The finding that explains this one."""
    assumed: tuple[str, ...] = ()
    """Flags that the prescriptions rest on and that neither was given nor the server told."""

    @classmethod
    def of(cls, finding: Finding) -> Self:
        return cls(
            id=finding.id,
            severity=finding.severity,
            title=finding.title,
            evidence={item.signal: item.value for item in finding.evidence},
            prescriptions=tuple(dict(p.changes) for p in finding.prescriptions if p.changes),
            suppressed_by=finding.suppressed_by,
            assumed=tuple(dict.fromkeys(name for p in finding.prescriptions for name in p.uncertain)),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        kinds = {name: tuple(data.get(name, ())) for name in ("prescriptions", "assumed")}
        return cls(**{**data, **kinds})


def examine(
    scrapes: Sequence[tuple[int, str]],
    flags: Mapping[str, Any],
    bounds: Sequence[Bound] = (),
    kind: ServerKind | None = VLLM,
) -> tuple[tuple[TrialFinding, ...], str]:
    """(findings, causes first; why there are none where the scrapes cannot be judged, else "").

    ``scrapes``: (unix ms, exposition text) of the whole trial. ``flags``: those that the server runs with.
    ``bounds``: the SLO's; what the doctor has no objective for is left out, and where it has none of them
    its own lenient defaults count.
    """
    try:
        source = Scrapes(sorted(dict(scrapes).items()), "trial")
        found = diagnose(source, flags, objectives(bounds), kind=kind)
    except (SourceError, PlaybookError) as error:
        return (), str(error)
    return tuple(TrialFinding.of(finding) for finding in found.findings), ""


def objectives(bounds: Sequence[Bound]) -> JudgedObjectives:
    """The bounds that the doctor can judge. Those of one class are left out: a server's metrics have none."""
    return JudgedObjectives.of(b for b in bounds if b.cls is None and family_of(b.metric) in JUDGED)
