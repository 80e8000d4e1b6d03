"""Which configs a search need not try, for no trial reached what they change."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuner.runs.result import Measurement, TrialResult
from tuner.search.crashes import codes_of
from tuner.search.inactive_knobs import inactive
from tuner.space.space import build_space, effective

SPACE = build_space(effective({}, "vllm"), 8192)
OWN = SPACE.baseline
MEASURED = Measurement({}, 20.0)
CHANGES = {
    "less memory": {"gpu_memory_utilization": 0.8},
    "more memory": {"gpu_memory_utilization": 0.95},
    "more places": {"max_num_seqs": 2 * OWN["max_num_seqs"]},
    "fewer places": {"max_num_seqs": OWN["max_num_seqs"] // 4},
    "fewer tokens": {"max_num_batched_tokens": OWN["max_num_batched_tokens"] // 2},
}
CODES = np.array([codes_of(SPACE, SPACE.params(SPACE.snap({**OWN, **c}))) for c in CHANGES.values()])
MEMORY = {"less memory", "more memory"}


def told(number: int = 0, **seen: Any) -> TrialResult:
    roomy = {"peak_kv_usage": 0.2, "preemptions": 0, "prefix_hits": 0, "peak_running": 8}
    return TrialResult(number, OWN, "test", "measured", measurement=MEASURED, **(roomy | seen))


def names(*results: TrialResult) -> set[Any]:
    return {
        name for name, of_no_use in zip(CHANGES, inactive(SPACE, results, CODES), strict=True) if of_no_use
    }


def test_where_nothing_is_short_neither_memory_nor_places_matter() -> None:
    assert names(told(), told(1)) == {*MEMORY, "more places"}


@pytest.mark.parametrize(
    "seen",
    [
        {"peak_kv_usage": 0.6},
        {"peak_kv_usage": None},
        {"preemptions": 1},
        {"prefix_hits": 512},
        {"prefix_hits": None},
    ],
    ids=str,
)
def test_one_trial_that_needed_the_pool_or_does_not_say_opens_memory_again(seen: dict[str, Any]) -> None:
    assert names(told(), told(1, **seen)) == {"more places"}


@pytest.mark.parametrize("peak", [OWN["max_num_seqs"] * 4 // 5, None])
def test_one_trial_that_took_most_places_opens_them_again(peak: Any) -> None:
    assert names(told(), told(1, peak_running=peak)) == MEMORY


def test_a_trial_that_was_too_short_to_see_a_peak_opens_nothing() -> None:
    short = replace(told(1, peak_kv_usage=None, peak_running=None), status="stopped")
    assert names(told(), short) == {*MEMORY, "more places"}
    assert names(told(), replace(short, preemptions=1)) == {"more places"}
    assert names(told(), replace(short, peak_running=OWN["max_num_seqs"])) == MEMORY


def test_nothing_is_said_before_anything_was_measured() -> None:
    assert names() == set()
    assert names(TrialResult(0, OWN, "test", "failed")) == set()


def test_a_knob_that_is_not_searched_is_no_matter() -> None:
    fixed = build_space(OWN, 8192, fix=("gpu_memory_utilization", "max_num_seqs"))
    codes = np.array([codes_of(fixed, fixed.params(OWN))])
    assert not inactive(fixed, (told(),), codes).any()
