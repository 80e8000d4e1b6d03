"""The report's figures, as Plotly figures that need no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from loadgen.measure.stats import Distribution
from servers.slo.bounds import LATENCIES, RATES, family_of, metric_label
from servers.slo.objective import Slo
from tuner.report.curves import KnobCurve
from tuner.report.pareto import Front
from tuner.runs.result import Reading, TrialResult
from tuner.space.space import Space, config_key, describe_changes
from tuner.study.cost import CostItem
from tuner.study.loads import Advice

BEFORE, AFTER = "#d1495b", "#00798c"
COLOURS = {"feasible": AFTER, "infeasible": "#edae49", "stopped early": "#9aa5b1"}
PALETTE = (AFTER, BEFORE, "#edae49", "#5b5f97", "#7b8794", "#2f9e44", "#c2255c")
_MARGIN = {"l": 60, "r": 20, "t": 50, "b": 50}
_CURVE_POINTS = 400


def distributions(metric: str, sides: Mapping[str, Distribution]) -> go.Figure:
    """Share of samples at or below a latency, before and after; the latency on a log scale."""
    figure = go.Figure()
    for (name, samples), colour in zip(sides.items(), (BEFORE, AFTER), strict=False):
        shares = np.linspace(0.0, 1.0, _CURVE_POINTS)
        values = [1e3 * samples.rank(share) for share in shares] if samples.count else []
        label_text = f"{name} (n={samples.count})"
        figure.add_scatter(x=values, y=100 * shares, mode="lines", name=label_text, line={"color": colour})
    return _dress(
        figure, f"{metric_label(metric)}: distribution", "ms", "% of samples at or below"
    ).update_xaxes(type="log")


def trade_off(results: Sequence[TrialResult], space: Space, front: Front) -> go.Figure:
    """Every measured config: the tail of ITL against throughput, the Pareto front and its knee marked."""
    figure = go.Figure()
    for group, colour in COLOURS.items():
        members = [r for r in results if _group(r) == group and r.measurement]
        itl, throughput = (
            [r.measurement.reading(metric) for r in members if r.measurement]
            for metric in ("itl_es99", "throughput")
        )
        figure.add_scatter(
            x=[1e3 * one.value for one in itl],
            y=[one.value for one in throughput],
            error_x=_bars(itl, 1e3),
            text=[_about(r, space) for r in members],
            mode="markers",
            name=group,
            marker={
                "color": colour,
                "size": 9,
                "symbol": ["star" if not space.changes(r.config) else "circle" for r in members],
            },
        )
    for name, symbol, members in (
        ("on the front (ITL, TTFT, throughput)", "circle-open", list(front.trials)),
        ("its knee", "diamond-open", [r for r in front.trials if r.number == front.knee]),
    ):
        figure.add_scatter(
            x=[1e3 * r.measurement.value("itl_es99") for r in members if r.measurement],
            y=[r.measurement.value("throughput") for r in members if r.measurement],
            text=[_about(r, space) for r in members],
            mode="markers",
            name=name,
            marker={"color": "#1f2933", "size": 16, "symbol": symbol, "line": {"width": 2}},
        )
    axes = map(axis_title, ("itl_es99", "throughput"))
    return _dress(figure, "Trade-off: each config (star: your own)", *axes)


def history(results: Sequence[TrialResult], leaders: Sequence[TrialResult | None], slo: Slo) -> go.Figure:
    """The objective by trial, with its 95 % interval, and what the best one so far measured."""
    figure, factor = go.Figure(), scale_of(slo.objective.metric)
    for group, colour in COLOURS.items():
        members = [r for r in results if _group(r) == group and r.status != "duplicate"]
        readings = [r.reading(slo.objective) for r in members]
        figure.add_scatter(
            x=[r.number for r in members],
            y=[factor * one.value for one in readings],
            error_y=_bars(readings, factor),
            text=[r.origin for r in members],
            mode="markers",
            name=group,
            marker={"color": colour, "size": 8},
        )
    figure.add_scatter(
        x=[r.number for r in results],
        y=[factor * leader.value(slo.objective) if leader else math.nan for leader in leaders],
        mode="lines",
        name="best so far",
        line={"color": "#1f2933", "shape": "hv"},
    )
    return _dress(figure, "The search, trial by trial", "trial", axis_title(slo.objective.name))


def one_knob(curve: KnobCurve, slo: Slo) -> go.Figure:
    """The objective over one flag's values through the best config; other trials and a simulation beside."""
    figure, factor = go.Figure(), scale_of(slo.compared.metric)
    figure.add_scatter(
        x=[point.place for point in curve.others],
        y=[factor * point.reading.value for point in curve.others],
        error_y=_bars([point.reading for point in curve.others], factor, "#d9dee3"),
        text=[f"trial {point.trial}" for point in curve.others],
        mode="markers",
        name="measured, other flags differ too",
        marker={"color": "#c3cbd3", "size": 7},
    )
    figure.add_scatter(
        x=[point.place for point in curve.predicted],
        y=[factor * point.reading.value for point in curve.predicted],
        mode="lines",
        name="predicted by simulation",
        line={"color": "#edae49", "dash": "dash"},
    )
    figure.add_scatter(
        x=[point.place for point in curve.through],
        y=[factor * point.reading.value for point in curve.through],
        error_y=_bars([point.reading for point in curve.through], factor),
        text=[f"trial {point.trial}" for point in curve.through],
        mode="lines+markers",
        name="measured, all else as in the best",
        line={"color": AFTER},
        marker={
            "size": 10,
            "symbol": ["star" if point.best else "circle" for point in curve.through],
            "color": [AFTER if point.feasible else COLOURS["infeasible"] for point in curve.through],
        },
    )
    objective = slo.compared.name
    figure = _dress(figure, f"{curve.axis}, through the best config", curve.axis, axis_title(objective))
    ticks = range(len(curve.values))
    return figure.update_xaxes(
        tickvals=list(ticks), ticktext=list(curve.values), range=[-0.5, len(ticks) - 0.5]
    )


def expectations(
    results: Sequence[TrialResult], predictions: Mapping[str, Mapping[str, float]], slo: Slo
) -> go.Figure | None:
    """What was expected of each trial against what was measured; None where nothing was expected."""
    name, factor = slo.compared.name, scale_of(slo.compared.metric)
    measured = [r for r in results if r.status == "measured" and math.isfinite(r.value(slo.compared))]
    sources = {
        "the simulation": {r.number: predictions.get(config_key(r.config), {}).get(name) for r in measured},
        "the search's model": {r.number: r.expected.get(name) for r in measured},
    }
    figure, seen = go.Figure(), []
    for (source, values), colour in zip(sources.items(), ("#edae49", AFTER), strict=True):
        pairs = [(r, value) for r in measured if (value := values[r.number]) is not None]
        readings = [r.reading(slo.compared) for r, _ in pairs]
        seen += [factor * value for _, value in pairs] + [factor * one.value for one in readings]
        figure.add_scatter(
            x=[factor * value for _, value in pairs],
            y=[factor * one.value for one in readings],
            error_y=_bars(readings, factor),
            text=[f"trial {r.number}" for r, _ in pairs],
            mode="markers",
            name=f"by {source}",
            marker={"color": colour, "size": 9},
        )
    if not seen:
        return None
    ends = [min(seen), max(seen)]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", name="as expected", line={"color": "#9aa5b1", "dash": "dot"}
    )
    title = f"{metric_label(name)}: predicted against measured"
    return _dress(figure, title, f"predicted {axis_title(name)}", f"measured {axis_title(name)}")


def loads(advice: Advice) -> go.Figure:
    """Every config's curve over the load, and where the advice changes with the interval of that point."""
    figure, factor = go.Figure(), scale_of(advice.metric)
    for place, curve in enumerate(advice.curves):
        colour = PALETTE[place % len(PALETTE)]
        figure.add_scatter(
            x=list(advice.loads),
            y=[factor * one.value for one in curve.readings],
            error_y=_bars(curve.readings, factor, colour),
            mode="lines+markers",
            name=curve.name + (" (predicted)" if curve.predicted else ""),
            line={"color": colour, "dash": "dash" if curve.predicted else "solid"},
        )
    for regime in advice.regimes:
        if edge := regime.crossing:
            low, high = max(edge.low, advice.loads[0]), min(edge.high, advice.loads[-1])
            figure.add_vrect(low, high, fillcolor="#9aa5b1", opacity=0.2, line_width=0)
            figure.add_vline(edge.at, line_dash="dot", annotation_text=f"{edge.at:.3g} {advice.unit}")
    figure = _dress(figure, "By load", f"load, {advice.unit}", axis_title(advice.metric))
    return figure.update_xaxes(type="log")


def cost(items: Sequence[CostItem]) -> go.Figure:
    """Seconds by what they were spent on."""
    figure = go.Figure()
    figure.add_bar(
        x=[item.seconds for item in reversed(items)],
        y=[item.purpose for item in reversed(items)],
        text=[f"{item.seconds:.0f} s, {item.share:.0%}" for item in reversed(items)],
        orientation="h",
        marker_color=AFTER,
    )
    return _dress(figure, "Time spent", "seconds", "").update_layout(margin={**_MARGIN, "l": 300})


def importances(shares: Mapping[str, float], by_effect: bool) -> go.Figure:
    """By what each knob does alone, or by PED-ANOVA over all trials."""
    ordered = sorted(shares.items(), key=lambda item: item[1])
    how = "alone, through the best config" if by_effect else "PED-ANOVA over all trials"
    figure = go.Figure()
    figure.add_bar(
        x=[share for _, share in ordered],
        y=[name for name, _ in ordered],
        orientation="h",
        marker_color=AFTER,
    )
    return _dress(figure, f"Which flag mattered ({how})", "share", "").update_layout(
        margin={**_MARGIN, "l": 240}
    )


def kv_pool(results: Sequence[TrialResult]) -> go.Figure:
    """How the KV pool moved with the token budget, by gpu_memory_utilization."""
    figure = go.Figure()
    known = [r for r in results if r.kv_tokens is not None]
    for memory in sorted({r.config["gpu_memory_utilization"] for r in known}):
        members = [r for r in known if r.config["gpu_memory_utilization"] == memory]
        members.sort(key=lambda r: r.config["max_num_batched_tokens"])
        figure.add_scatter(
            x=[r.config["max_num_batched_tokens"] for r in members],
            y=[r.kv_tokens for r in members],
            mode="markers",
            text=[f"trial {r.number}, max_num_seqs {r.config['max_num_seqs']}" for r in members],
            name=f"gpu_memory_utilization {memory:g}",
        )
    title = "KV pool over the token budget"
    return _dress(figure, title, "max_num_batched_tokens", "KV pool, tokens").update_xaxes(type="log")


def scale_of(metric: str) -> float:
    """What a value is multiplied by to be shown: latencies are in ms."""
    return 1e3 if family_of(metric.partition("{")[0]) in LATENCIES else 1.0


def axis_title(metric: str) -> str:
    """``ITL P99, ms``."""
    family = family_of(metric.partition("{")[0])
    unit = (
        "ms"
        if family in LATENCIES
        else "tok/s"
        if family == "throughput"
        else "req/s"
        if family in RATES
        else ""
    )
    return f"{metric_label(metric)}, {unit}" if unit else metric_label(metric)


def _bars(readings: Sequence[Reading], factor: float, colour: str | None = None) -> dict[str, Any]:
    """95 % intervals as error bars; none where there is no interval."""
    known = [math.isfinite(one.low) and math.isfinite(one.high) for one in readings]
    pairs = list(zip(readings, known, strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [factor * (one.high - one.value) if ok else 0.0 for one, ok in pairs],
        "arrayminus": [factor * (one.value - one.low) if ok else 0.0 for one, ok in pairs],
        "thickness": 1,
        "width": 3,
        **({"color": colour} if colour else {}),
    }


def _about(result: TrialResult, space: Space) -> str:
    measured = result.measurement
    ttft = f", TTFT P95 {1e3 * measured.value('ttft_p95'):.3g} ms" if measured else ""
    return f"trial {result.number}: {describe_changes(space.changes(result.config)) or 'baseline'}{ttft}"


def _group(result: TrialResult) -> str:
    if result.status == "stopped":
        return "stopped early"
    if result.status != "measured":
        return ""
    return "feasible" if result.feasible else "infeasible"


def _dress(figure: go.Figure, title: str, x: str, y: str) -> go.Figure:
    return figure.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        height=400,
        margin=_MARGIN,
        legend={"orientation": "h", "y": -0.22},
    )
