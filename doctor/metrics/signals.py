"""Every signal that a rule may name, one declarative line each.

A line says what to compute from which metrics of the catalog. ``doctor.metrics.evaluators`` computes it from
recorded scrapes, ``doctor.metrics.promql`` writes it as PromQL; a test holds the two equal on the same data.
All signals are per engine (see ``servers.metrics.identity``), over one window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

How = Literal["avg", "min", "max", "last", "delta", "deriv", "increase", "rate", "resets", "count"]


@dataclass(frozen=True)
class OverTime:
    """A Prometheus range function over one metric, its series added up (or the largest, for a percentage)."""

    metric: str
    how: How


@dataclass(frozen=True)
class Quantile:
    """``histogram_quantile`` of what was observed in the window."""

    q: float
    metric: str


@dataclass(frozen=True)
class Mean:
    """Sum over count of a histogram: exact, where a quantile inside a wide first bucket means nothing."""

    metric: str


@dataclass(frozen=True)
class HistogramSum:
    """Growth of a histogram's sum; ``rate`` per second."""

    metric: str
    how: Literal["increase", "rate"] = "increase"


@dataclass(frozen=True)
class Count:
    """How many observations a histogram gained; ``rate``: per second; ``last``: since the server's start."""

    metric: str
    how: Literal["increase", "rate", "last"] = "increase"


@dataclass(frozen=True)
class Above:
    """Share of the observations above ``bound``, a bucket bound or an SLO's name (its next bound up)."""

    metric: str
    bound: float | str


@dataclass(frozen=True)
class GaugeCondition:
    """At one instant: do these gauges, added up, exceed a level? Several are joined by "and"."""

    gauges: tuple[str, ...]
    above: float


@dataclass(frozen=True)
class Share:
    """Share of the window's instants at which all conditions hold."""

    conditions: tuple[GaugeCondition, ...]


@dataclass(frozen=True)
class MeanWhile:
    """Mean of a gauge over the instants at which all conditions hold."""

    metric: str
    conditions: tuple[GaugeCondition, ...]


@dataclass(frozen=True)
class Ratio:
    """One quantity over another; no value where the lower one is 0, or infinity where it is ``unbounded``."""

    top: Node
    bottom: Node
    unbounded: bool = False
    """Whether something over 0 is more than any number. 0 over 0 has no value."""


@dataclass(frozen=True)
class Sum:
    terms: tuple[Node, ...]


@dataclass(frozen=True)
class Constant:
    """A figure that is the same for every engine; a term of a sum."""

    value: float


@dataclass(frozen=True)
class Product:
    left: Node
    right: Node


@dataclass(frozen=True)
class Least:
    """The smaller of two quantities, or the one that there is."""

    left: Node
    right: Node


@dataclass(frozen=True)
class AgainstPeers:
    """This engine's value over the mean of all engines that serve the same model; needs two of them."""

    of: Node


@dataclass(frozen=True)
class OfPeers:
    """The mean of the other engines that serve the same model; needs one."""

    of: Node


@dataclass(frozen=True)
class Half:
    """A figure over the first or the second half of the window."""

    of: Mean | OverTime
    which: Literal["first", "second"]


@dataclass(frozen=True)
class OnHost:
    """What an exporter on the engine's host says; the host is the instance without its port.

    ``avg``: mean of a percentage, as a share; ``busy``: share of the CPU time that is not idle; ``count``:
    how many series there are.
    """

    metric: str
    how: Literal["avg", "busy", "count"]


@dataclass(frozen=True)
class EnginesOnHost:
    """How many engines share the engine's host."""


Node = (
    OverTime
    | Quantile
    | Mean
    | HistogramSum
    | Count
    | Above
    | Share
    | MeanWhile
    | Ratio
    | Sum
    | Constant
    | Product
    | Least
    | AgainstPeers
    | OfPeers
    | Half
    | OnHost
    | EnginesOnHost
)
SignalUnit = Literal["s", "tokens", "tokens/s", "requests", "1/s", "share", "ratio", "count", "s/token"]


@dataclass(frozen=True)
class Signal:
    """``sources`` are tried in order: the first whose metrics the server exposes gives the value."""

    name: str
    unit: SignalUnit
    help: str
    sources: tuple[Node, ...]


def _signal(name: str, unit: SignalUnit, help: str, *sources: Node) -> Signal:
    return Signal(name, unit, help, sources)


def _less(metric: str) -> Node:
    return Product(Constant(-1.0), Mean(metric))


_WAITING = GaugeCondition(("queue",), 0)
"""For capacity. A server that tells no reasons (vLLM before 0.20) has one queue."""
_BUSY = GaugeCondition(("running",), 0)
_ACTIVE = GaugeCondition(("running", "waiting"), 0)
_FULL = GaugeCondition(("kv_usage",), 0.95)
_HIGH = GaugeCondition(("kv_usage",), 0.9)
_LOAD = Sum((OverTime("running", "avg"), OverTime("waiting", "avg")))
_NONE = Product(Constant(0.0), OverTime("running", "last"))
"""Of what a server does not tell, and a rule must not wait for."""

# What a step takes is a fixed part (the weights are read, kernels launched) and a part for each token in it.
# A step serves at least ten sequences in the time of its fixed part: 13 are the least of the devices measured
# (SmolLM2-135M on CPU cores), hundreds on GPUs. So a step takes ten tokens and its own at least, which bounds
# the time of one from above: by a typical step, and by the steps of a prompt.
_FREE_ROWS = 10.0
_RATES = Sum((OverTime("prompt_tokens", "rate"), OverTime("generation_tokens", "rate")))
_ROWS = Sum((MeanWhile("running", (_BUSY,)), Constant(_FREE_ROWS)))
_LITTLE = Ratio(OverTime("running", "avg"), OverTime("generation_tokens", "rate"))
_TYPICAL = Quantile(0.5, "itl")
# Where prefill has no histogram, it is what a first token takes beside the wait, which is told or follows by
# Little's law; what decodes, the gaps between tokens add up to.
_PREFILLS: tuple[Node, ...] = (
    Mean("prefill_time"),
    *(
        Sum((Mean("ttft"), Product(Constant(-1.0), wait)))
        for wait in (Mean("queue_time"), Ratio(OverTime("waiting", "avg"), Count("ttft", "rate")))
    ),
)
_PREFILLING = tuple(
    Sum((HistogramSum("ttft", "rate"), Product(Constant(-1.0), waiting)))
    for waiting in (HistogramSum("queue_time", "rate"), OverTime("waiting", "avg"))
)
# Tokens prefilled leave out what the prefix cache had; older versions tell only the prompt's length.
_LENGTHS = ("prefill_length", "prompt_length")
# Where prefills are not counted, each prompt is taken to hit the prefix cache for the same share of it.
_LONGEST = Quantile(1, "prompt_length")
_COMPUTED = tuple(
    Sum((Constant(1.0), Product(Constant(-1.0), hits)))
    for hits in (
        Ratio(OverTime("prefix_hits", "increase"), OverTime("prefix_queries", "increase")),
        OverTime("cache_hit_rate", "avg"),
    )
)

_HALVES: tuple[tuple[str, Literal["first", "second"]], ...] = (("early", "first"), ("late", "second"))
_IN_HALVES: tuple[tuple[str, SignalUnit, str, str, Literal["rate", "avg"]], ...] = (
    ("generation_rate", "tokens/s", "output tokens per second", "generation_tokens", "rate"),
    ("prompt_rate", "tokens/s", "prompt tokens per second", "prompt_tokens", "rate"),
    ("running", "requests", "mean of running requests", "running", "avg"),
)

SIGNALS: dict[str, Signal] = {
    signal.name: signal
    for signal in (
        # Queue and batch. Means are diluted by idle time, the *_share and running_* ones are not.
        _signal("running_mean", "requests", "mean of running requests", OverTime("running", "avg")),
        _signal("running_max", "requests", "most requests running", OverTime("running", "max")),
        _signal("running_last", "requests", "running at the end", OverTime("running", "last")),
        _signal("running_delta", "requests", "change of running", OverTime("running", "delta")),
        _signal("running_slope", "1/s", "slope of running", OverTime("running", "deriv")),
        _signal("running_busy", "requests", "mean of running while any runs", MeanWhile("running", (_BUSY,))),
        # A 0 beside a queue is stale: gauges change at the end of a step, which may take seconds.
        _signal(
            "running_when_waiting",
            "requests",
            "mean of running while any runs and others wait",
            MeanWhile("running", (_WAITING, _BUSY)),
        ),
        _signal(
            "waiting_mean",
            "requests",
            "mean of requests that wait for capacity",
            OverTime("queue", "avg"),
        ),
        _signal(
            "waiting_max",
            "requests",
            "most requests waiting",
            OverTime("queue", "max"),
        ),
        _signal(
            "waiting_last",
            "requests",
            "waiting at the end",
            OverTime("queue", "last"),
        ),
        _signal(
            "waiting_delta",
            "requests",
            "change of waiting",
            OverTime("queue", "delta"),
        ),
        _signal("waiting_slope", "1/s", "slope of waiting", OverTime("queue", "deriv")),
        _signal("active_share", "share", "share of time with any request", Share((_ACTIVE,))),
        _signal(
            "waiting_share",
            "share",
            "share of the active time in which requests wait",
            Ratio(Share((_WAITING,)), Share((_ACTIVE,))),
        ),
        _signal(
            "deferred_mean",
            "requests",
            "requests that wait for something else than capacity (an adapter's slot, KV from elsewhere, a "
            "grammar)",
            OverTime("deferred", "avg"),
            OverTime("waiting_for_grammar", "avg"),
            _NONE,
        ),
        _signal(
            "waiting_for_kv_mean",
            "requests",
            "requests that wait for KV from another server",
            OverTime("waiting_for_kv", "avg"),
            _NONE,
        ),
        _signal(
            "waiting_for_grammar_mean",
            "requests",
            "requests that wait for a grammar",
            OverTime("waiting_for_grammar", "avg"),
            _NONE,
        ),
        _signal(
            "load_against_peers", "ratio", "running + waiting over the mean of all peers", AgainstPeers(_LOAD)
        ),
        _signal("peers_load", "requests", "running + waiting, mean of the other instances", OfPeers(_LOAD)),
        _signal(
            "peers_requests", "count", "first tokens, mean of the other instances", OfPeers(Count("ttft"))
        ),
        _signal("scrapes", "count", "scrapes in the window", OverTime("running", "count")),
        # Below 1 for who came or went within the window.
        _signal(
            "scrapes_against_peers",
            "ratio",
            "scrapes in the window over the mean of all peers",
            AgainstPeers(OverTime("running", "count")),
        ),
        # KV pool
        _signal("kv_mean", "share", "mean KV usage", OverTime("kv_usage", "avg")),
        _signal("kv_max", "share", "highest KV usage", OverTime("kv_usage", "max")),
        _signal(
            "kv_full_share",
            "share",
            "share of the active time with KV usage above 0.95",
            Ratio(Share((_FULL,)), Share((_ACTIVE,))),
        ),
        _signal(
            "kv_high_waiting_share",
            "share",
            "share of the active time with KV usage above 0.9 and requests waiting",
            Ratio(Share((_HIGH, _WAITING)), Share((_ACTIVE,))),
        ),
        _signal(
            "running_when_full",
            "requests",
            "mean of running while others wait and KV usage is above 0.9",
            MeanWhile("running", (_WAITING, _HIGH)),
        ),
        _signal(
            "rejected",
            "count",
            "requests refused at a limit of the queue",
            OverTime("rejections", "increase"),
            _NONE,
        ),
        _signal("preemptions", "count", "preemptions counted", OverTime("preemptions", "increase")),
        _signal(
            "request_preemptions",
            "count",
            "preemptions of the requests that finished",
            HistogramSum("request_preemptions"),
        ),
        # Latency
        _signal("ttft_p50", "s", "median time to first token", Quantile(0.5, "ttft")),
        _signal("ttft_p95", "s", "P95 time to first token", Quantile(0.95, "ttft")),
        _signal("ttft_p99", "s", "P99 time to first token", Quantile(0.99, "ttft")),
        _signal("ttft_mean", "s", "mean time to first token", Mean("ttft")),
        _signal(
            "ttft_above_slo",
            "share",
            "share of first tokens later than the TTFT SLO (its next bucket bound up)",
            Above("ttft", "slo_ttft_p95"),
        ),
        _signal("itl_p50", "s", "median inter-token latency (per step output)", Quantile(0.5, "itl")),
        _signal("itl_p90", "s", "P90 inter-token latency", Quantile(0.9, "itl")),
        _signal("itl_p99", "s", "P99 inter-token latency", Quantile(0.99, "itl")),
        # Without the histogram: by Little's law, running requests over tokens per second. It counts a
        # request's prefill as a part of its tokens.
        _signal(
            "itl_mean",
            "s",
            "mean inter-token latency",
            Mean("itl"),
            _LITTLE,
        ),
        _signal(
            "itl_above_slo",
            "share",
            "share of gaps between tokens longer than the ITL SLO (its next bucket bound up)",
            Above("itl", "slo_itl_p99"),
        ),
        _signal(
            "load_share",
            "ratio",
            "time that grows with the tokens in a step over all time, at most",
            *(
                Product(
                    _RATES,
                    Least(
                        Ratio(prefill, Sum((Mean(length), Constant(_FREE_ROWS)))),
                        Ratio(Least(_TYPICAL, Mean("itl")), _ROWS),
                    ),
                )
                for prefill in _PREFILLS
                for length in _LENGTHS
            ),
            Product(_RATES, Ratio(Least(_TYPICAL, Mean("itl")), _ROWS)),
            Product(OverTime("generation_tokens", "rate"), Ratio(_LITTLE, _ROWS)),
        ),
        _signal(
            "seconds_per_sequence",
            "s",
            "what a step takes longer for one sequence more, where few steps carry prompts",
            *(
                Least(
                    Ratio(Sum((prefill, Product(Constant(-1.0), Mean("itl")))), Mean(length)),
                    Ratio(Mean("itl"), _ROWS),
                )
                for prefill in _PREFILLS
                for length in _LENGTHS
            ),
            Ratio(Mean("itl"), _ROWS),
            Ratio(_LITTLE, _ROWS),
        ),
        _signal("tpot_p50", "s", "median time per output token of a request", Quantile(0.5, "tpot")),
        _signal("tpot_mean", "s", "mean time per output token of a request", Mean("tpot")),
        _signal("e2e_mean", "s", "mean end-to-end latency", Mean("e2e")),
        _signal("queue_time_mean", "s", "mean wait before the first scheduling", Mean("queue_time")),
        # By Little's law the seconds of waiting per second are the requests that wait: what gauges miss
        # between two scrapes is in here, though only once a request has finished.
        _signal(
            "queueing_mean",
            "requests",
            "requests that wait at once (queue seconds per second)",
            HistogramSum("queue_time", "rate"),
        ),
        _signal(
            "queued_share", "share", "share of the finished that waited over 0.3 s", Above("queue_time", 0.3)
        ),
        _signal("prefill_time_mean", "s", "mean time in prefill", *_PREFILLS),
        _signal("decode_time_mean", "s", "mean time in decode", Mean("decode_time")),
        # The parts are of the requests that finished. While a queue grows, first tokens are of others, and
        # what is left of their time is more; an end-to-end time has in it what follows the first token.
        _signal(
            "outside_mean",
            "s",
            "mean time before the first token that is neither queue nor prefill",
            Least(
                Sum((Mean("e2e"), *(_less(part) for part in ("queue_time", "prefill_time", "decode_time")))),
                Sum((Mean("ttft"), *(_less(part) for part in ("queue_time", "prefill_time")))),
            ),
        ),
        # Without any of the histograms, tokens stand for time; a prompt's take less of it.
        _signal(
            "decode_per_prefill",
            "ratio",
            "time in decode over time in prefill",
            Ratio(HistogramSum("decode_time"), HistogramSum("prefill_time"), unbounded=True),
            *(Ratio(HistogramSum("itl", "rate"), prefilling) for prefilling in _PREFILLING),
            Ratio(
                OverTime("generation_tokens", "increase"),
                OverTime("prompt_tokens", "increase"),
                unbounded=True,
            ),
        ),
        _signal(
            "prefilling_mean",
            "requests",
            "requests in prefill at once (prefill seconds per second)",
            HistogramSum("prefill_time", "rate"),
            *_PREFILLING,
        ),
        # Traffic
        _signal("first_tokens", "count", "requests that got a first token", Count("ttft")),
        _signal("request_rate", "1/s", "first tokens per second", Count("ttft", "rate")),
        _signal(
            "output_tokens_mean",
            "tokens",
            "mean output length",
            Mean("generation_length"),
            Ratio(OverTime("generation_tokens", "increase"), OverTime("finished", "increase")),
        ),
        _signal("finished", "count", "requests that finished", OverTime("finished", "increase")),
        _signal("served_total", "count", "first tokens since the server started", Count("ttft", "last")),
        _signal("ttft_early_mean", "s", "mean TTFT, first half of the window", Half(Mean("ttft"), "first")),
        _signal("ttft_late_mean", "s", "mean TTFT, second half of the window", Half(Mean("ttft"), "second")),
        _signal("generated", "tokens", "output tokens", OverTime("generation_tokens", "increase")),
        _signal("prompt_rate", "tokens/s", "prompt tokens per second", OverTime("prompt_tokens", "rate")),
        _signal(
            "generation_rate", "tokens/s", "output tokens per second", OverTime("generation_tokens", "rate")
        ),
        *(
            _signal(
                f"{name}_{when}", unit, f"{help}, {half} half of the window", Half(OverTime(key, how), half)
            )
            for name, unit, help, key, how in _IN_HALVES
            for when, half in _HALVES
        ),
        _signal("restarts", "count", "counter resets", OverTime("generation_tokens", "resets")),
        _signal("prompt_tokens_p50", "tokens", "median prompt length", Quantile(0.5, "prompt_length")),
        _signal("prompt_tokens_mean", "tokens", "mean prompt length", Mean("prompt_length")),
        _signal(
            "prompt_tokens_max",
            "tokens",
            "bound of the longest prompts' bucket",
            Quantile(1, "prompt_length"),
        ),
        _signal("long_prompt_share", "share", "share of prompts above 1000", Above("prompt_length", 1000.0)),
        _signal(
            "iteration_tokens_max",
            "tokens",
            "bound of the largest steps' bucket; a prompt is booked whole where it ends",
            Quantile(1, "iteration_tokens"),
        ),
        _signal(
            "long_prefill_share",
            "share",
            "share of requests that prefilled more than 1000 tokens",
            Above("prefill_length", 1000.0),
            Above("prompt_length", 1000.0),
        ),
        _signal(
            "prefill_tokens_p99",
            "tokens",
            "P99 of tokens prefilled",
            Quantile(0.99, "prefill_length"),
            Quantile(0.99, "prompt_length"),
        ),
        _signal(
            "prefill_tokens_max",
            "tokens",
            "bound of the longest prefills' bucket",
            Quantile(1, "prefill_length"),
            *(Least(Product(_LONGEST, share), _LONGEST) for share in _COMPUTED),
            _LONGEST,
        ),
        _signal(
            "prefill_tokens_mean",
            "tokens",
            "mean of tokens prefilled",
            Mean("prefill_length"),
            Mean("prompt_length"),
        ),
        _signal(
            "prefill_seconds_per_token",
            "s/token",
            "prefill time over tokens prefilled",
            Ratio(HistogramSum("prefill_time"), HistogramSum("prefill_length")),
            Ratio(HistogramSum("prefill_time"), HistogramSum("prompt_length")),
            *(Ratio(prefill, Mean("prompt_length")) for prefill in _PREFILLS[1:]),
        ),
        _signal(
            "output_tokens_max",
            "tokens",
            "bound of the longest outputs' bucket",
            Quantile(1, "generation_length"),
        ),
        # The host, from other exporters
        _signal(
            "gpu_utilization", "share", "time in which a kernel ran, of the GPUs", OnHost("gpu_busy", "avg")
        ),
        _signal("gpus_on_host", "count", "GPUs of the host", OnHost("gpu_busy", "count")),
        _signal("cpu_utilization", "share", "CPU time of the host that was used", OnHost("cpu_time", "busy")),
        _signal("engines_on_host", "count", "engines on the host", EnginesOnHost()),
        # Prefix cache and speculation
        _signal(
            "prefix_hit_rate",
            "share",
            "prefix-cache hits over queries, in tokens",
            Ratio(OverTime("prefix_hits", "increase"), OverTime("prefix_queries", "increase")),
            OverTime("cache_hit_rate", "avg"),
        ),
        _signal("draft_tokens", "tokens", "tokens drafted", OverTime("draft_tokens", "increase")),
        _signal(
            "acceptance",
            "share",
            "accepted over drafted tokens",
            Ratio(OverTime("accepted_tokens", "increase"), OverTime("draft_tokens", "increase")),
        ),
        _signal(
            "accept_length",
            "tokens",
            "tokens per step: accepted drafts and one more",
            OverTime("accept_length", "avg"),
        ),
        _signal(
            "tokens_drafted_per_draft",
            "tokens",
            "tokens per draft",
            Ratio(OverTime("draft_tokens", "increase"), OverTime("drafts", "increase")),
        ),
    )
}


SHARED_OUT = frozenset(
    source.metric for signal in SIGNALS.values() for source in signal.sources if isinstance(source, Above)
)
"""Histograms of which a rule asks for the share above a bound."""


def counted(node: Node) -> bool:
    """Whether a figure of several engines is the sum of theirs."""
    match node:
        case OverTime() | HistogramSum() | Count():
            return True
        case Sum(terms):
            return all(map(counted, terms))
        case OfPeers(of):
            return counted(of)
    return False


def metrics_of(node: Node) -> set[str]:
    """Catalog keys that ``node`` reads."""
    match node:
        case Ratio(left, right) | Product(left, right) | Least(left, right):
            return metrics_of(left) | metrics_of(right)
        case Constant():
            return set()
        case Sum(terms):
            return set().union(*(metrics_of(term) for term in terms))
        case AgainstPeers(of) | OfPeers(of) | Half(of, _):
            return metrics_of(of)
        case EnginesOnHost():
            return {"running"}
        case Share(conditions):
            return {gauge for condition in conditions for gauge in condition.gauges}
        case MeanWhile(metric, conditions):
            return {metric, *(gauge for condition in conditions for gauge in condition.gauges)}
        case _:
            return {node.metric}
