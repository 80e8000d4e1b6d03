"""What the benchmarks of the baselines share: engines on virtual or real time, models by their shapes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.shapes import SHAPES
from engine.config import EngineConfig
from engine.core import EngineCore, Runner
from engine.models.bundled import fetch_bundled
from engine.models.checkpoint import load_model_config
from engine.models.model_config import ModelConfig
from engine.request import Request, SamplingParams
from engine.sim.calibrate import calibrate
from engine.sim.devices import H100_SXM, roofline
from engine.sim.simulated_runner import ModelSize, SimulatedRunner, VirtualClock, WallClock, WorkloadClock
from engine.sim.step_times import StepTimes

BUNDLED = "bundled"
H100 = "h100"


def llama(**sizes: Any) -> ModelConfig:
    common = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    return ModelConfig.from_hf({**common, **sizes})


LLAMA_1B = llama(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True
)
LLAMA_8B = llama(**SHAPES["8B"])


@dataclass(frozen=True)
class Setting:
    """An engine to experiment on: its config, and how to make a runner with its clock."""

    name: str
    config: EngineConfig
    make: Callable[[], tuple[Runner, WorkloadClock]]
    rate: float
    """Short chats a second, with a long document among eight, that are about two thirds of its capacity."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", action="store_true", help="compute with the bundled model, shortened")
    parser.add_argument("--times", default=BUNDLED, help="bundled (measured now), h100, or a JSON file")
    parser.add_argument("--save-times", type=Path, help="write the measured step times here")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--seed", type=int, default=1, help="of the workloads (default 1)")


def make_setting(options: argparse.Namespace) -> Setting:
    """The engine that the options ask for."""
    if options.real:
        return real_bundled()
    if options.times == H100:
        return simulated_h100()
    if options.times == BUNDLED:
        times, _ = calibrate(bundled_config(max_num_seqs=32))
    else:
        times = StepTimes.from_json(Path(options.times).read_text())
    if options.save_times:
        options.save_times.write_text(times.to_json())
    size = ModelSize.of(load_model_config(fetch_bundled()))
    return Setting(f"simulated: {times.source}", bundled_config(), lambda: on_virtual_time(size, times), 3.0)


def simulated_h100(model: ModelConfig = LLAMA_8B) -> Setting:
    times = roofline(model, H100_SXM)
    size = ModelSize.of(model, max_num_batched_tokens=8192)
    config = EngineConfig(
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=128,
        enable_prefix_caching=False,
        device_memory=H100_SXM.memory_bytes,
    )
    return Setting(f"simulated: 8B, {times.source}", config, lambda: on_virtual_time(size, times), 75.0)


def on_virtual_time(size: ModelSize, times: StepTimes) -> tuple[Runner, WorkloadClock]:
    clock = VirtualClock()
    return SimulatedRunner(size, times, clock), clock


def bundled_config(max_num_seqs: int = 16) -> EngineConfig:
    return EngineConfig(
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        num_gpu_blocks_override=2200,
    )


def real_bundled() -> Setting:
    from engine.runner import ModelRunner

    config = bundled_config()
    runner = ModelRunner(config)
    warm = EngineCore(config, runner)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    warm.add(Request("warm-up", list(range(100, 356)), sampling))
    while warm.has_unfinished:
        warm.step()
    return Setting("real: bundled model", config, lambda: (runner, WallClock()), 3.0)
