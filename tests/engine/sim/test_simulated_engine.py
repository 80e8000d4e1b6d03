"""From flags to a simulated server: defaults, memory, what is refused, and its metrics."""

from __future__ import annotations

from typing import Any

import pytest
from llama_8b import CONFIG

from engine.config import GIB
from engine.errors import ConfigError
from engine.models.model_config import ModelConfig
from engine.request import SamplingParams
from engine.sim.devices import DEVICES
from engine.sim.server import (
    DEFAULT_ACCEPTANCE,
    RESERVED_BYTES,
    SimulatedServer,
    Simulation,
    on_device,
    on_times,
)
from engine.sim.simulated_runner import TimedRequest, own_prompt
from engine.sim.step_times import StepTimes

LLAMA_8B = ModelConfig.from_hf(CONFIG)


def on(name: str, **flags: Any) -> Simulation:
    return on_device(LLAMA_8B, DEVICES[name], flags)


def blocks(simulation: Simulation) -> int:
    return SimulatedServer(simulation).core.memory_plan.num_blocks


def test_defaults_are_those_of_vllm_on_that_device() -> None:
    for name, tokens, seqs in (("h100", 8192, 1024), ("a100", 2048, 256), ("l40s", 2048, 256)):
        config = on(name).config
        assert (config.max_num_batched_tokens, config.max_num_seqs) == (tokens, seqs), name
    assert on("h100", max_num_seqs=64).config.max_num_seqs == 64


def test_memory_is_what_the_device_has_less_weights_activations_logits_and_a_reserve() -> None:
    size = on("h100").size
    assert size.weights_bytes == 2 * LLAMA_8B.num_parameters
    assert size.activation_bytes == 8192 * 2 * (2 * 14_336 + 4 * 4096) + 1024 * 128_256 * 4 + RESERVED_BYTES
    kv = 0.92 * 81_559 * (1 << 20) - size.weights_bytes - size.activation_bytes
    assert blocks(on("h100")) == int(kv) // (16 * 131_072)


def test_a_larger_budget_takes_kv_and_fp8_gives_it() -> None:
    assert blocks(on("h100", max_num_batched_tokens=32_768)) < blocks(on("h100"))
    assert blocks(on("h100", kv_cache_dtype="fp8")) == pytest.approx(2 * blocks(on("h100")), abs=1)
    head = 2 * 2 * 128_256 * 4096
    fp8 = on("h100", quantization="fp8").size.weights_bytes
    assert fp8 - head == pytest.approx((2 * LLAMA_8B.num_parameters - head) / 2)


def test_devices_in_parallel_share_weights_and_kv() -> None:
    one, two = on("h100"), on("h100", tensor_parallel_size=2)
    assert two.size.weights_bytes == one.size.weights_bytes // 2
    assert two.size.kv_bytes_per_token == one.size.kv_bytes_per_token // 2
    assert "sum over devices" in " ".join(two.assumed)


def test_async_scheduling_hides_half_of_the_hosts_time() -> None:
    hidden, shown = on("h100"), on("h100", async_scheduling=False)
    assert hidden.times.host == shown.times.host / 2
    assert hidden.times.host_per_sequence == shown.times.host_per_sequence / 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"tensor_parallel_size": 3}, "tensor-parallel-size 3"),
        ({"quantization": "awq"}, "quantization awq"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv-cache-dtype"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"pipeline_parallel_size": 2}, "pipeline-parallel-size 2: it is not simulated"),
        ({"enable_lora": True}, "enable-lora True: it is not simulated"),
        ({"enable_expert_parallel": True}, "enable-expert-parallel True: it is not simulated"),
        ({"lora_modules": ["sql=./sql"]}, "lora-modules .*: it is not simulated"),
        ({"optimization_level": 0}, "optimization-level 0: it is not simulated"),
        ({"cpu_offload_gb": 1}, "cpu-offload-gb 1: it is not simulated"),
        ({"max_model_len": 100_000}, "the model was made for at most 8192"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "at least max_num_seqs"),
        ({"speculative_config": {"method": "draft_model", "model": "m"}}, "draft model takes is not known"),
    ],
)
def test_what_is_wrong_or_not_simulated_is_refused(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        on("h100", **flags)


def test_flags_without_effect_are_let_pass() -> None:
    on("h100", port=8000, trust_remote_code=True, enforce_eager=True, pipeline_parallel_size=1, revision=None)
    on("h100", enable_lora=False, max_loras=4, cpu_offload_gb=0, enable_expert_parallel=False)


def test_an_assumed_acceptance_is_said_and_a_given_one_taken() -> None:
    flags = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    assumed = on_device(LLAMA_8B, DEVICES["h100"], flags)
    assert assumed.acceptance == DEFAULT_ACCEPTANCE
    assert "draft is accepted" in assumed.assumed[-1]
    given = on_device(LLAMA_8B, DEVICES["h100"], flags, acceptance=0.3)
    assert given.acceptance == 0.3
    assert "draft" not in given.assumed[-1]


def test_metrics_are_scraped_every_second_of_virtual_time() -> None:
    """Steps of 0.3 s: five tokens end at 1.5 s; the scrape of second 1 sees the three that were there."""
    times = StepTimes(launch=0.3)
    simulation = on_times(LLAMA_8B, times, {"device_memory": 40 * GIB, "max_model_len": 512})
    server = SimulatedServer(simulation, "m")
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    server.add(TimedRequest("r", 0.0, own_prompt(0, 8), sampling))
    while server.busy:
        server.step()
    assert server.now == pytest.approx(1.5)
    server.idle_until(3.5)
    assert [second for second, _ in server.scrapes] == [0.0, 1.0, 2.0, 3.0]
    generated = [_value(text, "vllm:generation_tokens_total") for _, text in server.scrapes]
    assert generated == [0, 3, 5, 5]
    assert server.finished["r"].e2e == pytest.approx(1.5)


def _value(text: str, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + "{"))
