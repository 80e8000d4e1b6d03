"""The step log: a line per step, readable while it is being written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import Request, SamplingParams
from engine.sim.simulated_runner import ModelSize, SimulatedRunner, VirtualClock
from engine.sim.step_log import StepLog, read_step_log
from engine.sim.step_times import StepLoad, StepTimes

TIMES = StepTimes(host=0.25, launch=0.5, per_token=0.125)
FLAGS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 99,
}


def test_each_step_is_a_line_with_what_it_did_and_took(tmp_path: Path) -> None:
    path, clock = tmp_path / "steps", VirtualClock()
    core = EngineCore(EngineConfig(**FLAGS), SimulatedRunner(ModelSize(0, 1, 64), TIMES, clock), clock)
    log = StepLog(core, path)
    log._clock = clock
    core.add(Request("a", [5] * 12, SamplingParams(max_tokens=2, ignore_eos=True)))
    while core.has_unfinished:
        core.step()
    log.pause()
    core.add(Request("b", [6] * 3, SamplingParams(max_tokens=1, ignore_eos=True)))
    core.step()
    first, second, third, alone = read_step_log(path.read_text() + "[1, 2")
    assert first.load == StepLoad(tokens=8, sequences=1, rows=0, context=8, pairs=36)
    assert second.load == StepLoad(tokens=4, sequences=1, rows=1, context=12, pairs=42)
    assert third.load == StepLoad(tokens=1, sequences=1, rows=1, context=13, pairs=13)
    assert [step.device_seconds for step in (first, third)] == [0.25 + 0.5 + 1.0, 0.25 + 0.5 + 0.125]
    assert [step.host_seconds for step in (first, second, alone)] == [None, 0.0, None]
    assert [step.ended for step in (first, second)] == [1.75, 3.0]


def test_steps_that_overlap_are_not_logged(tmp_path: Path) -> None:
    clock = VirtualClock()
    runner = SimulatedRunner(ModelSize(0, 1, 64), TIMES, clock)
    core = EngineCore(EngineConfig(**FLAGS, async_scheduling=True), runner, clock)
    StepLog(core, tmp_path / "steps")
    assert core.runner is runner


def test_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2 is no step of a step log: 'hello'"):
        read_step_log("[1, 1, 1, 1, 1, 0, 0.5, null, 7.5]\nhello\n")
