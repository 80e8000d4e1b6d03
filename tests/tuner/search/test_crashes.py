from typing import Any

import pytest

from tuner.runs.result import SERVES, Measurement, TrialResult
from tuner.search.crashes import Crashes, cause_of
from tuner.space.space import build_space, effective

DEFAULTS = effective({}, "vllm")
SPACE = build_space(DEFAULTS, 8192, vary={"kv_cache_dtype": ("auto", "fp8")})
BASE = {**DEFAULTS, "kv_cache_dtype": "auto", "max_num_batched_tokens": 2048, "max_num_seqs": 256}
OOM = "did not start: out_of_memory: CUDA out of memory"
SMALL = "did not start: kv_cache_too_small: no request of full length fits"


def crashes(*failed: Any, served: Any = ()) -> Crashes:
    return Crashes(
        SPACE, [({**BASE, **change}, why) for change, why in failed], [{**BASE, **c} for c in served]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_batched_tokens": 4096},
        {"gpu_memory_utilization": 0.95, "max_num_seqs": 512},
        {"long_prefill_token_threshold": 1024},
    ],
)
def test_what_takes_more_of_everything_fails_too(change: dict[str, Any]) -> None:
    region = crashes(({"gpu_memory_utilization": 0.92}, OOM))
    assert "out_of_memory" in region.forbids({**BASE, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_batched_tokens": 1024},
        {"gpu_memory_utilization": 0.8, "max_num_seqs": 512},
        {"kv_cache_dtype": "fp8"},
    ],
)
def test_what_takes_less_of_something_may_serve(change: dict[str, Any]) -> None:
    assert crashes(({}, OOM)).forbids({**BASE, **change}) == ""


def test_a_pool_that_is_too_small_is_not_cured_by_less_memory() -> None:
    region = crashes(({"gpu_memory_utilization": 0.85}, SMALL))
    assert region.forbids({**BASE, "gpu_memory_utilization": 0.8})
    assert not region.forbids({**BASE, "gpu_memory_utilization": 0.9})


@pytest.mark.parametrize("reason", ["did not start: exited: 1", "hangs: a load of 20 s had not ended", ""])
def test_a_failure_that_is_not_one_of_memory_says_nothing_of_others(reason: str) -> None:
    assert cause_of(reason) == ""
    assert crashes(({}, reason)).forbids(BASE) == ""


def test_a_kill_is_taken_for_one_of_memory() -> None:
    assert cause_of("died under load: killed: the server was ended by SIGKILL") == "out_of_memory"


def test_a_greedier_config_that_served_takes_the_proof_away() -> None:
    larger = {**BASE, "max_num_batched_tokens": 8192}
    assert crashes(({}, OOM)).forbids(larger)
    assert crashes(({}, OOM), served=[{"max_num_batched_tokens": 4096}]).forbids(larger) == ""


def test_it_is_learnt_from_results() -> None:
    failed = TrialResult(3, BASE, "test", "failed", OOM, violations={SERVES: 1.0})
    served = TrialResult(
        4, {**BASE, "max_num_seqs": 64}, "test", "measured", measurement=Measurement({}, 1.0)
    )
    region = Crashes.learnt(SPACE, [failed, served])
    assert "trial 3" in region.forbids({**BASE, "max_num_seqs": 512})
