"""How the benchmark of repeated studies judges what they recommend, and that its switches switch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest

from benchmarks.tuner.noisy_studies import CELLS, MECHANISMS, LuckyTarget, Study
from benchmarks.tuner.repeatability import Truth, directions, judged, summary
from servers.slo.objective import PRESETS
from tuner.runs.result import Measurement, Reading


def measured(itl: float, throughput: float = 100.0, failed: float = 0.0) -> Measurement:
    values = {
        "itl_es99": itl, "ttft_es95": 1.0, "throughput": throughput, "failed": failed
    }  # fmt: skip
    return Measurement({name: Reading(value) for name, value in values.items()}, 60.0)


TRUTH = Truth(PRESETS["itl"], measured(0.2))
BEST = measured(0.1)


def study(seed: int, moves: Mapping[str, tuple[int, int]] | None) -> Study:
    return Study(seed, "", "", None if moves is None else {"seed": seed}, moves or {}, (), 10 * seed, 100.0)


def test_a_recommendation_is_near_the_best_or_false() -> None:
    assert TRUTH.gain(BEST) == pytest.approx(0.5)
    assert TRUTH.near(measured(0.104), BEST)
    assert not TRUTH.near(measured(0.106), BEST)
    assert not TRUTH.false(measured(0.19))
    assert TRUTH.false(measured(0.2))
    assert TRUTH.false(None)
    assert TRUTH.false(measured(0.1, throughput=80.0))
    assert not TRUTH.near(measured(0.1, throughput=80.0), BEST)
    assert TRUTH.ranked({"slow": measured(0.15), "best": BEST, "thin": measured(0.05, 80.0)}) == [
        "best",
        "slow",
    ]


def test_to_hold_what_the_baseline_misses_is_a_gain_without_end() -> None:
    missing = Truth(PRESETS["itl"], measured(0.1, failed=9.0))
    assert missing.gain(measured(0.2)) == math.inf
    assert not missing.false(measured(0.2))


def test_a_cell_is_judged_by_what_its_studies_recommend() -> None:
    down, up = {"max_num_batched_tokens": (2048, 256)}, {"max_num_seqs": (16, 64)}
    studies = [study(1, down), study(2, down), study(3, up), study(4, None)]
    of = {1: BEST, 2: measured(0.15), 3: measured(0.3)}
    verdict = judged("cell", TRUTH, BEST, studies, of)
    assert (verdict.recommended, verdict.near, verdict.false) == (3, 1, 1)
    assert (verdict.move, verdict.same_move) == ("max_num_batched_tokens down", 2)
    assert verdict.trials == 25
    nothing = replace(verdict, cell="other", best_gain=0.0)
    assert "to be gained: 3 of 4 (aim: 95 %)" in summary([verdict, nothing])
    assert "false: 2 of 6" in summary([verdict, nothing])
    assert "nothing is to be gained: 3 of 4" in summary([verdict, nothing])


def test_no_threshold_is_the_largest() -> None:
    assert directions({"long_prefill_token_threshold": (0, 256)}) == ["long_prefill_token_threshold down"]


@pytest.mark.parametrize("name", MECHANISMS)
def test_what_is_switched_off_is_there(name: str) -> None:
    for where, instead in MECHANISMS[name].items():
        with patch(where, instead):
            pass


def test_every_load_has_its_own_luck() -> None:
    target = LuckyTarget(CELLS[0], seed=1)
    first = target.luck.factor
    with target.open(CELLS[0].flags) as server:
        assert target.clock() == CELLS[0].start_seconds == server.start_seconds
        assert target.luck.factor != first
