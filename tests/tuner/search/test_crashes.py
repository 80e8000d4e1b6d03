from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuner.runs.result import SERVES, Measurement, TrialResult
from tuner.search.crashes import Crashes, cause_of, codes_of
from tuner.space.space import DRAFTS, SPECULATION, Axis, build_space, effective

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


def codes(*changes: dict[str, Any]) -> Any:
    return np.array([codes_of(SPACE, SPACE.params({**BASE, **change})) for change in changes])


def test_many_are_forbidden_as_each_alone_is() -> None:
    region = crashes(({"max_num_batched_tokens": 3072}, OOM), ({"gpu_memory_utilization": 0.9}, SMALL))
    changes: dict[str, dict[str, Any]] = {
        "served": {},
        "more tokens": {"max_num_batched_tokens": 4096},
        "fewer tokens": {"max_num_batched_tokens": 1024},
        "a smaller pool": {"gpu_memory_utilization": 0.85},
        "a smaller pool for fewer tokens": {"gpu_memory_utilization": 0.85, "max_num_batched_tokens": 1024},
    }
    forbidden = region.forbidden(codes(*changes.values()))
    assert [name for name, no in zip(changes, forbidden, strict=True) if no] == [
        "more tokens",
        "a smaller pool",
    ]
    assert [bool(region.forbids({**BASE, **change})) for change in changes.values()] == list(forbidden)


def test_the_chance_to_serve_grows_with_the_rungs_from_what_failed() -> None:
    tried = codes(
        {},
        {"max_num_batched_tokens": 1536},
        {"max_num_batched_tokens": 1024},
        {"max_num_batched_tokens": 1024, "max_num_seqs": 192},
        {"kv_cache_dtype": "fp8"},
    )
    gaps = np.array([0, 1, 2, 3, 2])
    expected = 1 - 0.6 * np.exp((1 - gaps) / 2)
    assert crashes(({}, OOM)).chance(tried) == pytest.approx(expected)
    assert crashes(({}, OOM), ({"max_num_batched_tokens": 4096}, OOM)).chance(tried) == pytest.approx(
        expected
    )
    assert list(crashes().chance(tried)) == [1.0] * 5


def test_what_takes_no_more_than_one_that_served_serves() -> None:
    served = [{"max_num_batched_tokens": 1024}, {"max_num_batched_tokens": 1536, "max_num_seqs": 64}]
    chances = crashes(({}, OOM), served=served).chance(
        codes(
            {"max_num_batched_tokens": 768},
            {"max_num_batched_tokens": 1536, "max_num_seqs": 64},
            {"max_num_batched_tokens": 1536},
        )
    )
    assert chances == pytest.approx([1.0, 1.0, 0.4])


FLAGS = {
    "max_num_batched_tokens": (1, 0),
    "max_num_seqs": (1, 0),
    "speculative_config.num_speculative_tokens": (1, 0),
    "speculative_config.prompt_lookup_min": (0, 0),
    "speculative_config.prompt_lookup_max": (0, 0),
    "block_size": (0, 0),
    "long_prefill_token_threshold": (0, 0),
    "max_num_partial_prefills": (0, 0),
    "max_long_partial_prefills": (0, 0),
    "scheduling_policy": (0, 0),
    "api_server_count": (0, 0),
}
"""Rungs that one rung less, and one more, is away from what ran out of memory."""


@pytest.mark.parametrize(
    ("why", "own"),
    [
        (
            OOM,
            {"gpu_memory_utilization": (1, 0), "max_cudagraph_capture_size": (1, 0), "max_model_len": (2, 2)},
        ),
        (
            SMALL,
            {"gpu_memory_utilization": (0, 1), "max_model_len": (1, 0), "max_cudagraph_capture_size": (2, 2)},
        ),
    ],
    ids=["out of memory", "the pool is too small"],
)
def test_what_more_of_each_flag_does_to_memory(why: str, own: dict[str, Any]) -> None:
    axes = tuple(
        Axis(
            name, (("a", "b", "c") if name == "scheduling_policy" else (1, 2, 3)), name != "scheduling_policy"
        )
        for name in {**FLAGS, **own}
    )
    space = replace(SPACE, axes=axes)
    middle = {axis.name: 1 if axis.ordered else "b" for axis in axes}
    region = Crashes(space, [])
    region._failed = [(codes_of(space, middle), cause_of(why), why)]
    for axis in axes:
        ends = (0, 2) if axis.ordered else ("a", "c")
        moved = np.array([codes_of(space, {**middle, axis.name: end}) for end in ends])
        away = 1 - 2 * np.log((1 - region.chance(moved)) / 0.6)
        assert tuple(away) == pytest.approx({**FLAGS, **own}[axis.name]), axis.name


def test_a_flag_that_only_one_of_both_has_is_an_unknown_effect() -> None:
    """Its length of the looked-up prompt does nothing to memory; its drafts do."""
    lookup = {f"{SPECULATION}.prompt_lookup_min": 0, f"{SPECULATION}.prompt_lookup_max": 0}
    on = SPACE.config({**SPACE.params(BASE), DRAFTS: 2, **lookup})
    region = Crashes(SPACE, [(on, OOM)])
    assert region.chance(codes({})) == pytest.approx(1 - 0.6 * np.exp((1 - 2) / 2))
    assert codes({})[0][[axis.name for axis in SPACE.axes].index(f"{SPECULATION}.prompt_lookup_min")] == -1


def test_only_failures_fail_and_only_measurements_serve() -> None:
    kept = TrialResult(1, BASE, "test", "interrupted", OOM)
    greedy = {**BASE, "max_num_seqs": 512}
    failed = TrialResult(2, BASE, "test", "failed", OOM)
    served = TrialResult(3, greedy, "test", "measured", measurement=Measurement({}, 1.0))
    assert Crashes.learnt(SPACE, [kept]).forbids(BASE) == ""
    assert Crashes.learnt(SPACE, [failed, replace(served, measurement=None)]).forbids(BASE)
    assert Crashes.learnt(SPACE, [failed, served]).forbids(BASE) == ""


def test_drafts_take_more_memory_than_none() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    assert crashes(({}, OOM)).forbids({**BASE, "speculative_config": drafts})
