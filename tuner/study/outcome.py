"""How a study ended, in a sentence and as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.estimator import Estimate
from servers.flags.words import render
from servers.slo.bounds import format_value, metric_label
from servers.slo.objective import Objective, Slo
from tuner.runs.result import TrialResult
from tuner.search.repeats import merge_repeats
from tuner.space.space import Space, describe_changes
from tuner.study.confirmation import MIN_GAIN, Confirmation, words

Kind = Literal["better", "baseline", "infeasible", "failed", "interrupted", "measured"]
"""better: a config is confirmed. baseline: nothing beats the user's config. infeasible: nothing holds the
SLO. failed: no server served. interrupted: by the user; what was measured so far stands. measured: a server
that runs was measured and diagnosed as it is."""

ESTIMATE = "ESTIMATE: "
"""Before every sentence about what was simulated."""
BESIDE = ("itl_p99", "max_stall_mean", "ttft_p95", "throughput")
"""Stand beside the objective in every line and table."""


def shown_figures(slo: Slo) -> list[str]:
    """What every line and table shows: the objective, then what stands beside it."""
    return list(dict.fromkeys([slo.objective.name, *BESIDE]))


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    sentence: str
    ended: str
    """Why the search ended."""
    best: TrialResult | None = None
    """The config to use; None: the user's own."""
    confirmation: Confirmation | None = None

    @property
    def exit_code(self) -> int:
        codes = {"better": 0, "baseline": 0, "measured": 0, "infeasible": 1, "failed": 1, "interrupted": 130}
        return codes[self.kind]


def better(best: TrialResult, space: Space, slo: Slo, confirmation: Confirmation, ended: str) -> Outcome:
    """``max_num_seqs 16 -> 12: ITL ES99 412 ms -> 138 ms (-66 % [-72, -58]), …, confirmed on fresh runs``."""
    main = confirmation.change(slo.objective.name)
    rest = ", ".join(_aside(confirmation.change(name)) for name in BESIDE if name != main.figure)
    sentence = (
        f"{describe_changes(space.changes(best.config))}: {now_held(slo, confirmation)}"
        f"{metric_label(main.figure)} {words(main)}, {rest}, "
        f"confirmed on fresh runs ({confirmation.pairs} pairs)"
    )
    return Outcome("better", sentence, ended, best, confirmation)


def now_held(slo: Slo, confirmation: Confirmation) -> str:
    """``holds itl_p99 <= 100 ms, which your config misses (140 ms -> 62 ms), ``: what a config is for whose
    objective gains little; "" where the user's config holds every bound."""
    held = []
    for bound in slo.bounds:
        own, theirs = (
            side.value(bound.metric, bound.cls) for side in (confirmation.baseline, confirmation.candidate)
        )
        if bound.violation(own) > 0:
            figures = " -> ".join(format_value(bound.metric, value) for value in (own, theirs))
            held.append(f"holds {bound}, which your config misses ({figures}), ")
    return "".join(held)


def _aside(change: Estimate) -> str:
    size = f"{100 * (change.ratio - 1):+.0f} %" if change.has_ratio else "n/a"
    return f"{metric_label(change.figure)} {size}"


def unproven(best: TrialResult, space: Space, slo: Slo, confirmation: Confirmation, ended: str) -> Outcome:
    """What fresh runs showed of the best config, why that is no proof, and what would be one."""
    main = confirmation.change(slo.objective.name)
    sentence = (
        f"Not proven: {describe_changes(space.changes(best.config))} gave "
        f"{metric_label(main.figure)} {words(main)} "
        f"on {confirmation.pairs} pairs of fresh runs, but {'; '.join(confirmation.problems)}"
    )
    if advice := what_would_prove(slo, confirmation):
        sentence += f". {advice}"
    return Outcome("baseline", sentence, ended, None, confirmation)


def what_would_prove(slo: Slo, confirmation: Confirmation) -> str:
    """How many pairs, by the scatter of these, would prove what they show; or what else to ask for."""
    main = confirmation.change(slo.objective.name)
    if not main.has_ratio:
        return ""
    gain = 1 - main.ratio if slo.objective.direction == "minimize" else main.ratio - 1
    if gain < MIN_GAIN:
        return (
            f"A gain of less than {100 * MIN_GAIN:g} % counts for nothing: try another workload or SLO, or "
            "--vary other flags"
        )
    if confirmation.missed:
        return "To trade one for the other, give bounds of your own as --slo"
    if math.isinf(confirmation.pairs_needed):
        return "The pairs scatter too much for any number of them: give longer runs (--run-time)"
    more = max(round(confirmation.pairs_needed), confirmation.pairs + 1)
    return f"About {more} pairs would prove it: give a larger --budget, or --pairs {more}"


def broken(best: TrialResult, space: Space, failure: str, ended: str) -> Outcome:
    """The best config did not get through its confirmation."""
    changes = describe_changes(space.changes(best.config))
    return Outcome(
        "baseline",
        f"Not proven: {changes}, the best of the search, failed on fresh runs: {failure}",
        ended,
    )


def unconfirmed(best: TrialResult, baseline: TrialResult, space: Space, slo: Slo, ended: str) -> Outcome:
    """The user's config does not serve, so that there is nothing to compare with."""
    changes = describe_changes(space.changes(best.config))
    sentence = (
        f"{changes}: serves and holds the SLO ({describe_trial(best, slo.objective)}). Your own config does "
        f"not serve ({baseline.reason}), so there is no comparison on fresh runs"
    )
    return Outcome("better", sentence, ended, best)


def without_confirmation(
    results: Sequence[TrialResult], baseline: TrialResult, space: Space, slo: Slo, ended: str
) -> Outcome:
    """The outcome where no other config is worth a confirmation."""
    launched = merge_repeats(r for r in results if r.launched)
    if baseline.feasible:
        others = len(launched) - 1
        tried = f"none of {others} other configs measured better within the SLO"
        if others == 1:
            tried = "the other config measured no better within the SLO"
        value = format_value(slo.objective.metric, baseline.value(slo.objective))
        sentence = (
            f"No improvement found: your config has {metric_label(slo.objective.name)} {value}, and {tried}"
        )
        if len(launched) == 1:
            sentence = (
                f"Your config was compared with none ({metric_label(slo.objective.name)} {value}): {ended}"
            )
        return Outcome("baseline", sentence, ended)
    served = [r for r in launched if r.status != "failed"]
    if not served:
        reason = launched[-1].reason if launched else "none was launched"
        return Outcome("failed", f"No config served ({len(launched)} tried). The last one {reason}", ended)
    closest = min(served, key=lambda r: r.excess)
    missed = ", ".join(_miss(closest, name) for name, v in closest.violations.items() if v > 0)
    changes = describe_changes(space.changes(closest.config)) or "your own config"
    return Outcome(
        "infeasible",
        f"No feasible config: none of {len(launched)} held the SLO ({slo.describe()}). "
        f"Closest came {changes}: missed {missed or closest.reason}",
        ended,
    )


def as_it_runs(baseline: TrialResult, server: str, slo: Slo, ended: str) -> Outcome:
    """What a server that is not ours came to, what the doctor finds, and which flags it prescribes."""
    if baseline.measurement is None:
        return Outcome("failed", f"{server}: {baseline.reason}", ended)
    findings = [f for f in baseline.findings if f.severity != "info" and f.suppressed_by is None]
    told = "; ".join(f"{f.title} ({f.id})" for f in findings) or "no finding"
    tries = [" ".join(render(flags)) for f in findings for flags in f.prescriptions]
    assumed = ", ".join(dict.fromkeys(name for f in findings for name in f.assumed if f.prescriptions))
    sentence = (
        f"{server} was measured as it runs and not restarted: {describe_trial(baseline, slo.objective)}. "
        f"The doctor: {told}"
    )
    if cures := "; ".join(filter(None, tries)):
        sentence += (
            f". It prescribes: {cures}"
            + (
                f" (from values that are assumed, not known, of {assumed}: say them with --flags)"
                if assumed
                else ""
            )
            + ". To try that, give the command that starts the server as --target"
        )
    return Outcome("measured", sentence, ended)


def _miss(result: TrialResult, name: str) -> str:
    if result.measurement is None or name not in result.measurement.readings:
        return name
    value = result.measurement.readings[name].value
    return f"{metric_label(name)} ({format_value(name.partition('{')[0], value)})"


def describe_trial(result: TrialResult, objective: Objective) -> str:
    """One line: what came of a trial."""
    if result.status in ("failed", "refused", "interrupted", "duplicate"):
        return f"{result.status}: {result.reason}"
    assert result.measurement is not None, "a trial that served has a measurement"
    figures = [(objective.metric, objective.cls), *((name, None) for name in BESIDE)]
    text = ", ".join(
        f"{metric_label(metric)} {format_value(metric, result.measurement.value(metric, cls))}"
        for metric, cls in dict.fromkeys(figures)
    )
    if result.status == "stopped":
        return f"{text}; stopped early: {result.reason}"
    if not result.judged:
        return f"{text}; not judged: your config was not measured on these requests"
    missed = [metric_label(name) for name, v in result.violations.items() if v > 0]
    return f"{text}; misses {', '.join(missed)}" if missed else f"{text}; feasible"
