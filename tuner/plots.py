"""The report's figures, as Plotly figures that need no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from loadgen.slo import LATENCIES
from loadgen.stats import Distribution
from tuner.outcome import label
from tuner.result import TrialResult
from tuner.slo import Slo
from tuner.space import Space
from tuner.study import describe_changes

BEFORE, AFTER = "#d1495b", "#00798c"
COLOURS = {"feasible": AFTER, "infeasible": "#edae49", "stopped early": "#9aa5b1"}
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
    return _dress(figure, f"{label(metric)}: distribution", "ms", "% of samples at or below").update_xaxes(
        type="log"
    )


def trade_off(results: Sequence[TrialResult], space: Space) -> go.Figure:
    """Every measured config: ITL P99 against throughput, the baseline marked."""
    figure = go.Figure()
    for group, colour in COLOURS.items():
        members = [r for r in results if _group(r) == group]
        figure.add_scatter(
            x=[1e3 * r.measurement.value("itl_p99") for r in members if r.measurement],
            y=[r.measurement.value("throughput") for r in members if r.measurement],
            text=[
                f"trial {r.number}: {describe_changes(space.changes(r.config)) or 'baseline'}"
                for r in members
            ],
            mode="markers",
            name=group,
            marker={
                "color": colour,
                "size": 10,
                "symbol": ["star" if not space.changes(r.config) else "circle" for r in members],
            },
        )
    return _dress(figure, "Trade-off: each config (star: your own)", "ITL P99, ms", "throughput, tok/s")


def one_knob(results: Sequence[TrialResult], flag: str, slo: Slo) -> go.Figure:
    """The objective over the values of one flag, whatever the others were."""
    measured = [
        r for r in results if r.status in ("measured", "stopped") and isinstance(r.config[flag], int | float)
    ]
    scale, unit = (1e3, "ms") if slo.objective.metric.rpartition("_")[0] in LATENCIES else (1.0, "")
    figure = go.Figure()
    figure.add_scatter(
        x=[r.config[flag] for r in measured],
        y=[scale * r.value(slo.objective) for r in measured],
        mode="markers",
        marker={"color": [COLOURS[_group(r)] for r in measured], "size": 10},
        text=[f"trial {r.number}" for r in measured],
        showlegend=False,
    )
    title = f"{label(slo.objective.name)} over {flag}"
    return _dress(figure, title, flag, f"{label(slo.objective.name)}, {unit}").update_xaxes(type="log")


def importances(shares: Mapping[str, float]) -> go.Figure:
    ordered = sorted(shares.items(), key=lambda item: item[1])
    figure = go.Figure()
    figure.add_bar(
        x=[share for _, share in ordered],
        y=[name for name, _ in ordered],
        orientation="h",
        marker_color=AFTER,
    )
    return _dress(figure, "Which flag mattered (PED-ANOVA)", "share of importance", "").update_layout(
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


def _group(result: TrialResult) -> str:
    if result.status == "stopped":
        return "stopped early"
    if result.status != "measured":
        return ""
    return "feasible" if result.feasible else "infeasible"


def _dress(figure: go.Figure, title: str, x: str, y: str) -> go.Figure:
    return figure.update_layout(
        title=title, xaxis_title=x, yaxis_title=y, template="plotly_white", height=380, margin=_MARGIN
    )
