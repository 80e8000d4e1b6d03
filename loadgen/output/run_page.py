"""A run as one HTML file that opens offline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from loadgen.measure.record import Records
from loadgen.measure.serverside import timeline
from loadgen.measure.stats import PARTS, Summary
from loadgen.measure.window import in_flight
from loadgen.output.page import render_page
from loadgen.output.report import METRIC_NAMES, report_values

_COLOURS = ("#3b6fb6", "#d1792b", "#3f9253", "#b3423f", "#7a5fa8", "#6b6b6b")
_MAX_POINTS = 4000


def run_page(records: Records) -> str:
    """The whole page."""
    summary = Summary(records)
    figures = [
        _ecdf(summary, "ttft"),
        _ecdf(summary, "itl"),
        _ecdf(summary, "e2e"),
        _timeline(records),
        _load(records),
        _tokens(records),
        *_server(records),
        *_parts(summary),
    ]
    return render_page("run.html.j2", figures, title="vtune: Benchmark", **report_values(records, summary))


def figure(title: str, x: str, y: str, traces: Sequence[Any], **layout: Any) -> go.Figure:
    """In the style of all of them."""
    drawn = go.Figure(traces)
    drawn.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        height=380,
        showlegend=True,
        **layout,
    )
    return drawn


def _colour(records: Records, cls: str) -> str:
    return _COLOURS[records.classes.index(cls) % len(_COLOURS)]


def _ecdf(summary: Summary, metric: str) -> go.Figure:
    """Failures never arrive: their share is missing at the top."""
    traces = []
    for cls in summary.classes:
        samples = summary.distribution(metric, cls)
        share = np.cumsum(samples.weights) / samples.weights.sum()
        shown = _thin(np.isfinite(samples.values) & (samples.values > 0))
        traces.append(
            go.Scatter(
                x=samples.values[shown] * 1e3,
                y=share[shown],
                mode="lines",
                line_shape="hv",
                name=cls,
                line_color=_colour(summary.records, cls),
            )
        )
    title = f"{METRIC_NAMES[metric]}: share of samples at or below"
    return figure(title, "ms", "share", traces, xaxis_type="log", yaxis_range=[0, 1.01])


def _thin(keep: np.ndarray) -> np.ndarray:
    """Indices of ``keep``, at most _MAX_POINTS of them, the tail in full."""
    index = np.flatnonzero(keep)
    if len(index) <= _MAX_POINTS:
        return index
    body, tail = index[: -_MAX_POINTS // 2], index[-_MAX_POINTS // 2 :]
    return np.concatenate([body[:: math.ceil(2 * len(body) / _MAX_POINTS)], tail])


def _timeline(records: Records) -> go.Figure:
    traces = []
    for cls in records.classes:
        done = [r for r in records.requests if r.cls == cls and r.ok]
        traces.append(
            go.Scatter(
                x=[r.intended / 1e9 for r in done],
                y=[(r.chunk_at[0] - r.intended) / 1e9 for r in done],
                mode="markers",
                marker={"size": 5},
                name=cls,
                marker_color=_colour(records, cls),
                text=[f"request {r.index}, {r.tokens:g} tokens" for r in done],
            )
        )
    failed = [r for r in records.requests if not r.ok]
    if failed:
        traces.append(
            go.Scatter(
                x=[r.intended / 1e9 for r in failed],
                y=[(r.end - r.intended) / 1e9 for r in failed],
                mode="markers",
                marker={"symbol": "x", "color": "#b3423f", "size": 8},
                name="failed (until the failure)",
                text=[f"request {r.index}: {r.failure}" for r in failed],
            )
        )
    return _with_window(figure("TTFT of each request", "intended time, s", "s", traces), records)


def _load(records: Records) -> go.Figure:
    end = max((r.end for r in records.requests), default=0) / 1e9
    grid = np.linspace(0.0, max(end, 1e-3), 400)
    trace = go.Scatter(
        x=grid, y=in_flight(records.requests, grid), mode="lines", line_shape="hv", name="requests"
    )
    return _with_window(figure("Requests in flight", "s", "requests", [trace]), records)


def _tokens(records: Records) -> go.Figure:
    at = np.array([stamp for r in records.requests for stamp in r.chunk_at]) / 1e9
    weights = np.array([tokens for r in records.requests for tokens in r.chunk_tokens])
    end = max(1.0, float(at.max()) if len(at) else 1.0)
    counts, edges = np.histogram(at, bins=max(1, math.ceil(end)), range=(0, math.ceil(end)), weights=weights)
    trace = go.Bar(x=edges[:-1] + 0.5, y=counts, name="tokens/s", marker_color=_COLOURS[0])
    return _with_window(figure("Output tokens", "s", "tokens/s", [trace], bargap=0), records)


def _server(records: Records) -> list[go.Figure]:
    """What the server said of itself, as far as it did."""
    told = timeline(records)
    if told is None:
        return []
    figures = []
    requests = [name for name in ("running", "waiting") if told.known(name)]
    if requests:
        traces = [
            go.Scatter(x=told.at, y=getattr(told, name), mode="lines", line_shape="hv", name=name)
            for name in requests
        ]
        figures.append(figure("Requests in the server", "s", "requests", traces))
    if told.known("kv_usage"):
        usage = [100 * value for value in told.kv_usage]
        trace = go.Scatter(x=told.at, y=usage, mode="lines", line_shape="hv", name="KV cache")
        figures.append(figure("KV cache in use", "s", "%", [trace], yaxis_range=[0, 101]))
    if told.known("preemptions"):
        bars = go.Bar(x=told.at, y=told.preemptions, name="preemptions", marker_color=_COLOURS[3])
        figures.append(figure("Preemptions between scrapes", "s", "preemptions", [bars], bargap=0))
    return [_with_window(drawn, records) for drawn in figures]


def _parts(summary: Summary) -> list[go.Figure]:
    """Where the mean TTFT of each class went."""
    if not summary.count("queue_p50"):
        return []
    classes = summary.classes
    traces = [
        go.Bar(
            x=list(classes),
            y=[summary.value(f"{part}_mean", cls) for cls in classes],
            name=METRIC_NAMES[part],
            marker_color=colour,
        )
        for part, colour in zip(PARTS, _COLOURS, strict=False)
    ]
    return [figure("Where the mean TTFT went", "class", "s", traces, barmode="stack")]


def _with_window(drawn: go.Figure, records: Records) -> go.Figure:
    low, high = records.window
    drawn.add_vrect(low, high, fillcolor="#3b6fb6", opacity=0.06, line_width=0, annotation_text="measured")
    return drawn
