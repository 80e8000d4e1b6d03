"""Signals as PromQL text. The text is evidence for people, the live evaluator's query, and the alert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    counted,
    metrics_of,
)
from servers.kinds import VLLM
from servers.metrics.catalog import METRICS, Metric, plain, stated_bounds
from servers.metrics.identity import PEERS, Identity

_BY_PEERS = f"by ({', '.join(PEERS)})"
_PEERS = f"on ({', '.join(PEERS)}) group_left ()"
_HOST = "vtune_host"
"""A label of the queries' own: servers may have one called ``host``."""
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

    ``selector`` is what stands inside the braces (``job="vllm"``); ``available`` are the sample names there
    are, by the server's own (None: unknown, the newest name is written); ``slo`` resolves thresholds named by
    an SLO. An element of an answer keeps every label that tells its engine from others: what ``identity``
    drops is added up, or one of its copies taken.
    """

    window_ms: int
    step_ms: int
    selector: str = ""
    available: Mapping[str, Sequence[str]] | None = None
    slo: Mapping[str, float] = field(default_factory=dict)
    offset_ms: int = 0
    """How long before the evaluation's instant the window ends."""
    identity: Identity = field(default_factory=Identity)
    bounds: Mapping[str, Sequence[float]] = field(default_factory=lambda: stated_bounds(VLLM))
    """By key, the finite bucket bounds that all histograms of a metric have here, ascending."""
    by: tuple[str, ...] | None = None
    """Labels by which engines are added up, also histograms before their quantile; None: each by itself."""

    def text(self, node: Node) -> str:
        """The query whose result has one element per engine."""
        if self.by is None and self.identity.spread(metrics_of(node)):
            figure = replace(self, identity=self.identity.of_servers()).text(node)
            return self._spread(figure, counted(node))
        match node:
            case OverTime(key, how):
                combine = "max" if how == "resets" else METRICS[key].combine
                return self._combined(key, self._ranges(key, "", _FUNCTIONS[how]), combine)
            case Quantile(q, key):
                grown = self._ranges(key, "_bucket", "increase")
                return f"histogram_quantile({q:g}, {self._combined(key, grown, keep='le')})"
            case HistogramSum(key, how):
                return self._combined(key, self._ranges(key, "_sum", how))
            case Count(key, how):
                return self._combined(key, self._ranges(key, "_count", _FUNCTIONS[how]))
            case Mean(key):
                return f"{self.text(HistogramSum(key))} / {self.text(Count(key))}"
            case Above(key, _):
                bound = self.bound_of(node)
                below = self._ranges(key, "_bucket", "increase", f'le=~"{bound:g}([.]0)?"')
                return f"1 - {self._combined(key, below, drop='le')} / {self.text(Count(key))}"
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
                a, b = f"({self.text(left)})", f"({self.text(right)})"
                return f"({a} <= {b}) or {b} or {a}"
            case AgainstPeers(of):
                own = self.text(of)
                return f"({own}) / {_PEERS} avg {_BY_PEERS} ({own})"
            case OfPeers(of):
                own = self.text(of)
                others = f"-1 * ({own}) + {_PEERS} sum {_BY_PEERS} ({own})"
                return f"({others}) / {_PEERS} (count {_BY_PEERS} ({own}) - 1)"
            case Half(of, which):
                half = self.window_ms // 2
                earlier = half if which == "first" else 0
                return replace(self, window_ms=half, offset_ms=self.offset_ms + earlier).text(of)
            case OnHost(key, how):
                return self._beside(self._host_figure(key, how))
            case EnginesOnHost():
                return self._beside(f"count by ({_HOST}) ({self._hosts()})")

    def bound_of(self, node: Above) -> float:
        """The bucket bound that stands for ``node``'s threshold: the first one at or above it."""
        wanted = self.slo[node.bound] if isinstance(node.bound, str) else node.bound
        bounds = self.bounds.get(node.metric, ())
        return next((bound for bound in bounds if bound >= wanted), bounds[-1] if bounds else wanted)

    def _combined(self, key: str, vector: str, how: str = "", keep: str = "", drop: str = "") -> str:
        """One element per engine out of a metric's series; ``keep`` and ``drop``: a label of its values."""
        roles, how = self.identity.of(key), how or METRICS[key].combine
        if roles.copies:
            vector = f"max without ({', '.join(roles.copies)}) ({vector})"
        if self.by is not None:
            return f"{how} by ({', '.join(filter(None, (keep, *self.by)))}) ({vector})"
        if parts := [name for name in (drop, *roles.parts) if name]:
            return f"{how} without ({', '.join(parts)}) ({vector})"
        return f"({vector})" if " or " in vector else vector

    def _spread(self, figure: str, shared_out: bool) -> str:
        """A server's figure for each of its engines; ``shared_out``: an even share of it."""
        pool = self._combined(self.identity.pool, self._ranges(self.identity.pool, "", "last_over_time"))
        within = ", ".join(self.identity.within)
        each = f"0 * {pool} + ignoring ({within}) group_left () ({figure})"
        if not shared_out:
            return each
        return f"({each}) / ignoring ({within}) group_left () count without ({within}) ({pool})"

    def together(self, nodes: Mapping[str, Node]) -> str:
        """One query for several nodes; the label ``signal`` tells whose an element is."""
        texts = [
            f'label_replace({self.text(node)}, "signal", "{name}", "", "")' for name, node in nodes.items()
        ]
        while len(texts) > 1:  # in pairs: a chain would copy its growing left side again and again
            pairs = [texts[at : at + 2] for at in range(0, len(texts), 2)]
            texts = [f"({' or '.join(pair)})" for pair in pairs]
        return texts[0]

    def present(self, prefixes: Iterable[str]) -> str:
        """The series whose own names begin so, whatever stands before that; of a histogram the counts."""
        own = f'__name__=~"(.*_)?({"|".join(prefixes)})[_:].*"'
        where = self._where(f'{own},__name__!~".*_(bucket|sum)"')
        return f"last_over_time({where}[{promql_duration(self.window_ms)}])"

    def _host_figure(self, key: str, how: str) -> str:
        """One figure a host."""
        name, window = METRICS[key].names[0], promql_duration(self.window_ms)
        if how == "busy":
            idle = f'rate({name}{{mode="idle"}}[{window}])'
            return f"1 - avg by ({_HOST}) ({_with_host(idle)})"
        seen = _with_host(f"avg_over_time({name}[{window}])")
        return f"count by ({_HOST}) ({seen})" if how == "count" else f"avg by ({_HOST}) ({seen}) / 100"

    def _hosts(self) -> str:
        """Every engine with its host, and the value 0."""
        running = self._combined("running", self._ranges("running", "", "last_over_time"))
        return _with_host(f"0 * {running}")

    def _beside(self, figure: str) -> str:
        """A host's figure for each of its engines."""
        return f"sum without ({_HOST}) ({self._hosts()} + on ({_HOST}) group_left () ({figure}))"

    def bucket_bounds(self, key: str) -> str:
        """Which ``le`` values a histogram has, and how often."""
        seen = self._ranges(key, "_bucket", "last_over_time")
        if self.by is not None:
            return f"count by ({', '.join(('le', *self.by))}) ({seen})"
        roles = self.identity.of(key)
        return f"count without ({', '.join((*roles.parts, *roles.copies))}) ({seen})"

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
        """The sample names to ask for, newest first. Where it is unknown which there are, the newest; of one
        whose series are chosen by a label, which older servers lack, all."""
        names = [name + suffix for name in metric.names]
        here = self.available or {}
        known = [spelled for name in names for spelled in here.get(name, ())]
        return known or (names if metric.where else names[:1])

    def _ranges(self, key: str, suffix: str, function: str, matcher: str = "") -> str:
        window = promql_duration(self.window_ms)
        return self._either(
            key, suffix, lambda series: f"{function}({series}[{window}]{self._offset})", matcher
        )

    @property
    def _offset(self) -> str:
        return f" offset {promql_duration(self.offset_ms)}" if self.offset_ms else ""

    def _instant(self, key: str) -> str:
        return self._combined(key, self._either(key, "", str))

    def _either(self, key: str, suffix: str, write: Callable[[str], str], matcher: str = "") -> str:
        """What is written of each name's series; of one that two names have, the newer's."""
        texts = []
        for name in self.names(METRICS[key], suffix):
            chosen = METRICS[key].chosen_by(plain(name))
            own = "" if chosen is None else f'{chosen[0]}="{chosen[1]}"'
            text = write(name + self._where(own, *self._whole(key), matcher))
            texts.append(text if chosen is None else f"max without ({chosen[0]}) ({text})")
        return " or ".join(texts)

    def _sum(self, gauges: tuple[str, ...]) -> str:
        texts = [self._instant(gauge) for gauge in gauges]
        return texts[0] if len(texts) == 1 else f"({' + '.join(texts)})"

    def _holds(self, condition: GaugeCondition) -> str:
        return f"({self._sum(condition.gauges)} > bool {condition.above:g})"

    def _subquery(self) -> str:
        return f"[{promql_duration(self.window_ms)}:{promql_duration(self.step_ms)}]{self._offset}"

    def _whole(self, key: str) -> list[str]:
        wholes = self.identity.of(key).wholes
        return [f'{name}{"=" if alone else "!="}"{value}"' for name, value, alone in wholes]

    def _where(self, *matchers: str) -> str:
        inside = ",".join(part for part in (self.selector, *matchers) if part)
        return f"{{{inside}}}" if inside else ""


def _with_host(vector: str) -> str:
    return f'label_replace({vector}, "{_HOST}", "$1", "instance", "([^:]*).*")'


def promql_duration(ms: int) -> str:
    """Prometheus's spelling of a duration."""
    for unit, size in (("w", 604_800_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"
