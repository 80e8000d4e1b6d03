"""The decode fast path: it decides what the rule loop decides, and it is used."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_lab import Lab

import engine.scheduling.scheduler
from engine.kv.kv_cache import KVCacheManager
from engine.request import Request, RequestStatus, SamplingParams
from engine.scheduling.decode_fast_path import append_tokens, drop_ended, plan_decodes, plan_decodes_ahead
from engine.step import OneEach, Rows, StepPlan, StepResult, TokenLogprobs

EOS, STOP = 1, 3
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore_eos": {"ignore_eos": True},
    "stop_ids": {"stop_token_ids": (STOP,)},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (STOP,)},
    "logprobs": {"logprobs": 0},
}


class Workload:
    """Requests that come, end and hang up at random, on one lab. Equal seeds do the same to any scheduler."""

    def __init__(self, seed: int, *, fast_path: bool, **flags: Any) -> None:
        self.chance = random.Random(seed)
        self.lab = Lab(emit=emit, propose=propose if flags.get("k") else None, **flags)
        self.lab.scheduler.uses_fast_path &= fast_path
        self.ahead = self.lab.config.async_scheduling
        self.in_flight: tuple[StepPlan, StepResult] | None = None
        self.num_requests = 0

    def arrive(self, count: int, samplings: list[str]) -> None:
        limit = self.lab.config.max_model_len
        assert limit is not None
        for _ in range(count):
            chance = self.chance
            shared = [100 * chance.randint(1, 2) + place for place in range(chance.randint(0, 20))]
            own = [1000 * (self.num_requests + 1) + place for place in range(chance.randint(0, 9))]
            name = chance.choice(samplings)
            sampling = SamplingParams(max_tokens=chance.randint(1, 30), **SAMPLINGS[name])
            self.lab.add(
                f"r{self.num_requests}",
                ([*shared, *own] or [7])[: limit - 1],
                sampling=sampling,
                priority=chance.randint(0, 2),
                eos_token_ids=(EOS,),
            )
            self.num_requests += 1

    def hang_up(self, likely: float) -> None:
        names = [name for name in self.lab.running + self.lab.waiting if self.chance.random() < likely]
        self.lab.scheduler.abort(names)

    def step(self, hang_ups: float) -> dict[str, Any]:
        """A step, with hang-ups while it computes; all that can be known of it and of what it leaves."""
        plan, result = self.in_flight or self.start(self.lab.schedule())
        planned = [seen_in_plan(plan)]
        self.hang_up(hang_ups)
        upcoming = self.plan_ahead() if self.ahead else None
        output = self.lab.update(plan, result)
        if upcoming is not None:
            planned.append(seen_in_plan(upcoming))
            self.in_flight = self.start(self.lab.scheduler.reconcile(upcoming))
        return {
            "planned": planned,
            "in flight": self.in_flight and seen_in_plan(self.in_flight[0]),
            "outputs": list(output.outputs),
            "finished": [request.request_id for request in output.finished],
            "running": self.lab.running,
            "waiting": self.lab.waiting,
            "free": self.lab.pool.free_list(),
            "cached": dict(self.lab.pool._index.items()),
            "requests": {r.request_id: seen_in_request(r) for r in self.lab.scheduler._requests.values()},
        }

    def start(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        return plan, self.with_logprobs(self.lab.execute(plan))

    def plan_ahead(self) -> StepPlan:
        plan = self.lab.scheduler.schedule()
        self.lab.scheduler.check()
        return plan

    def with_logprobs(self, result: StepResult) -> StepResult:
        """As a runner answers: by request where logprobs are asked for."""
        requests = self.lab.scheduler._requests
        asked = [name for name in result.tokens if requests[name].sampling.logprobs is not None]
        if not asked and self.lab.scheduler.uses_fast_path:
            return result
        found = {name: [TokenLogprobs(token, -0.5, 1) for token in result.tokens[name]] for name in asked}
        return StepResult(dict(result.tokens), result.drafts, found)


def seen_in_plan(plan: StepPlan) -> dict[str, Any]:
    return {
        "scheduled": [(item.request.request_id, *item[1:]) for item in plan.scheduled],
        "admitted": plan.admitted_with_computed,
        "preempted": plan.preempted,
        "counts": (plan.step, plan.token_budget, plan.num_running, plan.num_waiting, plan.free_blocks),
        "stop": plan.admission_stop,
        "tokens": plan.num_scheduled_tokens,
    }


def seen_in_request(request: Request) -> tuple[Any, ...]:
    return (
        request.status,
        request.num_computed_tokens,
        list(request.token_ids),
        list(request.block_ids),
        list(request.block_hashes),
        request.num_hashed_blocks,
        request.mid_prefill,
        list(request.spec_token_ids),
        request.num_preemptions,
        request.num_cached_tokens,
        request.num_placeholders,
    )


def emit(request: Request, drafts: Sequence[int]) -> list[int]:
    """Some drafts and a token: EOS, a stop id and others that many requests have in common."""
    state = request.num_tokens * 7 + request.num_prompt_tokens
    return [*drafts[: state % (len(drafts) + 1)], state % 23 + 1]


def propose(request: Request, emitted: Sequence[int]) -> list[int]:
    """Now and then some drafts, as an n-gram proposer finds them."""
    return [7, 8][: request.num_tokens % 5 - 2] if request.num_tokens % 5 > 2 else []


def run_both(
    seed: int, flags: dict[str, Any], samplings: list[str], arrivals: list[int], hang_ups: float
) -> None:
    """Step two schedulers side by side until both are empty."""
    fast, slow = (Workload(seed, fast_path=fast_path, **flags) for fast_path in (True, False))
    for index in range(5000):
        count = arrivals[index] if index < len(arrivals) else 0
        for workload in (fast, slow):
            workload.arrive(count, samplings)
        assert fast.step(hang_ups) == slow.step(hang_ups)
        in_flight = slow.in_flight is not None and slow.in_flight[0].scheduled
        if index >= len(arrivals) and not in_flight and not slow.lab.scheduler.has_unfinished:
            break
    else:
        raise AssertionError("does not end")
    fast.lab.assert_all_free()


@st.composite
def all_flags(draw: st.DrawFn) -> dict[str, Any]:
    """Configs that a server would start with; the pool often holds little more than one long request."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_model_len = draw(st.integers(30, 60))
    chunked = draw(st.booleans())
    seqs = draw(st.integers(1, 8))
    least = max(seqs, 3) if chunked else max(seqs, max_model_len)
    enough = -(-max_model_len // block_size) + 1
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": draw(st.integers(least, least + 40)),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 7])),
        "k": draw(st.sampled_from([0, 0, 2])),
        "num_blocks": draw(st.one_of(st.integers(enough, 2 * enough), st.just(1000))),
        "async_scheduling": draw(st.booleans()),
    }


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    seed=st.integers(0, 1 << 20),
    flags=all_flags(),
    samplings=st.lists(st.sampled_from(sorted(SAMPLINGS)), min_size=1, max_size=3),
    arrivals=st.lists(st.integers(0, 3), min_size=1, max_size=10),
    hang_ups=st.sampled_from([0.0, 0.0, 0.05]),
)
def test_plans_outputs_and_pools_are_those_of_the_rule_loop(
    seed: int, flags: dict[str, Any], samplings: list[str], arrivals: list[int], hang_ups: float
) -> None:
    run_both(seed, flags, samplings, arrivals, hang_ups)


@pytest.mark.parametrize("ahead", [False, True])
def test_it_is_taken_by_nearly_every_token_of_an_ordinary_load(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 requests of 5-30 tokens, two arriving in three steps. Else the test above says nothing."""
    taken: Counter[str] = Counter()

    def planned(running: list[Request], budget: int, kv: KVCacheManager) -> Rows:
        rows = plan_decodes(running, budget, kv)
        taken["planned"] += len(rows)
        return rows

    def planned_ahead(running: list[Request], budget: int, kv: KVCacheManager) -> tuple[Rows, int]:
        rows, index = plan_decodes_ahead(running, budget, kv)
        taken["planned"] += len(rows)
        return rows, index

    def reconciled(plan: StepPlan) -> StepPlan:
        taken["reconciled"] += 1
        return drop_ended(plan)

    def appended(requests: Sequence[Request], token_ids: list[int]) -> Any:
        taken["appended"] += len(requests)
        return append_tokens(requests, token_ids)

    monkeypatch.setattr(engine.scheduling.scheduler, "plan_decodes", planned)
    monkeypatch.setattr(engine.scheduling.scheduler, "plan_decodes_ahead", planned_ahead)
    monkeypatch.setattr(engine.scheduling.scheduler, "drop_ended", reconciled)
    monkeypatch.setattr(engine.scheduling.scheduler, "append_tokens", appended)
    workload = Workload(0, fast_path=True, num_blocks=400, max_num_seqs=32, async_scheduling=ahead)
    lab, chance, emitted, steps = workload.lab, random.Random(0), 0, 0
    while lab.num_added < 120 or lab.scheduler.has_unfinished:
        if lab.num_added < 120 and steps % 3:
            lab.add(f"r{lab.num_added}", chance.randint(1, 30), chance.randint(5, 30))
        workload.step(0.0)
        emitted += len(lab.output.outputs)
        steps += 1
    assert taken["appended"] == emitted
    assert taken["planned"] >= 0.9 * emitted  # all but the first token of each
    assert taken["reconciled"] == (steps if ahead else 0)


def running(lab: Lab, *prompts: int) -> list[Request]:
    """Requests that have been prefilled, and decode."""
    requests = [lab.add(f"r{place}", prompt, max_tokens=40) for place, prompt in enumerate(prompts)]
    lab.step()
    return requests


def test_a_head_is_taken_up_to_the_budget() -> None:
    lab = Lab()
    requests = running(lab, 5, 6, 9)
    rows = plan_decodes(lab.scheduler.running, 2, lab.scheduler.kv)
    assert rows.requests == requests[:2]
    assert (rows.starts, rows.counts) == ([5, 6], [1, 1])
    assert [request.num_computed_tokens for request in requests] == [6, 7, 9]


def test_who_lacks_a_block_that_is_not_there_is_left_as_it_was() -> None:
    lab = Lab(num_blocks=1 + 4)
    requests = running(lab, 4, 5, 4)
    assert lab.pool.num_free == 0
    lab.scheduler.abort([requests[1].request_id])
    lab.pool.allocate(1)
    rows = plan_decodes(lab.scheduler.running, 64, lab.scheduler.kv)  # both enter a block, one is left
    assert rows.requests == [requests[0]]
    assert len(requests[0].block_ids) == 2
    assert (requests[2].num_computed_tokens, len(requests[2].block_ids)) == (4, 1)


@pytest.mark.parametrize("why", ["drafts", "mid-prefill", "more than a token"])
def test_who_does_more_than_decode_ends_the_head(why: str) -> None:
    lab = Lab()
    first, second, _ = running(lab, 5, 6, 9)
    if why == "drafts":
        second.spec_token_ids = [1]
    elif why == "mid-prefill":
        second.mid_prefill = True
    else:
        second.token_ids.append(1)
    rows = plan_decodes(lab.scheduler.running, 64, lab.scheduler.kv)
    assert rows.requests == [first]
    assert second.num_computed_tokens == 6


def test_a_block_is_hashed_in_the_step_that_fills_it() -> None:
    lab = Lab()
    (request,) = running(lab, 7)
    assert request.num_hashed_blocks == 1
    lab.step()
    assert request.num_hashed_blocks == 2
    assert lab.pool.lookup(request.block_hashes[1]) == request.block_ids[1]


def test_tokens_of_requests_that_hung_up_meanwhile_are_dropped() -> None:
    lab = Lab()
    requests = running(lab, 5, 6, 9)
    plan = lab.schedule()
    result = lab.execute(plan)
    assert isinstance(result.tokens, OneEach)
    lab.scheduler.abort(["r1"])
    output = lab.update(plan, result)
    assert [item.request_id for item in output.outputs] == ["r0", "r2"]
    assert requests[1].num_output_tokens == 1


def test_rows_that_end_are_told_with_their_reason() -> None:
    lab = Lab(emit=lambda request, drafts: [9])
    sampling = SamplingParams(max_tokens=3, stop_token_ids=(9,), min_tokens=2)
    lab.add("stops", 5, sampling=sampling)
    lab.add("goes on", 5)
    lab.add("is cut", 5, 2)
    lab.step()
    lab.step()
    stopped, cut = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH
    assert [tuple(item) for item in lab.output.outputs] == [
        ("stops", (9,), stopped, 9, ()),
        ("goes on", (9,), None, None, ()),
        ("is cut", (9,), cut, None, ()),
    ]
    assert lab.running == ["goes on"]


def test_logprobs_reach_their_output() -> None:
    lab = Lab()
    (request,) = running(lab, 5)
    entry = TokenLogprobs(0, -0.5, 1)
    output = lab.update(lab.schedule(), StepResult(OneEach([request], [0]), logprobs={"r0": [entry]}))
    assert output.outputs[0].logprobs == (entry,)


def test_who_has_his_last_token_in_flight_is_passed_over() -> None:
    lab = Lab(async_scheduling=True)
    requests = [lab.add(name, 5, max_tokens) for name, max_tokens in (("a", 9), ("b", 1), ("c", 9))]
    plan = lab.scheduler.schedule()
    rows, index = plan_decodes_ahead(lab.scheduler.running, 64, lab.scheduler.kv)
    assert (rows.requests, rows.starts, index) == ([requests[0], requests[2]], [5, 5], 3)
    assert [request.num_placeholders for request in requests] == [2, 1, 2]
    output = lab.update(plan, StepResult(OneEach(requests, [7, 7, 7])))
    assert [request.request_id for request in output.finished] == ["b"]
    assert [request.num_placeholders for request in requests] == [1, 0, 1]


def test_who_has_nothing_in_flight_ends_the_head_ahead() -> None:
    lab = Lab(async_scheduling=True, max_num_batched_tokens=8)
    first, second = lab.add("a", 5), lab.add("b", 5)
    lab.scheduler.schedule()  # 5 tokens of the first, 3 of the second
    rows, index = plan_decodes_ahead(lab.scheduler.running, 8, lab.scheduler.kv)
    assert (rows.requests, index) == ([first], 1)
    assert (second.num_computed_tokens, second.num_placeholders) == (3, 0)


def test_a_plan_that_no_request_has_left_stays_as_it_is() -> None:
    lab = Lab(async_scheduling=True, emit=lambda request, drafts: [9])
    requests = [lab.add(name, 5) for name in "abc"]
    plan = lab.scheduler.schedule()
    ahead = lab.scheduler.schedule()
    lab.update(plan, StepResult(OneEach(requests, [7, 7, 7])))
    assert lab.scheduler.reconcile(ahead) is ahead
    lab.scheduler.abort(["b"])
    assert [tuple(item) for item in lab.scheduler.reconcile(ahead).scheduled] == [
        (requests[0], 5, 1, (), True),
        (requests[2], 5, 1, (), True),
    ]


@pytest.mark.parametrize("flags", [{"async_scheduling": True, "k": 2}])
def test_it_is_off_where_a_step_is_never_plain(flags: dict[str, Any]) -> None:
    assert not Lab(**flags).scheduler.uses_fast_path
