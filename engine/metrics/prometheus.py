"""vLLM's Prometheus metric families: its names, types, labels and buckets, in a registry of their own.

:class:`PrometheusMetrics` lives where ``/metrics`` is answered and is fed the StepStats of each step;
:mod:`engine.metrics.stats` says at which moment what is observed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from engine.metrics.families import Child, Histogram, Kind, Labels, MetricFamily, Number
from engine.metrics.stats import FinishedStats, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# fmt: off
REQUEST_LATENCY_SECONDS = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
FIRST_TOKEN_SECONDS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
INTER_TOKEN_SECONDS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
# fmt: on
ITERATION_TOKENS = (1, 8, *(1 << exponent for exponent in range(4, 15)))
PARAMS_N = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
CACHE_SOURCES = ("device", "host", "p2p", "disk")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def token_buckets(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to ``limit`` (the model's context length)."""
    buckets, decade = [], 1
    while decade <= limit:
        buckets += [step * decade for step in (1, 2, 5) if step * decade <= limit]
        decade *= 10
    return tuple(buckets)


class LoRAInfo:
    """``lora_requests_info``: as in vLLM a series for each state that there was, whose value is the unix time
    at which it was last so."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = str(max_loras)
        self._states: dict[tuple[str, str], Number] = {}
        self._children: list[tuple[Labels, Number]] = []
        text = "LoRA adapters of requests that run and wait; the value is when that was so."
        self.family = MetricFamily("vllm:lora_requests_info", text, "gauge", self._children)

    def record(self, stats: StepStats) -> None:
        """It is now as ``stats`` says."""
        running, waiting = stats.adapters
        names = ",".join(running), ",".join(waiting)
        if names not in self._states:
            labels = {
                "max_lora": self._max_loras,
                "running_lora_adapters": names[0],
                "waiting_lora_adapters": names[1],
            }
            self._states[names] = Number()
            self._children.append((labels, self._states[names]))
        self._states[names].set(time.time())


class PrometheusMetrics:
    """The families behind ``/metrics``, in a registry of their own.

    ``cache_info`` becomes the labels of ``cache_config_info``. As in vLLM, the ``spec_decode_*`` families
    exist only with ``num_speculative_tokens`` > 0, and ``lora_requests_info`` with ``max_loras`` > 0, so that
    their absence says that it is off. What vLLM's page has for features that are not here (sleep, caches of
    images, estimates of FLOP/s, limits of the queue) stands on 0 as it does there while they are off, so that
    dashboards made for vLLM show what they show of it.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int,
        num_speculative_tokens: int = 0,
        max_loras: int = 0,
        cache_info: Mapping[str, object] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.families: list[MetricFamily] = []
        """The engine's families, in order; the registry has those of the process as well."""
        self._labels = {"model_name": model_name, "engine": "0"}
        ProcessCollector(registry=self.registry)
        self._define_gauges(cache_info or {})
        self._define_counters()
        self._define_histograms(token_buckets(max_model_len))
        self._lora = LoRAInfo(max_loras) if max_loras else None
        if self._lora is not None:
            self._add_family(self._lora.family)
        self._spec_positions: list[Number] = []
        if num_speculative_tokens:
            self._define_spec_decode(num_speculative_tokens)

    def render(self) -> bytes:
        """The exposition text, of type :data:`CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def record(self, stats: StepStats) -> None:
        """Add one step."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_capacity.set(stats.num_waiting - stats.num_deferred)
        self._waiting_deferred.set(stats.num_deferred)
        self._kv_usage.set(stats.kv_usage)
        if self._lora is not None:
            self._lora.record(stats)
        if stats.prefix_queries:
            self._prefix_queries.inc(stats.prefix_queries)
            self._prefix_hits.inc(stats.prefix_hits)
        if stats.external_queries:
            self._external_queries.inc(stats.external_queries)
            self._external_hits.inc(stats.external_hits)
        self._preemptions.inc(stats.preemptions)
        if stats.had_output:
            self._record_iteration(stats)
        for finished in stats.finished:
            self._record_finished(finished)
        if self._spec_positions and stats.num_drafts:
            self._drafts.inc(stats.num_drafts)
            self._draft_tokens.inc(stats.num_draft_tokens)
            self._accepted_tokens.inc(stats.num_accepted_tokens)
            for counter, accepted in zip(self._spec_positions, stats.accepted_per_position, strict=False):
                counter.inc(accepted)

    def record_decodes(self, count: int, latencies: Sequence[float], kv_usage: float) -> None:
        """Add one step per item of ``latencies``, in which ``count`` requests emit a token that many seconds
        after their last one, and nothing else changes."""
        self._kv_usage.set(kv_usage)
        self._generation_tokens.inc(count * len(latencies))
        self._iteration_tokens.observe(count, len(latencies))
        for latency in latencies:
            self._inter_token.observe(latency, count)

    def record_group(self, n: int, longest: int) -> None:
        """A prompt's ``n`` sequences are all finished; the longest generated ``longest`` tokens."""
        self._params_n.observe(n)
        self._max_generation.observe(longest)

    def _record_iteration(self, stats: StepStats) -> None:
        computed = stats.prompt_tokens - stats.prompt_tokens_cached
        if stats.prompt_tokens:
            self._prompt_tokens.inc(stats.prompt_tokens)
            self._prompt_sources["local_compute"].inc(computed)
            local = stats.prompt_tokens_cached - stats.prompt_tokens_external
            self._prompt_sources["local_cache_hit"].inc(local)
            self._prompt_sources["external_kv_transfer"].inc(stats.prompt_tokens_external)
            self._prompt_cached.inc(stats.prompt_tokens_cached)
            self._cached_sources["device"].inc(local)
            self._cached_sources["host"].inc(stats.prompt_tokens_external)
        self._generation_tokens.inc(stats.generation_tokens)
        self._iteration_tokens.observe(computed + stats.generation_tokens)
        for latency in stats.first_token_latencies:
            self._first_token.observe(latency)
        for latency, count in stats.inter_token_latencies:
            self._inter_token.observe(latency, count)

    def _record_finished(self, finished: FinishedStats) -> None:
        self._success[finished.reason].inc()
        self._e2e.observe(finished.e2e)
        self._queue_time.observe(finished.queue)
        self._prefill_time.observe(finished.prefill)
        self._decode_time.observe(finished.decode)
        self._inference_time.observe(finished.inference)
        self._time_per_output_token.observe(finished.time_per_output_token)
        self._request_preemptions.observe(finished.preemptions)
        self._request_prompt.observe(finished.prompt_tokens)
        self._request_prefill_computed.observe(finished.prompt_tokens - finished.cached_tokens)
        self._request_generation.observe(finished.generation_tokens)
        self._request_max_tokens.observe(finished.max_tokens)

    def _define_gauges(self, cache_info: Mapping[str, object]) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the execution batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be processed.")
        reasons = self._gauges(
            "num_requests_waiting_by_reason",
            "Waiting requests: 'capacity' wait for room, 'deferred' for something else.",
            reason=("capacity", "deferred"),
        )
        self._waiting_capacity, self._waiting_deferred = reasons["capacity"], reasons["deferred"]
        sleeps = self._gauges(
            "engine_sleep_state", "1 for the state that it is in.", sleep_state=SLEEP_STATES
        )
        sleeps["awake"].set(1)
        self._kv_usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        info = {**{name: str(value) for name, value in cache_info.items()}, "engine": "0"}
        self._add("cache_config_info", "The KV cache's configuration.", "gauge", info, Number()).set(1)

    def _define_counters(self) -> None:
        self._prefix_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._external_queries = self._counter(
            "external_prefix_cache_queries", "Tokens asked of the KV connector."
        )
        self._external_hits = self._counter("external_prefix_cache_hits", "Tokens it has loaded.")
        self._counter("mm_cache_queries", "Items looked up in the cache of images: none is served.")
        self._counter("mm_cache_hits", "Items found there.")
        self._preemptions = self._counter("num_preemptions", "Preemptions.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, booked with the first token.")
        self._prompt_sources = self._counters(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", source=PROMPT_SOURCES
        )
        self._prompt_cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.")
        self._cached_sources = self._counters(
            "prompt_tokens_cached_by_source", "Cached prompt tokens by where they lay.", source=CACHE_SOURCES
        )
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        for name in ("flops", "read_bytes", "write_bytes"):
            self._counter(f"estimated_{name}_per_gpu", "Estimated only with vLLM's --enable-mfu-metrics.")
        own = {"model_name": self._labels["model_name"]}
        rejections: list[tuple[Labels, Number]] = [
            ({**own, "reason": r}, Number()) for r in REJECTION_REASONS
        ]
        self._register(
            "admission_rejections", "Requests rejected by a limit of the queue.", "counter", rejections
        )
        self._success = self._counters(
            "request_success", "Requests finished, by reason.", finished_reason=FINISH_REASONS
        )

    def _define_histograms(self, tokens: Sequence[float]) -> None:
        define = self._histogram
        self._iteration_tokens = define(
            "iteration_tokens_total", "Tokens booked per engine step.", ITERATION_TOKENS
        )
        self._first_token = define(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS
        )
        self._inter_token = define(
            "inter_token_latency_seconds", "Time between two outputs of a request.", INTER_TOKEN_SECONDS
        )
        self._time_per_output_token = define(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            INTER_TOKEN_SECONDS,
        )
        self._e2e = define("e2e_request_latency_seconds", "Arrival to finish.", REQUEST_LATENCY_SECONDS)
        self._queue_time = define(
            "request_queue_time_seconds", "Queued to first scheduled.", REQUEST_LATENCY_SECONDS
        )
        self._prefill_time = define(
            "request_prefill_time_seconds", "First scheduled to first token.", REQUEST_LATENCY_SECONDS
        )
        self._decode_time = define(
            "request_decode_time_seconds", "First token to last token.", REQUEST_LATENCY_SECONDS
        )
        self._inference_time = define(
            "request_inference_time_seconds", "First scheduled to last token.", REQUEST_LATENCY_SECONDS
        )
        self._request_prompt = define("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._request_generation = define(
            "request_generation_tokens", "Generated tokens of a request.", tokens
        )
        self._max_generation = define(
            "request_max_num_generation_tokens", "Tokens of the longest of a prompt's n sequences.", tokens
        )
        self._request_max_tokens = define("request_params_max_tokens", "The max_tokens parameter.", tokens)
        self._request_prefill_computed = define(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, without cached ones.", tokens
        )
        self._params_n = define("request_params_n", "The n parameter.", PARAMS_N)
        self._request_preemptions = define(
            "request_num_preemptions", "Preemptions of a request.", NUM_PREEMPTIONS
        )

    def _define_spec_decode(self, num_speculative_tokens: int) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Drafts verified.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        positions = self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            position=tuple(str(position) for position in range(num_speculative_tokens)),
        )
        self._spec_positions = list(positions.values())

    def _gauge(self, name: str, text: str) -> Number:
        return self._add(name, text, "gauge", self._labels, Number())

    def _counter(self, name: str, text: str) -> Number:
        return self._add(name, text, "counter", self._labels, Number())

    def _gauges(self, name: str, text: str, **values: Sequence[str]) -> dict[str, Number]:
        """One child per value of the one extra label, all present from the start."""
        return self._by_label(name, text, "gauge", values)

    def _counters(self, name: str, text: str, **values: Sequence[str]) -> dict[str, Number]:
        return self._by_label(name, text, "counter", values)

    def _by_label(
        self, name: str, text: str, kind: Kind, values: Mapping[str, Sequence[str]]
    ) -> dict[str, Number]:
        ((label, options),) = values.items()
        numbers = {option: Number() for option in options}
        self._register(name, text, kind, [({**self._labels, label: o}, n) for o, n in numbers.items()])
        return numbers

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._add(name, text, "histogram", self._labels, Histogram(buckets))

    def _add(self, name: str, text: str, kind: Kind, labels: Labels, child: Child) -> Child:
        self._register(name, text, kind, [(labels, child)])
        return child

    def _register(self, name: str, text: str, kind: Kind, children: Sequence[tuple[Labels, Child]]) -> None:
        self._add_family(MetricFamily(f"vllm:{name}", text, kind, children))

    def _add_family(self, family: MetricFamily) -> None:
        self.registry.register(family)
        self.families.append(family)
