import json
import random
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.space.space import (
    DRAFTS,
    SPECULATION,
    THRESHOLD,
    Axis,
    SpaceError,
    build_space,
    config_key,
    effective,
    geometric,
)

BASELINE = effective({}, "bundled")
SPACE = build_space(BASELINE, 8192)


def space(**kwargs: Any) -> Any:
    return build_space(BASELINE, 8192, **kwargs)


def test_the_default_space_has_the_five_knobs() -> None:
    assert space().flags == (
        "max_num_batched_tokens",
        "max_num_seqs",
        "gpu_memory_utilization",
        THRESHOLD,
        SPECULATION,
    )


@given(st.integers(0, 2**32 - 1))
def test_a_proposed_config_is_found_again_from_its_parameters(seed: int) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    config = SPACE.suggest(study.ask())
    assert SPACE.snap(config) == config
    assert set(config) == set(BASELINE)


def test_an_untried_config_breaks_no_rule() -> None:
    config = SPACE.untried((), random.Random(1))
    assert not SPACE.refusals(config)
    assert SPACE.snap(config) == config


def test_every_ladder_holds_the_baselines_value() -> None:
    odd = effective(
        {
            "max_num_batched_tokens": 3000,
            "max_num_seqs": 77,
            "gpu_memory_utilization": 0.87,
            THRESHOLD: 500,
            SPECULATION: {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 9},
        },
        "bundled",
    )
    assert build_space(odd, 8192).snap(odd) == odd


def test_a_config_is_moved_along_one_axis() -> None:
    seqs = next(axis for axis in SPACE.axes if axis.name == "max_num_seqs")
    assert SPACE.moved(BASELINE, seqs, seqs.values[0]) == {**BASELINE, "max_num_seqs": seqs.values[0]}
    drafts = next(axis for axis in SPACE.axes if axis.name == DRAFTS)
    lookups = [axis for axis in SPACE.axes if axis.needs == DRAFTS]
    assert lookups, "which exist only with drafts, and take their first values"
    moved = SPACE.moved(BASELINE, drafts, 3)[SPECULATION]
    assert moved["num_speculative_tokens"] == 3
    assert [moved[axis.name.partition(".")[2]] for axis in lookups] == [axis.values[0] for axis in lookups]


def test_a_start_is_moved_to_the_nearest_rung_by_ratio() -> None:
    snapped = space().snap({"max_num_batched_tokens": 100, "max_num_seqs": 30})
    assert (snapped["max_num_batched_tokens"], snapped["max_num_seqs"]) == (96, 32)
    assert snapped["gpu_memory_utilization"] == BASELINE["gpu_memory_utilization"]


def test_lookup_lengths_exist_only_with_speculation() -> None:
    params = space().params(BASELINE)
    assert params[DRAFTS] == 0
    assert not any("lookup" in name for name in params)
    on = space().params(
        {SPECULATION: {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2}}
    )
    assert on[DRAFTS] == 2
    assert f"{SPECULATION}.prompt_lookup_min" in on


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, "at least max_num_seqs"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}, "chunked prefill is off"),
        ({THRESHOLD: 2048}, "does nothing"),
        (
            {
                "max_num_batched_tokens": 4,
                "max_num_seqs": 4,
                SPECULATION: {"method": "ngram", "num_speculative_tokens": 4},
            },
            "1 \\+ num_speculative_tokens",
        ),
        ({SPECULATION: {"prompt_lookup_min": 5, "prompt_lookup_max": 3}}, "prompt_lookup_min"),
    ],
)
def test_rules_refuse(changes: Any, fragment: str) -> None:
    (refusal,) = space().refusals({**BASELINE, **changes})
    with pytest.raises(AssertionError, match=fragment):
        raise AssertionError(refusal)


def test_every_rule_lets_the_defaults_pass() -> None:
    assert space().refusals(BASELINE) == []


def test_fix_takes_a_flag_out() -> None:
    assert "max_num_seqs" not in space(fix=["max_num_seqs"]).flags


def test_fix_all_with_vary_leaves_only_what_varies() -> None:
    assert space(fix=["all"], vary={"max_num_seqs": None}).flags == ("max_num_seqs",)


def test_vary_with_values_of_an_unknown_flag() -> None:
    narrow = space(fix=["all"], vary={"block_size": (16, 32), "dtype": ("float32", "bfloat16")})
    assert narrow.axes == (
        Axis("block_size", (16, 32)),
        Axis("dtype", ("float32", "bfloat16"), ordered=False),
    )
    assert narrow.size == 4


def test_vary_a_switch_by_name() -> None:
    assert space(vary={"enable_prefix_caching": None}).axes[-1].values == (True, False)


@pytest.mark.parametrize(
    ("kwargs", "fragment"),
    [
        ({"fix": ["nonsense"]}, "--fix nonsense: not a flag that is varied"),
        ({"vary": {"nonsense": None}}, "has no range"),
        ({"fix": ["max_num_seqs"], "vary": {"max_num_seqs": None}}, "both --fix and --vary"),
        ({"fix": ["all"]}, "nothing is left to vary"),
    ],
)
def test_bad_fix_and_vary(kwargs: dict[str, Any], fragment: str) -> None:
    with pytest.raises(SpaceError, match=fragment):
        space(**kwargs)


def test_of_the_users_draft_model_only_the_number_of_drafts_varies() -> None:
    mine = effective({SPECULATION: {"method": "eagle", "model": "x", "num_speculative_tokens": 2}}, "vllm")
    found = build_space(mine, 8192, fix=["all"], vary={SPECULATION: None})
    assert [axis.name for axis in found.axes] == [DRAFTS]
    assert found.snap(mine) == mine
    kinds = {json.dumps(config[SPECULATION]) for config in found.sample(random.Random(1), 99)}
    assert len(kinds) == found.size == 6
    assert all(text == "null" or '"model": "x"' in text for text in kinds)


def test_size_counts_the_lookups_once_for_no_speculation() -> None:
    narrow = space(fix=["all"], vary={SPECULATION: None})
    assert narrow.size == 1 + 5 * 3 * 3
    keys: set[str] = set()
    while (config := narrow.untried(keys, random.Random(len(keys)))) is not None:
        keys.add(config_key(config))
    assert len(keys) == narrow.size


def test_the_sampler_sees_a_config_only_through_its_parameters() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(50):
        trial = study.ask()
        config = space().suggest(trial)
        assert space().params(config) == trial.params


def test_changes_name_old_and_new() -> None:
    config = {**BASELINE, "max_num_seqs": 8}
    assert space().changes(config) == {"max_num_seqs": (128, 8)}


def test_geometric() -> None:
    assert geometric(32, 256) == (32, 48, 64, 96, 128, 192, 256)
    assert geometric(32, 64, 50) == (32, 48, 50, 64)
