"""What a program needs that sends load to a simulated server. Others of the engine's modules are no concern
of such a program: import-linter holds loadgen to this one."""

from __future__ import annotations

from engine.cache import cache_dir
from engine.errors import ConfigError, EngineUserError
from engine.models.checkpoint import load_model_config
from engine.models.model_config import ModelConfig
from engine.models.weights import resolve_model
from engine.request import SamplingParams
from engine.sim.devices import DEVICES, work_ratios
from engine.sim.server import (
    SIMULATED_FLAGS,
    WITHOUT_EFFECT,
    SimulatedServer,
    Simulation,
    on_device,
    on_pool,
    on_times,
)
from engine.sim.simulated_runner import TimedRequest
from engine.sim.step_log import read_step_log
from engine.sim.step_times import (
    StepSample,
    StepTimes,
    StepTimesError,
    draw_value,
    fit_step_times,
    group_samples,
)

__all__ = [
    "DEVICES",
    "SIMULATED_FLAGS",
    "WITHOUT_EFFECT",
    "ConfigError",
    "EngineUserError",
    "ModelConfig",
    "SamplingParams",
    "SimulatedServer",
    "Simulation",
    "StepSample",
    "StepTimes",
    "StepTimesError",
    "TimedRequest",
    "cache_dir",
    "draw_value",
    "fit_step_times",
    "group_samples",
    "on_device",
    "on_pool",
    "on_times",
    "read_model_config",
    "read_step_log",
    "work_ratios",
]


def read_model_config(name: str) -> ModelConfig:
    """Of a config.json, a checkpoint or "bundled"; no weights are needed.

    Raises EngineUserError, OSError.
    """
    path = resolve_model(name)
    return load_model_config(path, "gguf" if path.suffix == ".gguf" else "dummy")
