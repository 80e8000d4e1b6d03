"""vLLM's metric families: names and types, and one run with every figure computed by hand."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_kit import HashRunner

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.metrics.http import HttpMetrics
from engine.metrics.prometheus import PrometheusMetrics, token_buckets
from engine.metrics.stats import FinishedStats, StepStats
from engine.request import Request, RequestStatus, SamplingParams
from engine.step import StepPlan, StepResult

SCRAPES = Path(__file__).parents[3].parent / "shared" / "scrapes"


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(HashRunner):
    """Every step takes ``seconds`` on the test's clock."""

    max_model_len = 128
    seconds = 0.0

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        self._clock.now += self.seconds
        return super().execute(plan)


class Lab:
    """An engine whose steps take as long as the test says, and the metrics it feeds."""

    def __init__(self, max_loras: int = 0, **flags: Any) -> None:
        self.clock = Clock()
        self.runner = TimedRunner(self.clock)
        config = EngineConfig(max_num_batched_tokens=32, max_num_seqs=4, num_gpu_blocks_override=9, **flags)
        if max_loras:
            config = replace(config, enable_lora=True, max_loras=max_loras)
        self.core = EngineCore(config, self.runner, clock=self.clock)
        self.metrics = PrometheusMetrics("m", max_model_len=128, max_loras=max_loras)

    def add(self, name: str, prompt: list[int], max_tokens: int, arrived: float, lora_name: str = "") -> None:
        request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), arrival_time=arrived)
        request.lora_name = lora_name
        self.core.add(request)

    def step(self, seconds: float) -> None:
        self.runner.seconds = seconds
        self.core.step()
        self.metrics.record(self.core.stats)

    def value(self, name: str, **labels: str) -> float:
        wanted = {"model_name": "m", "engine": "0", **labels}
        value = self.metrics.registry.get_sample_value(f"vllm:{name}", wanted)
        assert value is not None, name
        return value


def test_a_run_computed_by_hand() -> None:
    lab = Lab()
    # A: 40 tokens, arrived at 99.5, queued at 100. Budget 32: two steps of prefill.
    lab.add("A", list(range(40)), 3, arrived=99.5)
    lab.clock.now = 101.0
    lab.step(2.0)  # 101-103: 32 tokens of A; nothing comes out
    assert lab.value("num_requests_running") == 1
    assert lab.value("kv_cache_usage_perc") == pytest.approx(2 / 8)
    assert lab.value("prefix_cache_queries_total") == 40  # at admission
    assert lab.value("prompt_tokens_total") == 0  # with the first token
    assert lab.value("iteration_tokens_total_count") == 0
    # B shares its first block with A; queued at 103, scheduled at once.
    lab.add("B", [*range(16), *range(500, 504)], 2, arrived=103.0)
    lab.step(0.5)  # 103-103.5: 8 of A, 4 of B (16 are cached): both emit their first token
    assert lab.value("prompt_tokens_total") == 60
    assert lab.value("prompt_tokens_by_source_total", source="local_compute") == 44
    assert lab.value("prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert lab.value("prompt_tokens_cached_total") == 16
    assert lab.value("prefix_cache_queries_total") == 60
    assert lab.value("prefix_cache_hits_total") == 16
    assert lab.value("iteration_tokens_total_sum") == 44 + 2
    assert lab.value("time_to_first_token_seconds_count") == 2
    assert lab.value("time_to_first_token_seconds_sum") == pytest.approx(4.0 + 0.5)
    lab.step(0.25)  # 103.75: A's second, B's second and last
    assert lab.value("request_success_total", finished_reason="length") == 1
    lab.step(0.75)  # 104.5: A's third and last
    assert lab.value("num_requests_running") == 0
    assert lab.value("kv_cache_usage_perc") == 0
    assert lab.value("generation_tokens_total") == 5
    assert lab.value("inter_token_latency_seconds_count") == 3
    assert lab.value("inter_token_latency_seconds_sum") == pytest.approx(0.25 + 0.25 + 0.75)
    assert lab.value("iteration_tokens_total_count") == 3
    assert lab.value("iteration_tokens_total_sum") == 46 + 2 + 1
    assert lab.value("request_success_total", finished_reason="length") == 2
    sums = {
        "e2e_request_latency_seconds": (104.5 - 99.5) + (103.75 - 103),
        "request_queue_time_seconds": (101 - 100) + 0,
        "request_prefill_time_seconds": (103.5 - 101) + 0.5,
        "request_decode_time_seconds": (104.5 - 103.5) + 0.25,
        "request_inference_time_seconds": (104.5 - 101) + 0.75,
        "request_time_per_output_token_seconds": 1.0 / 2 + 0.25 / 1,
        "request_prompt_tokens": 60,
        "request_generation_tokens": 5,
        "request_params_max_tokens": 5,
        "request_prefill_kv_computed_tokens": 44,
        "request_num_preemptions": 0,
    }
    for name, total in sums.items():
        assert lab.value(f"{name}_sum") == pytest.approx(total), name
        assert lab.value(f"{name}_count") == 2, name
    assert lab.value("time_to_first_token_seconds_bucket", le="0.5") == 1
    assert lab.value("time_to_first_token_seconds_bucket", le="5.0") == 2


def test_preemptions_and_requeueing() -> None:
    # 8 usable blocks: two requests of 4 blocks each fill the pool; both need a fifth.
    lab = Lab(enable_prefix_caching=False)
    lab.add("A", list(range(60)), 12, arrived=100.0)
    lab.add("B", list(range(200, 260)), 12, arrived=100.0)
    while lab.core.has_unfinished:
        lab.step(1.0)
    assert lab.value("num_preemptions_total") == 1
    assert lab.value("request_num_preemptions_sum") == 1
    assert lab.value("time_to_first_token_seconds_count") == 2
    # B waited for its first turn only; what it waited after its preemption is decode time.
    assert lab.value("request_queue_time_seconds_sum") == 1.0
    assert lab.value("prefix_cache_queries_total") == 0


def test_an_abort_leaves_no_finish_and_a_stop_string_does() -> None:
    lab = Lab()
    for name in "AB":
        lab.add(name, [1, 2, 3], 9, arrived=100.0)
    lab.step(1.0)
    lab.core.abort(["A"])
    lab.metrics.record(lab.core.stats)
    assert lab.value("num_requests_running") == 1
    lab.core.abort(["B"], RequestStatus.FINISHED_STOPPED)
    lab.metrics.record(lab.core.stats)
    assert lab.value("num_requests_running") == 0
    assert lab.value("request_success_total", finished_reason="abort") == 0
    assert lab.value("request_success_total", finished_reason="stop") == 1
    assert lab.value("e2e_request_latency_seconds_count") == 1


def test_speculation_families_exist_only_with_speculation() -> None:
    plain = PrometheusMetrics("m", max_model_len=64).render().decode()
    assert "spec_decode" not in plain
    metrics = PrometheusMetrics("m", max_model_len=64, num_speculative_tokens=3)
    metrics.record(
        StepStats(num_drafts=4, num_draft_tokens=11, num_accepted_tokens=6, accepted_per_position=(4, 2, 0))
    )
    text = metrics.render().decode()
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 4.0' in text
    assert 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 11.0' in text
    assert 'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.0' in text
    for position, accepted in enumerate((4.0, 2.0, 0.0)):
        label = f'{{engine="0",model_name="m",position="{position}"}} {accepted}'
        assert f"vllm:spec_decode_num_accepted_tokens_per_pos_total{label}" in text


def test_the_n_parameter_counts_once_a_prompt() -> None:
    metrics = PrometheusMetrics("m", max_model_len=64)
    metrics.record_group(3, 17)
    text = metrics.render().decode()
    assert 'vllm:request_params_n_sum{engine="0",model_name="m"} 3.0' in text
    assert 'vllm:request_max_num_generation_tokens_sum{engine="0",model_name="m"} 17.0' in text


def test_adapters_that_run_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One series for each state that there was, with the time when it was last so."""
    lab = Lab(max_loras=1)
    monkeypatch.setattr("engine.metrics.prometheus.time.time", lambda: lab.clock.now)

    def states() -> dict[tuple[str, str, str], float]:
        family = next(each for each in lab.metrics.families if each.name == "vllm:lora_requests_info")
        return {tuple(labels.values()): child.value for labels, child in family.children}  # type: ignore[misc,union-attr]

    assert states() == {}
    for name, adapter in (("A", "sql"), ("B", "chat"), ("C", ""), ("D", "sql"), ("E", "math")):
        lab.add(name, [1, 2, 3], 2, arrived=100.0, lora_name=adapter)
    lab.step(1.0)
    assert states() == {("1", "sql", "chat,math"): 101.0}
    assert lab.value("num_requests_waiting_by_reason", reason="deferred") == 2
    assert lab.value("num_requests_waiting_by_reason", reason="capacity") == 0
    lab.step(1.0)  # A, C and D end
    lab.step(1.0)
    assert states() == {
        ("1", "sql", "chat,math"): 101.0,
        ("1", "", "chat,math"): 102.0,
        ("1", "chat", "math"): 103.0,
    }
    for _ in range(3):
        lab.step(1.0)
    assert states()["1", "", ""] == 106.0
    labels = 'max_lora="1",running_lora_adapters="chat",waiting_lora_adapters="math"'
    assert f"vllm:lora_requests_info{{{labels}}} 103.0" in lab.metrics.render().decode()


def test_without_adapters_there_is_no_family_of_them() -> None:
    assert "lora" not in PrometheusMetrics("m", max_model_len=64).render().decode()


def test_token_buckets_end_at_the_context_length() -> None:
    assert token_buckets(4096) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert token_buckets(20) == (1, 2, 5, 10, 20)


def test_finish_reasons_of_the_engine_are_labels() -> None:
    metrics = PrometheusMetrics("m", max_model_len=64)
    for status in RequestStatus:
        if status.finished:
            stats = FinishedStats("r", status.value, 1, 0, 0.5, 0.5, 1, 0.1, 3, 5, 0, 0, 5)
            metrics.record(StepStats(finished=(stats,)))
    assert (
        'vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 4.0' in metrics.render().decode()
    )


def families(text: str) -> Iterator[tuple[str, tuple[str, frozenset[str], frozenset[str]]]]:
    """name -> (type, label names, bucket bounds), without ``_created``, which is no family of its own."""
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(("vllm:", "http_")) or family.name.endswith("_created"):
            continue
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        bounds = {sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")}
        yield family.name, (family.type, frozenset(labels), frozenset(bounds))


@pytest.mark.skipif(not SCRAPES.is_dir(), reason="recordings of a real vLLM are not here")
@pytest.mark.parametrize("recording", ["healthy-steady", "spec-ngram-bad"])
def test_families_are_those_of_a_recorded_vllm(recording: str) -> None:
    """Same names, types, labels and buckets, those of HTTP included."""
    whole = gzip.decompress((SCRAPES / recording / "series.prom.gz").read_bytes()).decode()
    theirs = dict(families(whole.split("# scrape_unix_ms")[-1].split("\n", 1)[1]))
    metrics = PrometheusMetrics(
        "m", max_model_len=4096, num_speculative_tokens=5 if recording == "spec-ngram-bad" else 0
    )
    HttpMetrics(metrics.registry).record("POST", "/v1/completions", 200, 0.3)
    ours = dict(families(metrics.render().decode()))
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"vllm:cache_config_info"}:  # an info: its labels are the configuration
        assert ours[name] == theirs[name], name
