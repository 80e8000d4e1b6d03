"""Static batching and two tracks: what they decide, and what must hold whatever they decide."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_lab import ShadowKV, shares

from engine.baselines.two_track import TwoTrackScheduler
from engine.config import EngineConfig
from engine.core import Scheduler, make_scheduler
from engine.errors import ConfigError
from engine.request import Request, RequestStatus, SamplingParams
from engine.step import AdmissionStop, StepOutput, StepPlan, StepResult


class SwappingShadowKV(ShadowKV):
    """Slots of the device that a plan copies to the host and back."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.host: dict[int, int] = {}

    def run(self, plan: StepPlan) -> None:
        for device, host in plan.swap_out:
            self._copy(self.slots, device, self.host, host)
        for host, device in plan.swap_in:
            self._copy(self.host, host, self.slots, device)
        super().run(plan)

    def _copy(self, source: dict[int, int], taken: int, target: dict[int, int], put: int) -> None:
        for offset in range(self.block_size):
            value = source.get(taken * self.block_size + offset)
            if value is not None:
                target[put * self.block_size + offset] = value


class Driver:
    """Runs a scheduler step by step; every request emits token 7."""

    def __init__(self, scheduler: str, num_blocks: int = 60, num_host_blocks: int = 0, **flags: Any) -> None:
        defaults: dict[str, Any] = {
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "max_model_len": 32,
        }
        config = EngineConfig(**{**defaults, **flags, "scheduler": scheduler})
        config.validate()
        self.scheduler: Scheduler = make_scheduler(config, num_blocks, num_host_blocks)
        self.shadow = SwappingShadowKV(config.block_size)
        self.output = StepOutput(())
        self.num_added = 0

    def add(self, name: str, prompt: int, max_tokens: int) -> Request:
        self.num_added += 1
        ids = [100 * self.num_added + place for place in range(prompt)]
        request = Request(name, ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self.shadow.run(plan)
        emitted = {item.request.request_id: [7] for item in plan.scheduled}
        self.output = self.scheduler.update(plan, StepResult(emitted))
        self.scheduler.check()
        return plan

    def finish(self, limit: int = 2000) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_unfinished:
            plans.append(self.step())
            assert len(plans) < limit
        assert self.scheduler.kv_usage == 0.0
        return plans

    @property
    def finished(self) -> list[str]:
        return [request.request_id for request in self.output.finished]


# ---------------------------------------------------------------- static


def test_a_batch_is_padded_to_its_longest_prompt_and_runs_till_its_last_member_ends() -> None:
    lab = Driver("static")
    for name, prompt, output in (("a", 3, 3), ("b", 2, 5), ("c", 1, 1)):
        lab.add(name, prompt, output)
    first = lab.step()
    assert shares(first) == {"a": 3, "b": 2, "c": 1}
    assert first.padding == (1, 2)
    assert first.admission_stop is None
    lab.add("late", 2, 1)
    rest = [lab.step() for _ in range(4)]
    assert [sum(plan.padding) for plan in rest] == [1, 1, 2, 2]
    assert {plan.admission_stop for plan in rest} == {AdmissionStop.BATCH}
    assert lab.finished == ["b"]
    assert shares(lab.step()) == {"late": 2}


def test_a_batch_is_cut_at_max_num_seqs() -> None:
    lab = Driver("static", max_num_seqs=2)
    for name in "abc":
        lab.add(name, 2, 2)
    plan = lab.step()
    assert list(plan.admitted_with_computed) == ["a", "b"]
    assert plan.admission_stop is AdmissionStop.SEQUENCES


def test_kv_is_reserved_for_the_longest_prompt_and_output_of_the_batch() -> None:
    lab = Driver("static", num_blocks=1 + 9)
    lab.add("a", 4, 8)  # 3 blocks
    lab.add("b", 8, 2)  # with it 4 blocks each: (8 + 8) / 4
    lab.add("c", 1, 1)  # would make 12
    plan = lab.step()
    assert list(plan.admitted_with_computed) == ["a", "b"]
    assert plan.admission_stop is AdmissionStop.BLOCKS
    assert plan.free_blocks == 1


def test_padded_prompts_take_as_many_steps_as_the_budget_asks_for() -> None:
    lab = Driver("static")
    for name, prompt in (("a", 15), ("b", 2), ("c", 2), ("d", 2)):
        lab.add(name, prompt, 3)
    assert [shares(lab.step()) for _ in range(3)] == [
        {"a": 15, "b": 2},
        {"c": 2, "d": 2},
        {"a": 1, "b": 1, "c": 1, "d": 1},
    ]


def test_the_budget_may_be_as_long_as_one_prompt() -> None:
    lab = Driver("static")
    lab.add("a", 31, 4)
    lab.add("b", 1, 4)
    assert [sum(plan.padding) + plan.num_scheduled_tokens for plan in lab.finish()] == [31, 31, 2, 2, 2]


def test_an_aborted_member_leaves_padding_behind() -> None:
    lab = Driver("static")
    for name in "abc":
        lab.add(name, 2, 4)
    lab.step()
    assert [request.request_id for request in lab.scheduler.abort(["b", "never"])] == ["b"]
    plan = lab.step()
    assert shares(plan) == {"a": 1, "c": 1}
    assert plan.padding == (1,)
    lab.scheduler.abort(["a", "c"])
    lab.add("d", 3, 1)
    assert shares(lab.step()) == {"d": 3}


def test_members_whose_prompts_are_not_computed_yet_can_be_aborted() -> None:
    lab = Driver("static")
    for name in "abcd":
        lab.add(name, 15, 2)
    lab.step()
    lab.scheduler.abort(["c", "d"])
    assert shares(lab.step()) == {"a": 1, "b": 1}
    lab.finish()


# ---------------------------------------------------------------- two tracks


def test_a_step_is_prefill_or_decode_and_prefill_comes_first() -> None:
    lab = Driver("two-track")
    lab.add("a", 4, 5)
    assert shares(lab.step()) == {"a": 4}
    assert shares(lab.step()) == {"a": 1}
    lab.add("b", 10, 3)
    lab.add("c", 6, 3)
    assert shares(lab.step()) == {"b": 10, "c": 6}  # a stands still
    assert shares(lab.step()) == {"a": 1, "b": 1, "c": 1}


def test_a_prompt_is_never_split() -> None:
    lab = Driver("two-track")
    lab.add("a", 20, 3)
    lab.add("b", 13, 3)
    plan = lab.step()
    assert shares(plan) == {"a": 20}
    assert plan.admission_stop is AdmissionStop.BUDGET
    assert shares(lab.step()) == {"b": 13}


def test_full_sequences_admit_no_request_and_decoding_goes_on() -> None:
    lab = Driver("two-track", max_num_seqs=1)
    lab.add("a", 2, 3)
    lab.add("b", 2, 1)
    lab.step()
    plan = lab.step()
    assert shares(plan) == {"a": 1}
    assert plan.admission_stop is AdmissionStop.SEQUENCES


def test_prefixes_are_shared_where_the_flag_says_so() -> None:
    for caching, expected in ((True, {"b": 8}), (False, {"b": 0})):
        lab = Driver("two-track", enable_prefix_caching=caching)
        prompt = list(range(1, 11))
        for name in ("a", "b"):
            lab.scheduler.add(Request(name, prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
            plan = lab.step()
        assert plan.admitted_with_computed == expected


def pressed(mode: str, num_host_blocks: int) -> Driver:
    """Two requests that outgrow 6 blocks: the second is preempted at their third decode step."""
    lab = Driver(
        "two-track",
        num_blocks=1 + 6,
        num_host_blocks=num_host_blocks,
        max_model_len=24,
        preemption_mode=mode,
        enable_prefix_caching=False,
    )
    lab.add("a", 10, 8)
    lab.add("b", 10, 8)
    for _ in range(3):
        lab.step()
    return lab


def test_preemption_by_recompute_computes_everything_anew() -> None:
    lab = pressed("recompute", 0)
    plan = lab.step()
    assert plan.preempted == ("b",)
    assert shares(plan) == {"a": 1}
    assert plan.admission_stop is AdmissionStop.PREEMPTION
    plans = lab.finish()
    again = next(plan for plan in plans if "b" in shares(plan))
    assert shares(again) == {"b": 13}


def test_preemption_by_swap_copies_blocks_and_goes_on_decoding() -> None:
    lab = pressed("swap", 4)
    out = lab.step()
    assert out.preempted == ("b",)
    assert len(out.swap_out) == 3
    assert lab.scheduler.num_waiting == 1
    waiting = lab.add("late", 2, 2)
    plans = lab.finish()
    back = next(plan for plan in plans if plan.swap_in)
    assert [host for host, _ in back.swap_in] == [host for _, host in out.swap_out]
    assert shares(back) == {"b": 1}
    assert "late" not in shares(back)  # swapped requests come back before any is admitted
    assert waiting.status is RequestStatus.FINISHED_LENGTH
    before = plans[: plans.index(back)]
    assert {plan.admission_stop for plan in before} == {AdmissionStop.SWAPPED}


def test_without_room_on_the_host_a_swap_is_a_recompute() -> None:
    lab = pressed("swap", 2)
    plan = lab.step()
    assert plan.preempted == ("b",)
    assert plan.swap_out == ()
    assert 13 in {shares(plan).get("b") for plan in lab.finish()}


def test_an_aborted_request_gives_its_host_blocks_back() -> None:
    lab = pressed("swap", 3)
    lab.step()
    assert isinstance(lab.scheduler, TwoTrackScheduler)
    assert [request.request_id for request in lab.scheduler.swapped] == ["b"]
    lab.scheduler.abort(["b"])
    lab.scheduler.check()
    lab.finish()


def test_an_admission_leaves_a_watermark_of_blocks() -> None:
    lab = Driver("two-track", num_blocks=1 + 200, max_num_batched_tokens=800, max_model_len=800)
    lab.add("a", 400, 2)
    lab.add("b", 396, 2)  # 99 of the 100 blocks left: 2 must stay free
    plan = lab.step()
    assert list(plan.admitted_with_computed) == ["a"]
    assert plan.admission_stop is AdmissionStop.BLOCKS


# ---------------------------------------------------------------- both


@pytest.mark.parametrize("scheduler", ["static", "two-track"])
def test_what_can_never_end_is_refused(scheduler: str) -> None:
    lab = Driver(scheduler)
    lab.add("a", 2, 2)
    for name, prompt, output, why in (
        ("a", 2, 2, "unfinished"),
        ("b", 32, 2, "leaves no room"),
        ("c", 2, 0, "at least 1"),
        ("d", 0, 1, "empty"),
    ):
        with pytest.raises(ValueError, match=why):
            lab.add(name, prompt, output)
    assert len(lab.finish()) == 2


def test_both_stop_at_eos_and_at_stop_ids() -> None:
    for scheduler in ("static", "two-track"):
        lab = Driver(scheduler)
        lab.scheduler.add(Request("eos", [1, 2], SamplingParams(max_tokens=9), eos_token_ids=(7,)))
        lab.scheduler.add(Request("id", [1, 3], SamplingParams(max_tokens=9, stop_token_ids=(7,))))
        lab.step()
        assert [(item.finish, item.stop_reason) for item in lab.output.outputs] == [
            (RequestStatus.FINISHED_STOPPED, None),
            (RequestStatus.FINISHED_STOPPED, 7),
        ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"scheduler": "fastest"}, "must be unified, static or two-track"),
        ({"preemption_mode": "drop"}, "must be recompute or swap"),
        ({"swap_space": -1}, "must be GiB, 0 or more"),
        ({"preemption_mode": "swap"}, "the unified scheduler never swaps.*add --scheduler two-track"),
        (
            {"preemption_mode": "swap", "scheduler": "static", "max_model_len": 64},
            "the static scheduler never swaps",
        ),
        (
            {"scheduler": "static", "scheduling_policy": "priority"},
            "--scheduling-policy priority: the static scheduler does not have it.*use --scheduler unified",
        ),
        ({"scheduler": "two-track", "long_prefill_token_threshold": 5}, "--long-prefill-token-threshold 5"),
        (
            {"scheduler": "two-track", "max_model_len": 4096},
            r"--max-num-batched-tokens 2048: must be at least max_model_len \(4096\).*never splits a prompt",
        ),
    ],
)
def test_what_the_schedulers_do_not_do_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**flags).validate()


workloads = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 16), st.none() | st.integers(0, 20)),
    min_size=1,
    max_size=8,
)
"""Arrival step, prompt, output, step of an abort."""


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    workload=workloads,
    scheduler=st.sampled_from(["static", "two-track"]),
    spare=st.integers(0, 8),
    host=st.sampled_from([None, 0, 4, 40]),
    seqs=st.integers(1, 5),
    caching=st.booleans(),
)
def test_all_requests_end_with_all_tokens_and_everything_is_free(
    workload: list[tuple[int, int, int, int | None]],
    scheduler: str,
    spare: int,
    host: int | None,
    seqs: int,
    caching: bool,
) -> None:
    """At each step queues, tables, pool and swap space agree, and every request reads what it has written."""
    swaps = scheduler == "two-track" and host is not None
    lab = Driver(
        scheduler,
        num_blocks=1 + 9 + spare,
        num_host_blocks=host or 0,
        max_num_seqs=seqs,
        max_model_len=36,
        max_num_batched_tokens=36,
        enable_prefix_caching=caching,
        preemption_mode="swap" if swaps else "recompute",
    )
    requests: dict[int, Request] = {}
    for index in range(2000):
        for place, (arrival, prompt, output, abort) in enumerate(workload):
            if arrival == index:
                requests[place] = lab.add(f"r{place}", prompt, output)
            if abort == index:
                lab.scheduler.abort([f"r{place}"])
        plan = lab.step()
        assert plan.num_scheduled_tokens + sum(plan.padding) <= plan.token_budget
        assert plan.scheduled or plan.preempted or not lab.scheduler.has_unfinished
        if index > 6 and not lab.scheduler.has_unfinished:
            break
    assert lab.scheduler.kv_usage == 0.0
    assert lab.scheduler.reset_prefix_cache()
    for place, request in requests.items():
        assert request.status.finished
        if request.status is not RequestStatus.FINISHED_ABORTED:
            assert request.num_output_tokens == workload[place][2]
