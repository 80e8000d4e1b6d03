"""What the simulator is held against: the configs, and how a measurement goes through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tuner import fidelity
from engine.config import EngineConfig


def test_the_draw_is_the_same_each_time_and_spans_its_ranges() -> None:
    configs = fidelity.drawn()
    assert configs == fidelity.drawn()
    assert len(configs) == fidelity.DRAWN
    for values, (low, high) in (
        ([config.budget for config in configs], fidelity.RANGES["budget"]),
        ([config.seqs for config in configs], fidelity.RANGES["seqs"]),
    ):
        assert low <= min(values) < 2 * low
        assert high / 2 < max(values) <= high


@pytest.mark.parametrize("config", fidelity.all_configs(), ids=lambda config: config.file(Path(), 0).stem)
def test_every_config_is_one_that_a_server_takes(config: fidelity.Config) -> None:
    EngineConfig(**config.flags).validate()
    longest = max(len(r.prompt_token_ids or ()) + r.max_tokens for r in config.schedule.requests)
    assert longest <= config.flags["max_model_len"]


def test_each_run_has_a_file_and_the_repeated_server_is_spread_over_them() -> None:
    order = fidelity.servers(quick=False)
    files = [config.file(Path(), repeat) for configs, repeat in order for config in configs]
    assert len(set(files)) == len(files)
    repeated = [
        place for place, (configs, _) in enumerate(order) if configs == fidelity.chosen(fidelity.REPEATED)
    ]
    assert [repeated[0], repeated[-1]] == [0, len(order) - 1]
    assert len(repeated) == fidelity.REPEATS


def test_what_is_measured_is_what_is_compared() -> None:
    measured = {config for configs, _ in fidelity.servers(quick=False) for config in configs}
    assert measured == set(fidelity.all_configs())
