"""Knobs by server, and what their surroundings make of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from servers.flags.offered_flags import OfferedFlags
from servers.kinds import KINDS
from servers.memory_plan import MemoryPlan
from tuner.space.knobs import KNOBS, default_of, knobs_of
from tuner.space.space import (
    DRAFTS,
    SPECULATION,
    THRESHOLD,
    Space,
    SpaceError,
    Surroundings,
    build_space,
    config_key,
    effective,
)

GIB = 1 << 30
METHOD = f"{SPECULATION}.method"


def offered(*names: str, **choices: tuple[str, ...]) -> OfferedFlags:
    return OfferedFlags("/bin/server", "0.32.0", {**dict.fromkeys(names, ()), **choices})


def space(server: str = "bundled", flags: dict[str, object] | None = None, **words: object) -> Space:
    around = words.pop("around", Surroundings(server))
    return build_space(effective(flags or {}, server), 8192, around=around, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("server", KINDS)
def test_every_knob_can_be_varied_by_name(server: str) -> None:
    for knob in knobs_of(server):
        needed = {knob.needs: None} if knob.needs else {}
        around = Surroundings(server, longest_request=3000)
        found = space(server, around=around, fix=["all"], vary={**needed, knob.name: None})
        axis = next(axis for axis in found.axes if axis.name == knob.name)
        assert len(axis.values) > 1
        assert not found.refusals(found.baseline)
        assert found.snap(found.baseline) == found.baseline
        for config in found.sample(random.Random(1), 200):
            assert found.snap(config) == config
        assert len({config_key(c) for c in found.sample(random.Random(1), 10_000)}) == found.size


def test_each_server_has_only_its_own_knobs() -> None:
    assert {THRESHOLD, f"{SPECULATION}.prompt_lookup_max"} <= {axis.name for axis in space().axes}
    assert [axis.name for axis in space("sglang").axes] == [
        "max_num_batched_tokens",
        "max_num_seqs",
        "gpu_memory_utilization",
        DRAFTS,
    ]
    with pytest.raises(SpaceError, match="tensor_parallel_size: the bundled engine has no such flag"):
        space(vary={"tensor_parallel_size": None})
    assert space("vllm", vary={"tensor_parallel_size": None}).axes[-1].values == (1, 2, 4, 8)


def test_a_flag_that_the_version_lacks_is_left_out_with_a_note() -> None:
    around = Surroundings("vllm", offered=offered(*(k.flag for k in KNOBS if k.flag != THRESHOLD)))
    found = space("vllm", around=around)
    assert THRESHOLD not in found.flags
    assert found.notes == (
        "long_prefill_token_threshold is not varied: server 0.32.0 has no --long-prefill-token-threshold",
    )
    assert found.baseline[THRESHOLD] == 0


def test_what_was_asked_for_and_is_not_there_is_refused() -> None:
    around = Surroundings("vllm", offered=offered(*(k.flag for k in KNOBS if k.main)))
    with pytest.raises(SpaceError, match=r"max_num_partial_prefills: server 0.32.0 has no --max-num-partial"):
        space("vllm", around=around, vary={"max_num_partial_prefills": None})
    with pytest.raises(SpaceError, match=r"no such flag \(did you mean max_num_seqs\?\)"):
        space("vllm", around=around, vary={"max_num_seq": (1, 2)})


def test_only_values_that_the_program_lists_are_tried() -> None:
    names = [k.flag for k in KNOBS if k.main]
    some = Surroundings("vllm", offered=offered(*names, kv_cache_dtype=("auto", "fp8_e5m2")))
    with pytest.raises(SpaceError, match="kv_cache_dtype: this server takes only auto"):
        space("vllm", around=some, vary={"kv_cache_dtype": None})
    both = Surroundings("vllm", offered=offered(*names, kv_cache_dtype=("auto", "fp8", "nvfp4")))
    assert space("vllm", around=both, vary={"kv_cache_dtype": None}).axes[-1].values == ("auto", "fp8")


def test_a_build_for_cpus_has_other_blocks_and_no_graphs() -> None:
    flags = dict.fromkeys([knob.flag for knob in KNOBS], ())
    around = Surroundings("vllm", offered=OfferedFlags("/bin/vllm", "0.32.0+cpu", flags))
    assert space("vllm", around=around, vary={"block_size": None}).axes[-1].values == (32, 64, 128, None)
    with pytest.raises(SpaceError, match="max_cudagraph_capture_size: it has no effect on a CPU"):
        space("vllm", around=around, vary={"max_cudagraph_capture_size": None})
    gpu = Surroundings("vllm", offered=OfferedFlags("/bin/vllm", "0.32.0", flags))
    assert space("vllm", around=gpu, vary={"block_size": None}).axes[-1].values == (16, 32, 64, 128, None)


def test_a_pool_set_in_bytes_makes_the_share_of_memory_idle() -> None:
    plan = MemoryPlan(0, 0.92, 0, 0, 2 * GIB, 93_184, 0, pinned=True)
    found = space("vllm", around=Surroundings("vllm", memory=plan))
    assert "gpu_memory_utilization" not in found.flags
    assert "the KV pool is set in bytes" in found.notes[0]
    given = space("vllm", {"kv_cache_memory_bytes": 1 << 30})
    assert "--kv-cache-memory-bytes is given" in given.notes[0]


def test_sequences_reach_no_further_than_the_pool() -> None:
    plan = MemoryPlan(GIB, 0.92, 0, 0, GIB, 20_000, 0)
    wide = space().axes[1]
    narrow = space(around=Surroundings("bundled", mean_request=1000, memory=plan)).axes[1]
    assert wide.name == narrow.name == "max_num_seqs"
    assert (max(wide.values), max(narrow.values)) == (512, 128)
    plenty = Surroundings("bundled", mean_request=100, memory=plan)
    assert space(around=plenty).axes[1] == wide


def test_the_context_is_varied_down_to_the_longest_request() -> None:
    found = space(around=Surroundings("bundled", longest_request=3000), vary={"max_model_len": None})
    assert found.axes[-1].values == (3072, 4096, 6144, 8192)
    assert found.baseline["max_model_len"] == 8192
    short = {**found.baseline, "max_model_len": 2048}
    assert found.refusals(short) == ["max_model_len=2048: must hold the workload's longest request"]


def test_a_method_decides_which_keys_there_are() -> None:
    found = space(fix=["all"], vary={SPECULATION: None, METHOD: None})
    assert found.size == 1 + 5 * (3 * 3 + 1)
    kinds = {tuple(c[SPECULATION] or ()) for c in found.sample(random.Random(1), 10_000)}
    assert kinds == {
        (),
        ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
        ("method", "num_speculative_tokens"),
    }
    suffix: dict[str, Any] = {SPECULATION: {"method": "suffix", "num_speculative_tokens": 4}}
    alone = space(flags=suffix, fix=["all"], vary={SPECULATION: None})
    assert [axis.name for axis in alone.axes] == [DRAFTS]
    assert alone.snap(alone.baseline)[SPECULATION] == suffix[SPECULATION]


def test_a_knob_of_one_value_is_left_out() -> None:
    full = Surroundings("bundled", longest_request=8192)
    found = space(around=full, vary={"max_model_len": None})
    assert "max_model_len" not in found.flags
    assert found.notes == ("max_model_len is not varied: only 8192 is left here",)


def test_long_partial_prefills_exist_beside_partial_ones() -> None:
    found = space(fix=["all"], vary={"max_num_partial_prefills": None, "max_long_partial_prefills": None})
    assert found.baseline["max_num_partial_prefills"] is None
    kinds = {
        (c["max_num_partial_prefills"], c["max_long_partial_prefills"])
        for c in found.sample(random.Random(1), 999)
        if not found.refusals(c)
    }
    assert kinds == {(None, 1), (1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)}


def test_the_engine_takes_every_config_that_no_rule_refuses() -> None:
    """So that rules are the engine's own, as far as they do not depend on a model."""
    from engine.config import EngineConfig
    from engine.speculative_config import SpeculativeConfig

    names = {knob.name: None for knob in knobs_of("bundled")}
    found = space(around=Surroundings("bundled", longest_request=2000), vary=names)
    configs = [c for c in found.sample(random.Random(3), 400) if not found.refusals(c)]
    assert len(configs) > 50
    for config in configs:
        speculation = config[SPECULATION] and SpeculativeConfig.parse(config[SPECULATION])
        EngineConfig(**{**config, SPECULATION: speculation}).validate()


def test_defaults_stand_in_one_place() -> None:
    tokens = next(knob for knob in KNOBS if knob.name == "max_num_batched_tokens")
    assert [default_of(tokens, server) for server in ("bundled", "vllm")] == [2048, 2048]
    assert effective({}, "bundled")["gpu_memory_utilization"] == 0.92
    assert effective({SPECULATION: {"method": "ngram", "prompt_lookup_max": 3}}, "vllm")[SPECULATION] == {
        "method": "ngram",
        "num_speculative_tokens": 1,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 3,
    }
