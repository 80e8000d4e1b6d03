"""A diagnosis as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from doctor.diagnosis.cost import total
from doctor.diagnosis.finding import CannotTell, Diagnosis, Evidence, Finding, Prescription
from doctor.diagnosis.fleet import Fleet
from doctor.diagnosis.objective_judgement import ObjectiveJudgement
from doctor.diagnosis.quantity import quantity
from loadgen.measure.rounding import significant
from loadgen.output.escape import printable
from servers.metrics.identity import PLACE
from servers.reading import Missing
from servers.slo.bounds import Bound, format_value, metric_label

_STATUS_WORDS = {
    "verified": "verified in our lab",
    "verified in simulation": "verified in simulation",
    "refuted": "refuted in our lab",
    "not verified": "not verified",
}
"""Each verification status as a reader sees it."""
_MARK = {"critical": "CRITICAL", "warning": "WARNING", "info": "INFO"}


def as_text(diagnosis: Diagnosis, *, queries: bool = True) -> str:
    """The whole report; ``queries`` prints the PromQL behind every figure."""
    lines = [*_header(diagnosis), *fleet_lines(diagnosis.fleets), ""]
    for number, alike in enumerate(grouped(diagnosis.findings), start=1):
        lines += [*finding_lines(number, alike, queries), ""]
    if sentence := verdict(diagnosis):
        lines += [sentence, *figure_lines(diagnosis), ""]
    if missing := cannot_tell_lines(diagnosis.cannot_tell):
        lines += ["Cannot tell:", *(f"  {line}" for line in missing), ""]
    lines += [f"note: {note}" for note in diagnosis.notes]
    if diagnosis.not_judged:
        lines.append(f"Not judged: {', '.join(diagnosis.not_judged)}.")
    return "\n".join(map(printable, lines)) + "\n"


def _header(diagnosis: Diagnosis) -> list[str]:
    server = diagnosis.family + (f" (says {diagnosis.version})" if diagnosis.version else "")
    engines = diagnosis.engines
    return [
        f"{diagnosis.source}: {server}, {len(engines)} engine{'s' if len(engines) != 1 else ''}, "
        + window_words(diagnosis),
        "Objectives:",
        *(f"   {line}" for line in objective_lines(diagnosis.objectives)),
    ]


def window_words(diagnosis: Diagnosis) -> str:
    return "one scrape" if diagnosis.since_start else f"window {significant(diagnosis.window_s)} s"


def objective_lines(judged: Iterable[ObjectiveJudgement]) -> list[str]:
    """Each objective with its figure: of several engines, with the one that is furthest from it."""
    by_bound: dict[Bound, list[ObjectiveJudgement]] = {}
    for one in judged:
        by_bound.setdefault(one.bound, []).append(one)
    return [f"{_objective(own[0])}: {_judged(own)}" for own in by_bound.values()]


def _objective(judged: ObjectiveJudgement) -> str:
    bound = judged.bound
    whose = "default" if judged.origin == "default" else "yours"
    return f"{metric_label(bound.metric)} {bound.op[0]} {format_value(bound.metric, bound.limit)} ({whose})"


_JUDGED_WORDS = {False: "MISSED", None: "not judged", True: "held"}


def _judged(own: Sequence[ObjectiveJudgement]) -> str:
    if len(own) == 1:
        return f"{_JUDGED_WORDS[own[0].held]}, {_figure(own[0])}"
    parts = []
    for held, word in _JUDGED_WORDS.items():
        if alike := [one for one in own if one.held is held]:
            worst = max(alike, key=lambda one: one.excess)
            parts.append(
                f"{word} on {len(alike)} of {len(own)} engines ({_figure(worst)} on {worst.instance})"
            )
    return "; ".join(parts)


def _figure(judged: ObjectiveJudgement) -> str:
    """The value, the figure it is of where that is not the objective's own, and why it decides nothing."""
    if isinstance(judged.reading, Missing):
        return judged.remark
    value = format_value(judged.bound.metric, judged.reading.point)
    value = value if judged.is_own else f"{metric_label(judged.signal)} {value}"
    return f"{value} ({judged.remark})" if judged.remark else value


def fleet_lines(fleets: Iterable[Fleet]) -> list[str]:
    """Each fleet's figures, with the engines that have the lowest and the highest of their own."""
    lines = []
    for fleet in fleets:
        lines.append(f"Fleet of {fleet.engines} engines{f', {fleet.model}' if fleet.model else ''}:")
        for figure in fleet.figures:
            (low, least), (high, most) = figure.lowest, figure.highest
            line = f"   {figure.signal} = {quantity(figure.value, figure.unit)}"
            if least != most:
                line += (
                    f"  ({quantity(least, figure.unit)} on {low} to {quantity(most, figure.unit)} on {high})"
                )
            lines.append(line)
    return lines


def figure_lines(diagnosis: Diagnosis) -> list[str]:
    """What each engine does, where neither findings nor a fleet's figures say it."""
    if diagnosis.idle or diagnosis.fleets:
        return []
    return [
        f"{name if len(diagnosis.figures) > 1 else 'It'} has "
        + ", ".join(f"{one.signal} {quantity(one.value, one.unit)}" for one in own)
        + "."
        for name, own in diagnosis.figures.items()
        if own
    ]


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one id, title and cause, in rank order: a fleet shows one entry, not a hundred."""
    groups: dict[tuple[str, str, str | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.id, finding.title, finding.suppressed_by), []).append(finding)
    return list(groups.values())


def finding_lines(number: int, alike: Sequence[Finding], queries: bool) -> list[str]:
    """Findings of one id and cause: what, where, how much, how that is known, what to do."""
    first = alike[0]
    behind = f"  (explained by {first.suppressed_by})" if first.suppressed_by else ""
    lines = [f"{number}. {_MARK[first.severity]} {first.id}: {first.title}{behind}"]
    others = f" and {len(alike) - 1} more: {_some([where(f) for f in alike[1:]])}" if len(alike) > 1 else ""
    lines.append(f"   on {where(first)}{others}")
    if first.suppressed_by is None:
        lines += [f"   {words}"] if (words := cost_words(alike)) else []
        lines += [f"   {line}" for item in first.evidence for line in _evidence(item, queries)]
        lines += [
            f"   {name} = {_plain(flag.value)} ({flag.origin})" for name, flag in sorted(first.flags.items())
        ]
        lines += [f"   {line}" for item in first.prescriptions for line in prescription_lines(item)]
        if first.expect:
            expected = "; ".join(f"{name}: {change}" for name, change in first.expect.items())
            lines.append(f"   expect: {expected}")
    return lines


def where(finding: Finding) -> str:
    """The engine, with what its labels say of the place that it runs at."""
    place = [f"{label} {finding.labels[label]}" for label in PLACE if label in finding.labels]
    said = [part for part in place if part not in finding.instance]
    return finding.instance + (f" ({', '.join(said)})" if said else "")


def _evidence(item: Evidence, queries: bool) -> list[str]:
    note = f"  [{item.note}]" if item.note else ""
    shown = f"{item.signal} = {quantity(item.value, item.unit)}{note}"
    return [shown, f"    {item.query}"] if queries else [shown]


def prescription_lines(item: Prescription) -> list[str]:
    """One remedy: the flags or the advice, then why and with what reservations."""
    if not item.changes:
        return [f"do: {item.text}   [{_STATUS_WORDS[item.verification]}]"]
    was = ", ".join(f"{name} was {_plain(value)}" for name, value in item.was.items() if value is not None)
    lines = [
        f"try: {item.args}" + (f"   ({was})" if was else "") + f"   [{_STATUS_WORDS[item.verification]}]"
    ]
    if item.text:
        lines.append(f"     {item.text}")
    if item.uncertain:
        origins = ", ".join(f"{name} is {origin}" for name, origin in item.uncertain.items())
        lines.append(f"     computed with flags that were not given: {origins}")
    return lines


def cost_words(alike: Sequence[Finding]) -> str | None:
    """What findings of one id cost the users, on all their engines, where it can be estimated."""
    toll = total(finding.toll for finding in alike)
    return None if toll is None else toll.words()


def verdict(diagnosis: Diagnosis) -> str | None:
    """The sentence where there is nothing to cure; None where findings speak for themselves."""
    if diagnosis.idle:
        return "Idle: no request in the window, nothing to find."
    if diagnosis.healthy:
        return "Healthy: every objective is held, and nothing is at severity warning or above."
    if diagnosis.worst() in (None, "info"):
        if diagnosis.since_start:
            return "No verdict: nothing of severity warning in what one scrape can tell."
        return "No verdict: too much could not be judged (see below)."
    return None


def cannot_tell_lines(items: Sequence[CannotTell]) -> list[str]:
    """One line per reason, with the rules that it keeps from being judged."""
    groups: dict[str, dict[str, list[str]]] = {}
    for item in items:
        reason = _reason(item.missing)
        groups.setdefault(reason, {}).setdefault(item.id, []).append(item.instance)
    lines = []
    for reason, rules in groups.items():
        most = max(map(len, rules.values()))
        where = f" (on {most} engines)" if most > 1 else ""
        lines.append(f"{', '.join(rules)}{where}: {reason}")
    return lines


def _reason(missing: Sequence[Missing]) -> str:
    """What is lacking; where another source would say, that alone, since nothing else decides without it."""
    elsewhere = dict.fromkeys(item.why for item in missing if item.kind == "elsewhere")
    return "; ".join(elsewhere or (f"{item.name}: {item.why}" for item in missing))


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
