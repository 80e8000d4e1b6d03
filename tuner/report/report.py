"""The report of a study: one set of facts, as JSON, Markdown, and an HTML page that works offline."""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from loadgen.measure.record import Records
from loadgen.measure.run_validity import VERDICT_WORDS
from loadgen.measure.saved import SavedFileError
from loadgen.measure.stats import Distribution, Summary, definitions_of
from loadgen.output.page import render, render_page
from servers.files import write_atomically
from servers.slo.bounds import format_value, metric_label
from servers.slo.objective import Slo
from tuner.job.launch import Launch
from tuner.report import plots
from tuner.report.coverage import Coverage, coverage
from tuner.report.curves import KnobCurve, one_knob_curves
from tuner.report.effects import Effect, effects
from tuner.report.pareto import Front, pareto_front
from tuner.runs.measure import pooled
from tuner.runs.result import Reading, TrialResult, without_nan
from tuner.search.repeats import merge_repeats
from tuner.space.space import Space, describe_changes, render_value
from tuner.study.cost import CostItem, time_spent
from tuner.study.loads import Advice
from tuner.study.outcome import Outcome, describe_trial, shown_figures
from tuner.study.regression import KEY, Recommendation, Regression, show

SCHEMA = "vtune.report/1"
CAVEAT_PROMPTS = (
    "Prompts were synthetic: how many n-gram drafts are accepted depends on real text. Try it on your own "
    "traffic before you turn speculation on."
)


@dataclass(frozen=True)
class Facts:
    """Everything a report says."""

    study: str
    slo: Slo
    space: Space
    outcome: Outcome
    results: Sequence[TrialResult]
    leaders: Sequence[TrialResult | None]
    """After each of the results the best config by what was known then."""
    ped_anova: Mapping[str, float]
    """Shares of the objective's variation over all trials, by axis; empty for too few trials."""
    baseline_launch: Launch
    best_launch: Launch | None
    load: str
    profile: str
    plan: str
    seconds: float
    """Of the whole study: wall time, or simulated time."""
    target: str
    out: Path
    estimate: str = ""
    """What the figures are estimated from, where nothing was measured."""
    command: str = ""
    """What does the study again."""
    recommendation: Recommendation | None = None
    regression: Regression | None = None
    """The verdict on an earlier study, where one was given."""
    advice: Advice | None = None
    """Which config for which load."""
    predictions: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What a simulation said: config's key -> metric's name -> value."""
    prior: str = ""
    """Where the predictions come from."""
    spent_on: Mapping[str, float] = field(default_factory=dict)
    """Seconds beside the trials', by purpose (see tuner.study.cost)."""

    @property
    def baseline(self) -> TrialResult | None:
        return next((r for r in self.results if r.origin == "baseline"), None)

    def to_json(self) -> dict[str, Any]:
        outcome, confirmation = self.outcome, self.outcome.confirmation
        data = {
            "schema": SCHEMA,
            "study": self.study,
            "verdict": outcome.kind,
            "sentence": outcome.sentence,
            "ended": outcome.ended,
            "slo": {
                "text": self.slo.text,
                "meaning": self.slo.describe(),
                "definitions": definitions_of(metric for metric, _ in self.slo.metrics),
            },
            "changes": self.changes,
            "confirmation": confirmation.to_json() if confirmation else None,
            "launch": asdict(self.best_launch) if self.best_launch else None,
            "rollback": asdict(self.baseline_launch),
            "trials": [result.to_json() for result in self.results],
            "importances": self.importances,
            "effects": [asdict(effect) for effect in self.effects],
            "kv_pool": self.kv_pool,
            "load": self.load,
            "profile": self.profile,
            "plan": self.plan,
            "seconds": self.seconds,
            "target": self.target,
            "estimate": self.estimate,
            "command": self.command,
            KEY: self.recommendation.to_json() if self.recommendation else None,
            "regression": self.regression.to_json() if self.regression else None,
            "advice": self.advice.to_json() if self.advice else None,
            "pareto": {"trials": [r.number for r in self.front.trials], "knee": self.front.knee},
            "one_knob": [asdict(curve) for curve in self.curves],
            "cost": [asdict(item) for item in self.cost],
            "not_tried": asdict(self.coverage),
            "environment": environment(),
            "caveats": self.caveats,
        }
        return dict(without_nan(data))

    @cached_property
    def front(self) -> Front:
        return pareto_front(merge_repeats(r for r in self.results if r.status != "duplicate"))

    @cached_property
    def coverage(self) -> Coverage:
        return coverage(self.results, self.space)

    @cached_property
    def curves(self) -> list[KnobCurve]:
        """Through the recommended config, the axes that mattered most first."""
        places = {effect.axis: place for place, effect in enumerate(self.effects)}
        return sorted(self._curves, key=lambda curve: places.get(curve.axis, len(places)))

    @cached_property
    def effects(self) -> list[Effect]:
        return effects(self._curves)

    @cached_property
    def _curves(self) -> list[KnobCurve]:
        """In the space's order."""
        best = self.outcome.best.config if self.outcome.best else self.space.baseline
        told = merge_repeats(r for r in self.results if r.status != "duplicate")
        return one_knob_curves(told, best, self.space, self.slo.compared, self.predictions)

    @property
    def importances(self) -> dict[str, float]:
        """Shares by axis: of what knobs do alone, or of all trials' variation where that is not known."""
        return {effect.axis: effect.share for effect in self.effects} or dict(self.ped_anova)

    @cached_property
    def cost(self) -> list[CostItem]:
        return time_spent(self.results, self.spent_on, self.seconds)

    @property
    def exit_code(self) -> int:
        """1 also where the optimum of an earlier study moved."""
        return 1 if self.regression is not None and self.regression.moved else self.outcome.exit_code

    @property
    def lines(self) -> tuple[str, ...]:
        """The verdict for people, what matters first, and how to launch it and go back."""
        lines = [self.regression.sentence if self.regression else self.outcome.sentence]
        if self.advice is not None:
            lines.append(self.advice.sentence)
        if self.best_launch is not None:
            lines.append(f"launch with: {self.best_launch.target}")
            lines.append(f"roll back with: {self.baseline_launch.target}")
        return tuple(lines)

    @property
    def changes(self) -> dict[str, list[Any]]:
        best = self.outcome.best
        return {flag: list(pair) for flag, pair in self.space.changes(best.config).items()} if best else {}

    @property
    def kv_pool(self) -> list[dict[str, Any]]:
        flags = ("max_num_batched_tokens", "gpu_memory_utilization")
        known = [r for r in self.results if r.kv_tokens is not None and r.status != "duplicate"]
        return [
            {"trial": r.number, **{f: r.config[f] for f in flags}, "kv_tokens": r.kv_tokens} for r in known
        ]

    @property
    def caveats(self) -> list[str]:
        found = []
        if self.estimate:
            found.append(f"ESTIMATE: nothing was measured, all seconds are simulated. From: {self.estimate}")
        if "speculative_config" in self.changes:
            found.append(CAVEAT_PROMPTS)
        confirmation = self.outcome.confirmation
        verdicts = [r.measurement.verdict for r in self.results if r.measurement]
        if confirmation:
            verdicts += [confirmation.baseline.verdict, confirmation.candidate.verdict]
            found += confirmation.notes
        doubts = Counter(
            VERDICT_WORDS[verdict].lower()
            for merge_repeats in verdicts
            for verdict in merge_repeats.split(
                ", "
            )  # a measurement of several runs names each verdict that they had
            if verdict != "ok"
        )
        if doubts:
            words = ", ".join(f"{count} × {doubt}" for doubt, count in doubts.most_common())
            found.append(f"Warning, of the measurements: {words} (see the trials)")
        return found


def environment() -> dict[str, str]:
    packages = {name: version(name) for name in ("vtune-llm", "optuna")}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": str(os.cpu_count()),
        **packages,
    }


def write_report(facts: Facts) -> list[Path]:
    """``report.json``, ``.md`` and ``.html`` in the output directory, each whole or not at all."""
    data = facts.to_json()
    values = _values(facts, data)
    texts = {
        "report.json": json.dumps(data, indent=2) + "\n",
        "report.md": render("report.md.j2", "tuner.report", **values),
        "report.html": render_page("report.html.j2", figures(facts), "tuner.report", **values),
    }
    paths = []
    for name, text in texts.items():
        write_atomically(facts.out / name, [text])
        paths.append(facts.out / name)
    return paths


def figures(facts: Facts) -> list[go.Figure]:
    found = []
    for metric in ("itl", "ttft"):
        sides = _distributions(facts, metric)
        if sides:
            found.append(plots.distributions(metric, sides))
    found.append(plots.trade_off(facts.results, facts.space, facts.front))
    found.append(plots.history(facts.results, facts.leaders, facts.slo))
    if expected := plots.expectations(facts.results, facts.predictions, facts.slo):
        found.append(expected)
    found += [plots.one_knob(curve, facts.slo) for curve in facts.curves]
    if facts.advice:
        found.append(plots.loads(facts.advice))
    if facts.importances:
        found.append(plots.importances(facts.importances, by_effect=bool(facts.effects)))
    if facts.kv_pool:
        found.append(plots.kv_pool(facts.results))
    if facts.cost:
        found.append(plots.cost(facts.cost))
    return found


def _distributions(facts: Facts, metric: str) -> dict[str, Distribution]:
    """Of the confirmation's runs where there are any, else of the trials."""
    confirmation = facts.outcome.confirmation
    if confirmation is not None:
        files = {
            side: sorted((facts.out / path).glob("*.json")) for side, path in confirmation.files().items()
        }
    else:
        chosen = {"before": facts.baseline, "after": facts.outcome.best}
        files = {side: [facts.out / name for name in r.records] for side, r in chosen.items() if r}
    sides = {side: _load(paths) for side, paths in files.items()}
    return {side: pooled([Summary(r) for r in records], metric) for side, records in sides.items() if records}


def _load(paths: Sequence[Path]) -> list[Records]:
    """Records that are there; a file that was deleted costs a curve, not the report."""
    found = []
    for path in paths:
        try:
            found.append(Records.load(path))
        except SavedFileError:
            continue
    return found


def _values(facts: Facts, data: Mapping[str, Any]) -> dict[str, Any]:
    """What both templates show."""
    return {
        "title": f"vtune: {facts.study}",
        "facts": facts,
        "data": data,
        "trials": [_trial_row(result, facts) for result in facts.results],
        "failures": [r for r in facts.results if r.log_tail],
        "examined": [r for r in facts.results if (r.findings or r.unexamined) and r.status != "duplicate"],
        "changes_of": lambda result: describe_changes(facts.space.changes(result.config)) or "none",
        "label": metric_label,
        "shown": shown_figures(facts.slo),
        "show": format_value,
        "reading": show,
        "word": render_value,
    }


def _trial_row(result: TrialResult, facts: Facts) -> dict[str, Any]:
    readings = result.measurement.reading if result.measurement else lambda metric: Reading(math.nan)
    return {
        "number": result.number,
        "origin": result.origin,
        "changes": describe_changes(facts.space.changes(result.config)) or "none (your config)",
        "status": "feasible"
        if result.feasible
        else "infeasible"
        if result.status == "measured" and result.judged
        else result.status,
        "figures": [show(name, readings(name)) for name in shown_figures(facts.slo)],
        "kv_tokens": "" if result.kv_tokens is None else f"{result.kv_tokens:,}",
        "seconds": f"{result.seconds['total']:.0f}" if "total" in result.seconds else "",
        "findings": [f.id for f in result.findings if f.suppressed_by is None and f.severity != "info"],
        "note": "" if result.feasible else describe_trial(result, facts.slo.objective),
    }
