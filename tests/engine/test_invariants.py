"""Random configs and workloads: what must hold for every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_kv import ReferenceKV
from scheduler_lab import Lab, shares

from engine.kv.kv_loading import KVLoading
from engine.request import Request, RequestStatus, SamplingParams
from engine.step import StepPlan

EOS = 1
many = settings(
    max_examples=1500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@dataclass(frozen=True)
class Spec:
    """One request: a prompt that shares ``shared`` tokens with a family, when it arrives, when it goes."""

    arrival_step: int
    family: int
    shared: int
    own: int
    max_tokens: int
    priority: int
    abort_step: int | None


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config that a server would start with, whose pool holds one full-length request, or a few."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_model_len = draw(st.integers(8, 40))
    chunked = draw(st.booleans())
    k = draw(st.sampled_from([0, 1, 3, 5]))
    seqs = draw(st.integers(1, 6))
    least = max(seqs, 1 + k) if chunked else max(seqs, 1 + k, max_model_len)
    enough = -(-max_model_len // block_size) + 1
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": draw(st.integers(least, least + 24)),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3, 7])),
        "num_blocks": enough + draw(st.integers(0, enough // 2)),
        "k": k,
    }


specs = st.builds(
    Spec,
    arrival_step=st.integers(0, 8),
    family=st.integers(0, 1),
    shared=st.one_of(st.sampled_from([9, 17]), st.integers(0, 30)),
    own=st.one_of(st.just(0), st.integers(0, 12)),
    max_tokens=st.integers(1, 24),
    priority=st.integers(-1, 1),
    abort_step=st.one_of(st.none(), st.none(), st.integers(0, 30)),
)
workloads = st.lists(specs, min_size=1, max_size=10)


class Run:
    """A workload on a lab, step by step."""

    def __init__(self, config: dict[str, Any], workload: list[Spec], emits_eos: bool = False) -> None:
        self.lab = Lab(**config, emit=self.emit, propose=self.propose)
        self.emits_eos = emits_eos
        self.workload = workload
        self.requests: dict[str, Request] = {}
        self.index = 0

    def emit(self, request: Request, drafts: Sequence[int]) -> list[int]:
        """Some drafts accepted, and tokens that are often the same in different requests."""
        state = request.num_tokens * 7 + request.num_prompt_tokens
        return [*drafts[: state % (len(drafts) + 1)], self._token(state)]

    def propose(self, request: Request, emitted: Sequence[int]) -> list[int]:
        state = request.num_tokens * 5 + len(emitted)
        count = state % (self.lab.config.num_speculative_tokens + 1)
        return [self._token(state + place) for place in range(count)]

    def _token(self, state: int) -> int:
        return EOS if self.emits_eos and state % 11 == 0 else state % 3 + 2

    def arrive(self) -> None:
        limit = self.lab.config.max_model_len
        assert limit is not None
        for place, spec in enumerate(self.workload):
            if spec.arrival_step == self.index:
                shared = [100 * (spec.family + 1) + offset for offset in range(spec.shared)]
                prompt = [*shared, *(1000 * (place + 1) + offset for offset in range(spec.own))] or [7]
                sampling = SamplingParams(max_tokens=spec.max_tokens)
                self.requests[f"r{place}"] = self.lab.add(
                    f"r{place}",
                    prompt[: limit - 1],
                    sampling=sampling,
                    priority=spec.priority,
                    eos_token_ids=(EOS,),
                )

    def abort(self) -> None:
        names = [f"r{place}" for place, spec in enumerate(self.workload) if spec.abort_step == self.index]
        self.lab.scheduler.abort(names)

    def step(self) -> StepPlan:
        """One step. Aborts come before it at even steps, and while its result is in flight at odd ones."""
        self.arrive()
        if self.index % 2 == 0:
            self.abort()
        plan = self.lab.schedule()
        result = self.lab.execute(plan)
        if self.index % 2 == 1:
            self.abort()
        self.lab.update(plan, result)
        self.index += 1
        return plan

    @property
    def done(self) -> bool:
        coming = any(spec.arrival_step >= self.index for spec in self.workload)
        return not coming and not self.lab.scheduler.has_unfinished


def all_steps(run: Run, limit: int = 3000) -> list[StepPlan]:
    plans = []
    while not run.done:
        plans.append(run.step())
        assert len(plans) < limit, "does not end"
    return plans


def without_aborts(workload: list[Spec]) -> list[Spec]:
    return [replace(spec, abort_step=None) for spec in workload]


@many
@given(config=configs(), workload=workloads, emits_eos=st.booleans())
def test_invariants_hold_at_every_step_and_everything_is_free_at_the_end(
    config: dict[str, Any], workload: list[Spec], emits_eos: bool
) -> None:
    """The lab checks pool, tables, queues, caps and what the KV cache would hold; here, that steps go on."""
    run = Run(config, workload, emits_eos)
    for plan in all_steps(run):
        # whoever is alive makes somebody run, except in a step whose preemption bars admission
        assert plan.scheduled or plan.preempted or plan.num_running + plan.num_waiting == 0
    run.lab.assert_all_free()
    assert run.lab.scheduler.reset_prefix_cache()
    for request in run.requests.values():
        assert request.status.finished
        assert request.num_output_tokens <= request.sampling.max_tokens
        assert EOS not in request.output_token_ids[:-1]


@many
@given(config=configs(), workload=workloads)
def test_nobody_starves_and_everybody_gets_all_tokens(config: dict[str, Any], workload: list[Spec]) -> None:
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
        assert first_admissions == [request.request_id for request in arrivals]


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
    scheduler.steady_path = False  # it asks for what the reference does not have
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
