"""A comparison as one HTML file that opens offline."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from loadgen.compare import ComparedMetric, Comparison, split_metric
from loadgen.measure.estimator import rises
from loadgen.measure.stats import Summary, definitions_of
from loadgen.output.comparison import comparison_values
from loadgen.output.page import render_page
from loadgen.output.run_page import figure

_COLOURS = {"regress": "#b3423f", "improve": "#3f9253"}
_NEUTRAL = "#6b6b6b"
_SIDES = (("a", "#3b6fb6"), ("b", "#d1792b"))


def comparison_page(comparison: Comparison) -> str:
    """The whole page."""
    return render_page(
        "comparison.html.j2",
        [_ratios(comparison), *_pairs(comparison)],
        title="vtune: Comparison",
        environment=comparison.pairs[0].a.environment if comparison.pairs else {},
        definitions=list(definitions_of(row.metric for row in comparison.rows).items()),
        **comparison_values(comparison),
    )


def _ratios(comparison: Comparison) -> go.Figure:
    """B/A of every metric with its interval; the band is what does not count."""
    rows = [row for row in comparison.rows if math.isfinite(row.ratio) and math.isfinite(row.high)]
    trace = go.Scatter(
        x=[100 * (row.ratio - 1) for row in rows],
        y=[_label(row) for row in rows],
        mode="markers",
        marker={"size": 9, "color": [_COLOURS.get(row.verdict, _NEUTRAL) for row in rows]},
        error_x={
            "type": "data",
            "symmetric": False,
            "color": _NEUTRAL,
            "array": [100 * (row.high - row.ratio) for row in rows],
            "arrayminus": [100 * (row.ratio - row.low) for row in rows],
        },
        name=f"change and {comparison.confidence:.0%} interval",
    )
    drawn = figure("B against A", "%", "", [trace])
    drawn.add_vline(0, line_color="#999")
    for row in rows:
        drawn.add_shape(
            type="rect", x0=-100 * row.floor, x1=100 * row.floor, y0=_label(row), y1=_label(row),
            line={"width": 14, "color": "rgba(60,110,180,0.12)"},
        )  # fmt: skip
    return drawn


def _label(row: ComparedMetric) -> str:
    return f"{row.metric} ({'more' if rises(row.metric) else 'less'} is better)"


def _pairs(comparison: Comparison) -> list[go.Figure]:
    """Every run's figure, pair by pair: a drift of the machine shows as both sides moving."""
    figures = []
    for row in comparison.rows:
        traces = [
            go.Scatter(
                x=list(range(1, len(comparison.pairs) + 1)),
                y=_values(comparison, row.metric, side),
                mode="lines+markers",
                name=side.upper(),
                line_color=colour,
            )
            for side, colour in _SIDES
        ]
        if math.isfinite(row.ratio):
            figures.append(figure(row.metric, "pair", "", traces))
    return figures


def _values(comparison: Comparison, metric: str, side: str) -> list[float]:
    name, cls = split_metric(metric)
    return [Summary(getattr(pair, side)).value(name, cls) for pair in comparison.pairs]
