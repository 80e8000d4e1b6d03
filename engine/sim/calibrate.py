"""Step times of a real engine on this machine: measured on a short run of all kinds of steps, then fitted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.core import EngineCore, Runner
from engine.request import Request, SamplingParams
from engine.sim.step_log import RecordingRunner
from engine.sim.step_times import StepSample, StepTimes, fit_step_times
from engine.step import StepPlan

TOKEN_IDS = range(100, 1100)
"""What prompts are made of: ids that every vocabulary of a real model has."""


@dataclass(frozen=True)
class CalibrationWave:
    """Requests that come together, a step apart."""

    prompts: Sequence[int]
    """Their lengths in tokens."""
    output: int
    """Tokens that each of them emits."""


MOVED_BLOCKS = 64
"""KV blocks copied to the host and back, to time it."""

WAVES = (
    CalibrationWave((4,), 12),
    CalibrationWave((32,), 8),
    CalibrationWave((512,), 12),
    CalibrationWave((128, 64, 256, 32), 16),
    CalibrationWave((24,) * 16, 16),
    CalibrationWave((8,) * 32, 12),
    CalibrationWave((320,) * 8, 12),
    CalibrationWave((700, 16, 16, 350, 16, 16, 900, 16), 16),
    CalibrationWave((1500,), 8),
)
"""Prompts and decodes, few and many, short and long, apart and mixed: about 10,000 tokens."""


def calibrate(
    config: EngineConfig, runner: Runner | None = None, clock: Callable[[], float] = time.perf_counter
) -> tuple[StepTimes, list[StepSample]]:
    """Measure the steps of an engine of this config, and fit: half a minute on the bundled model.

    ``runner=None`` loads ``config.model``. Leave the machine alone meanwhile. Raises as EngineCore does.
    """
    if runner is None:
        from engine.runner import ModelRunner  # torch: only where a model is computed

        runner = ModelRunner(config)
    recording = RecordingRunner(runner, clock)
    core = EngineCore(config, recording)
    for number, wave in enumerate((WAVES[1], *WAVES)):
        _run(core, wave, number)
        recording.pause()
        if number == 0:
            recording.samples.clear()  # it found caches cold and threads asleep
    samples = recording.samples
    moved = _block_seconds(core, runner, clock)
    times = fit_step_times(samples, source=f"{len(samples)} steps of {config.served_name} on this machine")
    # Schedulers are compared by these: what sets them apart is not to be drawn.
    return replace(times, per_moved_block=moved, spread=()), samples


def _block_seconds(core: EngineCore, runner: Runner, clock: Callable[[], float]) -> float:
    """Seconds to copy a KV block between device and host."""
    count = min(MOVED_BLOCKS, core.memory_plan.num_blocks - 1)
    runner.allocate_host(count)
    out = tuple((1 + block, block) for block in range(count))
    back = tuple((host, device) for device, host in out)
    seconds = []
    for _ in range(5):
        began = clock()
        runner.execute(StepPlan(0, (), token_budget=0, swap_out=out, swap_in=back))
        seconds.append(clock() - began)
    return statistics.median(seconds) / (2 * count)


def _run(core: EngineCore, wave: CalibrationWave, number: int) -> None:
    limit = core.config.max_model_len
    assert limit is not None
    prompts = [min(length, limit - wave.output) for length in wave.prompts[: core.config.max_num_seqs]]
    for place, length in enumerate(prompts):
        ids = [TOKEN_IDS[(7 * number + 31 * place + 3 * i) % len(TOKEN_IDS)] for i in range(length)]
        sampling = SamplingParams(max_tokens=wave.output, temperature=0.0, ignore_eos=True)
        core.add(Request(f"calibration-{number}-{place}", ids, sampling))
        core.step()
    while core.has_unfinished:
        core.step()


def median_error(times: StepTimes, samples: Sequence[StepSample]) -> float:
    """The median of the relative errors of the device's seconds."""
    return statistics.median(
        abs(times.device_seconds(sample.load) / sample.device_seconds - 1) for sample in samples
    )
