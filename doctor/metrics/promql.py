"""Signals as PromQL text. The text is evidence for people, the live evaluator's query, and the alert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from doctor.metrics.signals import (
    Above,
    AgainstPeers,
    Constant,
    Count,
    EnginesOnHost,
    GaugeCondition,
    Half,
    HistogramSum,
    Least,
    Mean,
    MeanWhile,
    Node,
    OfPeers,
    OnHost,
    OverTime,
    Product,
    Quantile,
    Ratio,
    Share,
    Sum,
)
from servers.metrics.catalog import METRICS, Metric

GROUP_LABELS = ("instance", "model_name", "engine")
"""One engine. Series that agree in these are added up; more instances are told apart."""

_FUNCTIONS = {
    "avg": "avg_over_time",
    "min": "min_over_time",
    "max": "max_over_time",
    "last": "last_over_time",
    "delta": "delta",
    "deriv": "deriv",
    "increase": "increase",
    "rate": "rate",
    "resets": "resets",
    "count": "count_over_time",
}


@dataclass(frozen=True)
class PromQL:
    """Writes queries over one window.

    ``selector`` is what stands inside the braces (``job="vllm"``); ``available`` are the sample names that
    the server has (None: unknown, the newest name is written); ``slo`` resolves thresholds named by an SLO.
    """

    window_ms: int
    step_ms: int
    selector: str = ""
    available: frozenset[str] | None = None
    slo: Mapping[str, float] = field(default_factory=dict)
    offset_ms: int = 0
    """How long before the evaluation's instant the window ends."""
    by: tuple[str, ...] = GROUP_LABELS
    """What is told apart; everything else is added up, also histograms before their quantile."""

    def text(self, node: Node) -> str:
        """The query whose result has one element per engine."""
        match node:
            case OverTime(key, how):
                combine = "max" if how == "resets" else METRICS[key].combine
                return f"{combine} {self._by} ({self._ranges(key, '', _FUNCTIONS[how])})"
            case Quantile(q, key):
                grown = self._ranges(key, "_bucket", "increase")
                return f"histogram_quantile({q:g}, sum {self._by_le} ({grown}))"
            case HistogramSum(key, how):
                return f"sum {self._by} ({self._ranges(key, '_sum', how)})"
            case Count(key, how):
                return f"sum {self._by} ({self._ranges(key, '_count', _FUNCTIONS[how])})"
            case Mean(key):
                return f"{self.text(HistogramSum(key))} / {self.text(Count(key))}"
            case Above(key, _):
                bound = bucket_bound(node, self.slo)
                below = self._ranges(key, "_bucket", "increase", f'le=~"{bound:g}([.]0)?"')
                return f"1 - sum {self._by} ({below}) / {self.text(Count(key))}"
            case Share(conditions):
                held = [self._holds(condition) for condition in conditions]
                return f"avg_over_time(({' * '.join(held)}){self._subquery()})"
            case MeanWhile(key, conditions):
                kept = [f"{self._sum(c.gauges)} > {c.above:g}" for c in conditions]
                filtered = " and ".join([self._sum((key,)), *kept])
                return f"avg_over_time(({filtered}){self._subquery()})"
            case Ratio(top, bottom):
                return f"({self.text(top)}) / ({self.text(bottom)})"
            case Sum(terms):
                return " + ".join(f"({self.text(term)})" for term in terms)
            case Constant(value):
                return f"{value:g}"
            case Product(left, right):
                return f"({self.text(left)}) * ({self.text(right)})"
            case Least(left, right):
                on = f"on ({', '.join(self.by)})"
                a, b = f"({self.text(left)})", f"({self.text(right)})"
                return f"({a} <= {on} {b}) or {on} {b} or {on} {a}"
            case AgainstPeers(of):
                own = self.text(of)
                return f"({own}) / on (model_name) group_left () avg by (model_name) ({own})"
            case OfPeers(of):
                own, of_model = self.text(of), "on (model_name) group_left ()"
                others = f"-1 * ({own}) + {of_model} sum by (model_name) ({own})"
                return f"({others}) / {of_model} (count by (model_name) ({own}) - 1)"
            case Half(of, which):
                half = self.window_ms // 2
                return replace(self, window_ms=half, offset_ms=half if which == "first" else 0).text(of)
            case OnHost(key, how):
                return self._beside(self._host_figure(key, how))
            case EnginesOnHost():
                return self._beside(f"count by (host) ({self._hosts()})")

    @property
    def _by(self) -> str:
        return f"by ({', '.join(self.by)})"

    @property
    def _by_le(self) -> str:
        return f"by (le, {', '.join(self.by)})"

    def together(self, nodes: Mapping[str, Node]) -> str:
        """One query for several nodes; the label ``signal`` tells whose an element is."""
        texts = [
            f'label_replace({self.text(node)}, "signal", "{name}", "", "")' for name, node in nodes.items()
        ]
        while len(texts) > 1:  # in pairs: a chain would copy its growing left side again and again
            pairs = [texts[at : at + 2] for at in range(0, len(texts), 2)]
            texts = [f"({' or '.join(pair)})" for pair in pairs]
        return texts[0]

    def owners(self, names: Iterable[str]) -> str:
        """Which engines have which of these sample names."""
        matcher = f'__name__=~"{"|".join(sorted(names))}"'
        where, window = self._where(matcher), promql_duration(self.window_ms)
        return f"count by (__name__, {', '.join(self.by)}) (last_over_time({where}[{window}]))"

    def _host_figure(self, key: str, how: str) -> str:
        """One figure a host."""
        name, window = METRICS[key].names[0], promql_duration(self.window_ms)
        if how == "busy":
            idle = f'rate({name}{{mode="idle"}}[{window}])'
            return f"1 - avg by (host) ({_with_host(idle)})"
        seen = _with_host(f"avg_over_time({name}[{window}])")
        return f"count by (host) ({seen})" if how == "count" else f"avg by (host) ({seen}) / 100"

    def _hosts(self) -> str:
        """Every engine with its host, and the value 0."""
        running = f"sum {self._by} ({self._ranges('running', '', 'last_over_time')})"
        return _with_host(f"0 * {running}")

    def _beside(self, figure: str) -> str:
        """A host's figure for each of its engines."""
        return f"sum {self._by} ({self._hosts()} + on (host) group_left () ({figure}))"

    def bucket_bounds(self, key: str) -> str:
        """Which ``le`` values a histogram has, and how often."""
        return f"count {self._by_le} ({self._ranges(key, '_bucket', 'last_over_time')})"

    def labels(self, key: str) -> str:
        """The series of an info metric, with their labels."""
        return self._ranges(key, "", "last_over_time")

    def labels_of(self, name: str) -> str:
        """The series of one sample name."""
        return f"last_over_time({name}{self._where()}[{promql_duration(self.window_ms)}])"

    def series(self, key: str) -> str:
        """A metric's instant selector, under its newest name here."""
        return self.names(METRICS[key], "")[0] + self._where()

    def without(self, matcher: str) -> PromQL:
        """The same queries without one matcher of the selector's end."""
        return replace(self, selector=self.selector.removesuffix(matcher).rstrip(","))

    def names(self, metric: Metric, suffix: str) -> list[str]:
        """The sample names to ask for, newest first."""
        names = [name + suffix for name in metric.names]
        if self.available is None:
            return names[:1]
        return [name for name in names if name in self.available] or names[:1]

    def _ranges(self, key: str, suffix: str, function: str, matcher: str = "") -> str:
        where = self._where(matcher)
        window = promql_duration(self.window_ms)
        offset = f" offset {promql_duration(self.offset_ms)}" if self.offset_ms else ""
        return " or ".join(
            f"{function}({name}{where}[{window}]{offset})" for name in self.names(METRICS[key], suffix)
        )

    def _instant(self, key: str) -> str:
        where = self._where()
        names = " or ".join(name + where for name in self.names(METRICS[key], ""))
        return f"{METRICS[key].combine} {self._by} ({names})"

    def _sum(self, gauges: tuple[str, ...]) -> str:
        texts = [self._instant(gauge) for gauge in gauges]
        return texts[0] if len(texts) == 1 else f"({' + '.join(texts)})"

    def _holds(self, condition: GaugeCondition) -> str:
        return f"({self._sum(condition.gauges)} > bool {condition.above:g})"

    def _subquery(self) -> str:
        return f"[{promql_duration(self.window_ms)}:{promql_duration(self.step_ms)}]"

    def _where(self, matcher: str = "") -> str:
        inside = ",".join(part for part in (self.selector, matcher) if part)
        return f"{{{inside}}}" if inside else ""


def _with_host(vector: str) -> str:
    return f'label_replace({vector}, "host", "$1", "instance", "([^:]*).*")'


def bucket_bound(node: Above, slo: Mapping[str, float]) -> float:
    """The bucket bound that stands for ``node``'s threshold: the first one at or above it."""
    if not isinstance(node.bound, str):
        return node.bound
    wanted = slo[node.bound]
    bounds = METRICS[node.metric].bounds
    return next((bound for bound in bounds if bound >= wanted), bounds[-1])


def promql_duration(ms: int) -> str:
    """Prometheus's spelling of a duration."""
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"
