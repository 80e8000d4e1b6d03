"""A Grafana dashboard out of the signals and the playbooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from doctor.diagnosis.playbook import Playbook
from doctor.export.compile import RuleCompiler
from doctor.metrics.signals import SIGNALS
from servers.metrics.identity import PLACE

INSTANCES = 'instance=~"$instance"'
"""The dashboard's own matcher, beside the user's selector."""

_HEIGHT, _WIDTH = 8, 8
_UNITS = {"s": "s", "share": "percentunit", "tokens/s": "short", "s/token": "s"}
_PANELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Traffic": {
        "Tokens per second": ("prompt_rate", "generation_rate"),
        "Requests in the window": ("first_tokens", "finished"),
        "Prompt length": ("prompt_tokens_p50", "prompt_tokens_mean"),
    },
    "Latency": {
        "TTFT (time to first token)": ("ttft_p50", "ttft_p95", "ttft_p99"),
        "ITL (inter-token latency)": ("itl_p50", "itl_p90", "itl_p99"),
        "Where the time goes": ("queue_time_mean", "prefill_time_mean", "decode_time_mean"),
    },
    "Queue and batch": {
        "Running and waiting": ("running_mean", "running_max", "waiting_mean", "waiting_max"),
        "Share of the active time with a queue": ("waiting_share", "queued_share"),
        "Load against peers": ("load_against_peers",),
    },
    "Memory": {
        "KV pool": ("kv_mean", "kv_max"),
        "Preemptions": ("preemptions", "request_preemptions"),
        "Prefix cache hits": ("prefix_hit_rate",),
    },
    "Speculation": {
        "Acceptance": ("acceptance",),
        "TPOT (time per output token)": ("tpot_p50", "tpot_mean"),
        "Tokens per draft": ("tokens_drafted_per_draft",),
    },
}
_OBJECTIVES = {"ttft_p95": "slo_ttft_p95", "itl_p99": "slo_itl_p99"}


def dashboard(books: Sequence[Playbook], compiler: RuleCompiler) -> dict[str, Any]:
    """Grafana's JSON model (schema 39). Panels whose metrics the server lacks are left out."""
    panels = _Panels()
    panels.row("Findings")
    panels.add(_findings(books, compiler), width=3 * _WIDTH)
    for row, contents in _PANELS.items():
        drawn = [_panel(title, names, compiler) for title, names in contents.items()]
        if any(drawn):
            panels.row(row)
            for panel in filter(None, drawn):
                panels.add(panel, _WIDTH)
    return {
        "title": "vtune doctor",
        "uid": "vtune-doctor",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _instances(compiler), _filters()]},
        "panels": panels.placed,
    }


class _Panels:
    """Places panels from left to right, row by row."""

    def __init__(self) -> None:
        self.placed: list[dict[str, Any]] = []
        self._x = self._y = 0

    def row(self, title: str) -> None:
        self._wrap()
        self._place({"type": "row", "title": title, "collapsed": False, "panels": []}, 3 * _WIDTH, 1)
        self._x, self._y = 0, self._y + 1

    def add(self, panel: dict[str, Any], width: int) -> None:
        if self._x + width > 3 * _WIDTH:
            self._wrap()
        self._place(panel, width, _HEIGHT)
        self._x += width

    def _wrap(self) -> None:
        if self._x:
            self._x, self._y = 0, self._y + _HEIGHT

    def _place(self, panel: dict[str, Any], width: int, height: int) -> None:
        where = {"x": self._x, "y": self._y, "w": width, "h": height}
        self.placed.append({"id": len(self.placed) + 1, "gridPos": where, **panel})


def _panel(title: str, names: Sequence[str], compiler: RuleCompiler) -> dict[str, Any] | None:
    """One graph of several signals; None where the server has none of them."""
    queries = {name: query for name in names if (query := compiler.signal(name)) is not None}
    if not queries:
        return None
    where = " ".join(
        f"{{{{{label}}}}}" for label in dict.fromkeys((*PLACE, "instance", *compiler.promql.identity.apart))
    )
    defaults: dict[str, Any] = {"unit": _UNITS.get(SIGNALS[names[0]].unit, "short"), "min": 0}
    limits = [compiler.constants[_OBJECTIVES[name]] for name in names if name in _OBJECTIVES]
    if limits and limits[0] < float("inf"):
        steps = [{"color": "green", "value": None}, {"color": "red", "value": limits[0]}]
        defaults |= {
            "thresholds": {"mode": "absolute", "steps": steps},
            "custom": {"thresholdsStyle": {"mode": "line"}},
        }
    return {
        "type": "timeseries",
        "title": title,
        "description": "; ".join(f"{name}: {SIGNALS[name].help}" for name in queries),
        "datasource": _REFERENCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            _target(query, f"{name} {where}", letter)
            for letter, (name, query) in zip("ABCDEFGH", queries.items(), strict=False)
        ],
    }


def _findings(books: Sequence[Playbook], compiler: RuleCompiler) -> dict[str, Any]:
    """Which rule holds when: one query per rule, 1 where it holds on any engine, else 0."""
    queries = [(book, compiler.rule(book.when).query) for book in books if book.when.parts]
    colours = {
        "type": "value",
        "options": {"0": {"text": "", "color": "transparent"}, "1": {"text": "found", "color": "red"}},
    }
    return {
        "type": "state-timeline",
        "title": "Rules that hold on any instance",
        "description": "The rules of vtune doctor; see vtune playbook show ID.",
        "datasource": _REFERENCE,
        "fieldConfig": {"defaults": {"mappings": [colours]}, "overrides": []},
        "targets": [
            _target(f"clamp_max(count({query}), 1) or vector(0)", book.id, f"R{number}")
            for number, (book, query) in enumerate(queries)
            if isinstance(query, str)
        ],
    }


_REFERENCE = {"type": "prometheus", "uid": "${datasource}"}


def _target(query: str, legend: str, letter: str) -> dict[str, Any]:
    return {"refId": letter, "datasource": _REFERENCE, "expr": query, "legendFormat": legend}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _filters() -> dict[str, Any]:
    """Any label, such as namespace or pod: Grafana adds what is chosen to every query."""
    return {"name": "filters", "label": "Labels", "type": "adhoc", "datasource": _REFERENCE, "filters": []}


def _instances(compiler: RuleCompiler) -> dict[str, Any]:
    promql = compiler.promql
    series = promql.without(INSTANCES).series("running")
    query = f"label_values({series}, instance)"
    return {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": _REFERENCE,
        "query": query,
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
