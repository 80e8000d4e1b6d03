"""Test helper: the pages of an imaginary vLLM server, described by what it does between two scrapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Level = float | Callable[[float], float]
"""A gauge: constant, or a function of the window's elapsed fraction (0..1)."""
Count = Callable[[int, float], float]
"""A counter after so many intervals, at an elapsed fraction of the window."""

_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LENGTH = tuple(m * 10**e for e in range(5) for m in (1, 2, 5))
_FEW = (1, 2, 3, 4, 5, 10, 20)

_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv": "vllm:kv_cache_usage_perc",
}
_REASONS = "vllm:num_requests_waiting_by_reason"
_COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "rejections": "vllm:admission_rejections_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "finished": "vllm:request_success_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
_HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", _FIRST),
    "itl": ("vllm:inter_token_latency_seconds", _TOKEN),
    "tpot": ("vllm:request_time_per_output_token_seconds", _TOKEN),
    "e2e": ("vllm:e2e_request_latency_seconds", _REQUEST),
    "queue_time": ("vllm:request_queue_time_seconds", _REQUEST),
    "prefill_time": ("vllm:request_prefill_time_seconds", _REQUEST),
    "decode_time": ("vllm:request_decode_time_seconds", _REQUEST),
    "prompt_length": ("vllm:request_prompt_tokens", _LENGTH),
    "generation_length": ("vllm:request_generation_tokens", _LENGTH),
    "prefill_length": ("vllm:request_prefill_kv_computed_tokens", _LENGTH),
    "request_preemptions": ("vllm:request_num_preemptions", _FEW),
    "iteration_tokens": ("vllm:iteration_tokens_total", tuple(2.0**n for n in range(14))),
}

HEALTHY_COUNTERS: Mapping[str, float] = {
    "preemptions": 0,
    "prompt_tokens": 2000,
    "generation_tokens": 1000,
    "prefix_queries": 2000,
    "prefix_hits": 0,
    "finished": 10,
}
HEALTHY_HISTOGRAMS: Mapping[str, Mapping[float, float]] = {
    "ttft": {0.12: 10},
    "itl": {0.03: 990, 0.06: 10},
    "tpot": {0.03: 10},
    "e2e": {3.2: 10},
    "queue_time": {0.0: 10},
    "prefill_time": {0.1: 10},
    "decode_time": {3.0: 10},
    "prompt_length": {200.0: 10},
    "prefill_length": {200.0: 10},
    "request_preemptions": {0.0: 10},
}


@dataclass(frozen=True)
class Server:
    """Everything between two scrapes: gauges as levels, counters as growth, histograms as {value: count}.

    The defaults are a busy, healthy server; ``counters`` and ``histograms`` are laid over them.
    """

    running: Level = 8
    waiting: Level = 0
    kv: Level = 0.4
    deferred: float | None = None
    """Of ``waiting``, those that do not wait for capacity; None: the server tells no reasons."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Labels of lora_requests_info."""
    counters: Mapping[str, float | Count] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    """More labels of cache_config_info."""
    labels: Mapping[str, str] = field(default_factory=lambda: {"engine": "0", "model_name": "m"})

    def scrapes(self, count: int = 16, every_ms: int = 4000) -> list[tuple[int, str]]:
        """``count`` scrapes; the first shows a server that has just done one interval's work."""
        start = 1_700_000_000_000
        return [
            (start + number * every_ms, self.page(number + 1, number / (count - 1)))
            for number in range(count)
        ]

    def page(self, intervals: int, elapsed: float) -> str:
        """The /metrics page after so many intervals of work."""
        lines = []
        for key, name in _GAUGES.items():
            level: Level = getattr(self, key)
            lines.append(f"{name}{self._labels()} {level(elapsed) if callable(level) else level}")
        if self.deferred is not None:
            waiting = self.waiting(elapsed) if callable(self.waiting) else self.waiting
            lines.append(f"{_REASONS}{self._labels(reason='capacity')} {waiting - self.deferred}")
            lines.append(f"{_REASONS}{self._labels(reason='deferred')} {self.deferred}")
        if self.adapters:
            own = ",".join(f'{name}="{value}"' for name, value in self.adapters.items())
            lines.append(f"vllm:lora_requests_info{{{own}}} 1.7e9")
        for key, growth in {**HEALTHY_COUNTERS, **self.counters}.items():
            total = growth(intervals, elapsed) if callable(growth) else growth * intervals
            lines.append(f"{_COUNTERS[key]}{self._labels()} {total}")
        for key, observed in {**HEALTHY_HISTOGRAMS, **self.histograms}.items():
            lines += self._histogram(*_HISTOGRAMS[key], observed, intervals)
        config = {
            "block_size": "16",
            "num_gpu_blocks": "4097",
            "enable_prefix_caching": "True",
            **self.config,
        }
        lines.append(f"vllm:cache_config_info{self._labels(**config)} 1.0")
        return "\n".join(lines) + "\n"

    def _histogram(
        self, name: str, bounds: tuple[float, ...], observed: Mapping[float, float], intervals: int
    ) -> list[str]:
        lines = [
            f"{name}_bucket{self._labels(le=str(float(bound)))} "
            f"{intervals * sum(count for value, count in observed.items() if value <= bound)}"
            for bound in bounds
        ]
        total = intervals * sum(observed.values())
        lines.append(f"{name}_bucket{self._labels(le='+Inf')} {total}")
        lines.append(f"{name}_count{self._labels()} {total}")
        grown = sum(value * count for value, count in observed.items())
        lines.append(f"{name}_sum{self._labels()} {intervals * grown}")
        return lines

    def _labels(self, **more: str) -> str:
        return "{" + ",".join(f'{key}="{value}"' for key, value in {**self.labels, **more}.items()) + "}"
