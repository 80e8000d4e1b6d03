"""The steps of the bundled model's server on this machine: measured once, fitted, and kept."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.measure.record import Records
from loadgen.sim import calibration
from loadgen.sim.simulated_engine import (
    StepSample,
    StepTimes,
    cache_dir,
    fit_step_times,
    group_samples,
    read_model,
    read_step_log,
)
from loadgen.sim.target_name import HERE, PREFIX, SimulatedTargetError
from loadgen.target import TargetFailed
from loadgen.targets.server import ServerTarget
from servers.files import write_atomically


def measured_step_times(calibrating: Callable[[str], None] | None) -> StepTimes:
    """The bundled model's step times on this machine: from the cache, or measured and put there."""
    saved = cache_dir() / f"step-times-{platform.node()}.json"
    if saved.is_file():
        return StepTimes.from_json(saved.read_text(encoding="utf-8"))
    if calibrating:
        calibrating(f"measuring the bundled model's steps on this machine, kept in {saved}")
    times = fit_steps(*measure_steps())
    write_atomically(saved, [times.to_json(), "\n"])
    return times


def measure_steps() -> tuple[list[StepSample], list[Records]]:
    """The steps of the bundled model's server on this machine, by its step log under a load of all kinds, and
    what its client saw of them.

    The processes that share the cores with it are in them. Some 45 s; leave the machine alone.

    Raises SimulatedTargetError where the ``engine`` extra is missing, or the server fails.
    """
    with tempfile.TemporaryDirectory(prefix="vtune-steps-") as folder:
        log = Path(folder) / "steps"
        target = ServerTarget.bundled(env={"VTUNE_STEP_LOG": str(log)})
        try:
            with target.open(calibration.FLAGS) as server:
                waves = calibration.run(server, read_model(HERE).vocab_size)
                next(waves)
                cold = len(read_step_log(log.read_text(encoding="utf-8")))
                runs = list(waves)
        except TargetFailed as failure:
            raise SimulatedTargetError(
                f"{PREFIX}{HERE} measures the bundled engine once, and that failed: {failure.detail}"
            ) from None
        samples = read_step_log(log.read_text(encoding="utf-8"))[cold:]
    return samples, runs


def fit_steps(samples: Sequence[StepSample], runs: Sequence[Records]) -> StepTimes:
    """The step times that explain what was measured."""
    entry, entry_per_token = calibration.entry(runs)
    late = calibration.delivery(runs, [(sample.load.rows, sample.ended) for sample in samples])
    times = fit_step_times(samples, f"{len(samples)} steps of the bundled server on this machine")
    return replace(times, entry=entry, entry_per_token=entry_per_token, delivery=group_samples(late))
