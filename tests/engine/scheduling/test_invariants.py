"""Random configs and workloads: what must hold for every one of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import EOS, Run, Spec, configs, many, without_aborts, workloads
from reference_kv import ReferenceKV
from scheduler_lab import shares

from engine.kv.kv_loading import KVLoading
from engine.request import RequestStatus
from engine.step import StepPlan


def all_steps(run: Run, limit: int = 3000) -> list[StepPlan]:
    plans = []
    while not run.done:
        plans.append(run.step())
        assert len(plans) < limit, "does not end"
    return plans


@many
@given(config=configs(), workload=workloads, emits_eos=st.booleans())
def test_invariants_hold_at_every_step_and_everything_is_free_at_the_end(
    config: dict[str, Any], workload: list[Spec], emits_eos: bool
) -> None:
    """The lab checks pool, tables, queues, caps and what the KV cache would hold; here, that steps go on."""
    run = Run(config, workload, emits_eos)
    for plan in all_steps(run):
        # an unfinished request means that one runs, except in a step with a preemption, which bars admission
        assert plan.scheduled or plan.preempted or plan.num_running + plan.num_waiting == 0
    run.lab.assert_all_free()
    assert run.lab.scheduler.reset_prefix_cache()
    for request in run.requests.values():
        assert request.status.finished
        assert request.num_output_tokens <= request.sampling.max_tokens
        assert EOS not in request.output_token_ids[:-1]


@many
@given(config=configs(), workload=workloads)
def test_no_request_starves_and_all_get_all_tokens(config: dict[str, Any], workload: list[Spec]) -> None:
    run = Run(config, without_aborts(workload))
    plans = all_steps(run)
    limit = run.lab.config.max_model_len
    assert limit is not None
    for request in run.requests.values():
        assert request.status is RequestStatus.FINISHED_LENGTH
        room = limit - request.num_prompt_tokens
        assert request.num_output_tokens == min(request.sampling.max_tokens, room)
    if config["scheduling_policy"] == "fcfs":
        first_admissions = list(dict.fromkeys(name for plan in plans for name in plan.admitted_with_computed))
        arrivals = sorted(run.requests.values(), key=lambda request: request.arrival_time)
        for adapter in ("", "a", "b", "c"):  # requests of others may pass one whose adapter has no slot
            own = [request.request_id for request in arrivals if request.lora_name == adapter]
            assert [name for name in first_admissions if name in own] == own


@settings(many, max_examples=500)
@given(config=configs(), workload=workloads)
def test_a_reference_without_hashes_or_links_takes_the_same_blocks(
    config: dict[str, Any], workload: list[Spec]
) -> None:
    """Two schedulers in step, one over KVCacheManager and one over ReferenceKV, agree at each point."""
    run, other = Run(config, workload), Run(config, workload)
    scheduler = other.lab.scheduler
    kv = scheduler.kv
    reference = ReferenceKV(kv.pool.num_blocks, kv.block_size, kv.enable_prefix_caching)
    scheduler.kv = reference  # type: ignore[assignment]
    scheduler.loading = KVLoading(scheduler.kv, None)
    scheduler.uses_fast_path = False  # it asks for what the reference does not have
    other.lab.pool = reference.pool  # type: ignore[assignment]
    while not run.done:
        plan, expected = run.step(), other.step()
        assert shares(plan) == shares(expected)
        assert plan.admitted_with_computed == expected.admitted_with_computed
        assert plan.free_blocks == expected.free_blocks
        for name, request in run.requests.items():
            assert request.block_ids == other.requests[name].block_ids
        assert run.lab.pool.free_list() == reference.pool.free_list()


@settings(many, max_examples=200)
@given(config=configs(), workload=workloads)
def test_without_pressure_or_speculation_caching_changes_no_output(
    config: dict[str, Any], workload: list[Spec]
) -> None:
    """Whether or not prefixes are shared, the tokens are the same; with sharing, fewer are computed."""
    roomy = {**config, "num_blocks": 400, "k": 0}
    computed = []
    outputs = []
    for caching in (True, False):
        run = Run({**roomy, "enable_prefix_caching": caching}, without_aborts(workload))
        computed.append(sum(plan.num_scheduled_tokens for plan in all_steps(run)))
        outputs.append({name: request.token_ids for name, request in run.requests.items()})
    assert outputs[0] == outputs[1]
    assert computed[0] <= computed[1]
