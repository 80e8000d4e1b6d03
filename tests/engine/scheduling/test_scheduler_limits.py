"""The two budgets, prompts left half-way, lookahead slots, and speculation that is off at peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_workloads import Run, Spec, configs, many, without_aborts, workloads
from scheduler_lab import Lab, shares

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.explain.explain import explain_steps
from engine.explain.explain_input import read_config, read_requests
from engine.request import RequestStatus
from engine.scheduling.budget import StepBudget
from engine.scheduling.scheduler import UnifiedScheduler
from engine.speculative_config import SpeculativeConfig
from engine.step import PLACEHOLDER_TOKEN_ID, AdmissionStop, StepPlan

DRAFT_MODEL = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=3)
EAGLE = SpeculativeConfig(method="eagle", model="head", num_speculative_tokens=3)

# ------------------------------------------------------- rule 1: two budgets


def test_rule_1_the_budget_is_max_num_scheduled_tokens_where_given() -> None:
    lab = Lab(max_num_batched_tokens=16, max_num_scheduled_tokens=8, max_model_len=32)
    lab.add("a", 20)
    plan = lab.scheduler.schedule()
    assert (plan.token_budget, shares(plan)) == (8, {"a": 8})


def test_a_draft_model_costs_each_request_one_more_input_slot() -> None:
    lab = Lab(max_num_batched_tokens=12, speculative_config=DRAFT_MODEL)
    lab.add("a", 4)
    lab.add("b", 20)
    assert lab.step() == {"a": 4, "b": 6}  # 4 + 1 + 6 + 1


def test_a_request_for_which_no_input_slot_is_left_beside_the_draft_ends_the_step() -> None:
    lab = Lab(max_num_batched_tokens=6, speculative_config=DRAFT_MODEL)
    lab.add("a", 4)
    lab.add("b", 4)
    plan = lab.schedule()
    assert shares(plan) == {"a": 4}
    assert plan.admission_stop is AdmissionStop.BUDGET


@pytest.mark.parametrize("speculative", [EAGLE, SpeculativeConfig(), None])
def test_other_methods_need_none(speculative: SpeculativeConfig | None) -> None:
    lab = Lab(max_num_batched_tokens=12, speculative_config=speculative)
    lab.add("a", 4)
    lab.add("b", 20)
    assert lab.step() == {"a": 4, "b": 8}


def test_a_victim_gives_its_draft_slot_back() -> None:
    budget = StepBudget(10, 12, draft_slots=1)
    budget.take(4)
    budget.take(3)
    budget.give_back(4)
    assert (budget.tokens, budget.inputs, budget.left) == (7, 8, 7)


# ----------------------------------------------- rule 3: lookahead, EAGLE


def test_a_model_that_drafts_has_slots_for_k_tokens_more() -> None:
    lab = Lab(speculative_config=DRAFT_MODEL, propose=lambda request, emitted: [])
    a = lab.add("a", 6)
    lab.step()
    assert len(a.block_ids) == 3  # 6 + 3 tokens
    other = Lab(k=3, propose=lambda request, emitted: [])
    b = other.add("b", 6)
    other.step()
    assert len(b.block_ids) == 2  # n-gram: drafts are counted when they are scheduled


def test_lookahead_ends_at_max_model_len() -> None:
    lab = Lab(speculative_config=DRAFT_MODEL, max_model_len=8, max_num_batched_tokens=16, num_blocks=4)
    a = lab.add("a", 7)
    lab.schedule()
    assert len(a.block_ids) == 2


def test_lookahead_can_cost_a_victim() -> None:
    lab = Lab(
        speculative_config=DRAFT_MODEL,
        num_blocks=5,
        enable_prefix_caching=False,
        propose=lambda request, emitted: [],
    )
    lab.add("a", 5)
    lab.add("b", 4)
    lab.step()
    assert lab.schedule().preempted == ("b",)


def test_eagle_drops_the_last_matched_block() -> None:
    prompt = list(range(13))
    for speculative, cached in ((EAGLE, 8), (DRAFT_MODEL, 12)):
        lab = Lab(speculative_config=speculative, propose=lambda request, emitted: [])
        lab.add("a", prompt, max_tokens=1)
        lab.step()
        lab.add("b", prompt)
        assert lab.schedule().admitted_with_computed == {"b": cached}


# ------------------------------------------ rule 14: concurrent partial prefills

PARTIAL: dict[str, Any] = {
    "max_num_batched_tokens": 16,
    "max_num_partial_prefills": 2,
    "max_long_partial_prefills": 1,
    "long_prefill_token_threshold": 6,
}


def test_rule_14_short_prompts_overtake_a_long_one_that_waits_for_its_place() -> None:
    lab = Lab(**PARTIAL)
    lab.add("long", 30)
    lab.add("second", 30)
    lab.add("short", 5)
    plan = lab.scheduler.schedule()
    assert shares(plan) == {"long": 6, "short": 5}
    assert lab.waiting == ["second"]
    assert plan.admission_stop is AdmissionStop.LONG_PREFILLS


def test_rule_14_the_one_set_aside_is_the_first_to_be_asked_again() -> None:
    lab = Lab(**PARTIAL)
    for name in ("long", "second", "third"):
        lab.add(name, 20)
    steps = []
    while "second" in lab.waiting:
        plan = lab.scheduler.schedule()
        steps.append(shares(plan))
        lab.update(plan)
    # 6, 12 and 18 of 20; what it lacks before the fourth step is short
    assert steps == [{"long": 6}, {"long": 6}, {"long": 6}, {"long": 2, "second": 6}]


def test_rule_14_at_most_so_many_are_left_half_way() -> None:
    lab = Lab(**{**PARTIAL, "max_long_partial_prefills": 2})
    for name in "abc":
        lab.add(name, 20)
    lab.add("whole", 4)
    plan = lab.scheduler.schedule()
    assert shares(plan) == {"a": 6, "b": 6, "whole": 4}
    assert plan.admission_stop is AdmissionStop.PREFILLS


def test_rule_14_one_prefill_at_a_time_where_one_is_asked_for() -> None:
    lab = Lab(max_num_partial_prefills=1, max_num_batched_tokens=8)
    lab.add("a", 12)
    lab.add("b", 12)
    steps = []
    for _ in range(3):
        plan = lab.scheduler.schedule()
        steps.append(shares(plan))
        lab.update(plan)
    # a's last 4 leave it done, so that b may begin in the same step
    assert steps == [{"a": 8}, {"a": 4, "b": 4}, {"a": 1, "b": 7}]


def test_rule_14_without_the_flag_nothing_changes() -> None:
    lab = Lab(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    for name in "abc":
        lab.add(name, 20)
    assert lab.step() == {"a": 6, "b": 6, "c": 4}


@pytest.mark.parametrize(
    ("flags", "threshold"),
    [
        ({}, 0),
        ({"max_num_partial_prefills": 1}, 0),
        ({"max_num_partial_prefills": 3}, 327),
        ({"max_num_partial_prefills": 3, "long_prefill_token_threshold": 50}, 50),
    ],
)
def test_rule_14_the_default_threshold_is_4_percent_of_max_model_len(
    flags: dict[str, Any], threshold: int
) -> None:
    assert EngineConfig(max_model_len=8192, **flags).prefill_threshold == threshold


def test_explain_shows_it() -> None:
    setup = read_config(
        {"max_model_len": 64, "num_gpu_blocks": 100, "block_size": 4, "max_num_seqs": 8, **PARTIAL}
    )
    prompts = {"long": range(30), "second": range(100, 130), "short": range(200, 205)}
    requests = [
        {"id": name, "prompt_token_ids": list(tokens), "output_len": 2} for name, tokens in prompts.items()
    ]
    first = next(explain_steps(setup, read_requests(requests, setup)))
    assert first.row(False)["scheduled"] == {"long": 6, "short": 5}


class LimitedRun(Run):
    """A workload whose every plan is checked against the limits on partial prefills."""

    def __init__(self, config: dict[str, Any], workload: list[Spec], limits: tuple[int, int]) -> None:
        super().__init__(config, workload)
        num_blocks, flags = self.lab.pool.num_blocks, self.lab.config
        partial, long = max(limits), min(limits)
        self.lab.config = replace(flags, max_num_partial_prefills=partial, max_long_partial_prefills=long)
        self.lab.scheduler = UnifiedScheduler(self.lab.config, num_blocks)
        self.lab.pool = self.lab.scheduler.kv.pool

    def step(self) -> StepPlan:
        self.arrive()
        plan = self.lab.scheduler.schedule()
        self.lab.scheduler.check()
        config = self.lab.config
        halfway = [item for item in plan.scheduled if not item.emits]
        lacks = [item.request.num_tokens - item.start for item in halfway]
        assert len(halfway) <= (config.max_num_partial_prefills or 0)
        assert sum(n > config.prefill_threshold for n in lacks) <= config.max_long_partial_prefills
        assert sum(r.mid_prefill for r in self.lab.scheduler.running) <= (
            config.max_num_partial_prefills or 0
        )
        self.lab.update(plan)
        self.index += 1
        return plan


@settings(many, max_examples=150)
@given(config=configs(), workload=workloads, limits=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_rule_14_limits_hold_and_no_request_starves(
    config: dict[str, Any], workload: list[Spec], limits: tuple[int, int]
) -> None:
    run = LimitedRun({**config, "enable_chunked_prefill": True}, without_aborts(workload), limits)
    for _ in range(3000):
        if run.done:
            break
        run.step()
    assert run.done
    run.lab.assert_all_free()
    assert all(request.status is RequestStatus.FINISHED_LENGTH for request in run.requests.values())


# ------------------------------------------------------- off at peak


def peak(limit: int, **flags: Any) -> Lab:
    return Lab(
        speculative_config=SpeculativeConfig(num_speculative_tokens=3, disable_by_batch_size=limit), **flags
    )


def drafts_of(plan: StepPlan) -> list[int]:
    return [len(item.drafts) for item in plan.scheduled]


def test_no_drafts_are_scheduled_while_more_than_so_many_run_and_again_below() -> None:
    lab = peak(2, propose=lambda request, emitted: [0] * 3)
    lab.add("a", 4, max_tokens=30)
    lab.add("b", 4, max_tokens=30)
    lab.step()
    assert drafts_of(lab.scheduler.schedule()) == [3, 3]
    lab = peak(2, propose=lambda request, emitted: [0] * 3)
    for name, length in (("a", 30), ("b", 30), ("c", 3)):
        lab.add(name, 4, max_tokens=length)
    seen = []
    for _ in range(5):
        plan = lab.schedule()
        seen.append((plan.num_running, drafts_of(plan)))
        lab.update(plan)
    assert seen == [(3, [0, 0, 0]), (3, [0, 0, 0]), (3, [0, 0, 0]), (2, [3, 3]), (2, [3, 3])]


def test_no_request_is_padded_above_the_limit() -> None:
    for limit, expected in ((1, 1), (2, 4)):
        lab = peak(limit, propose=lambda request, emitted: [])
        lab.add("running", 5)
        lab.step()
        lab.add("a", 1)
        plan = lab.schedule()
        assert shares(plan) == {"running": 1, "a": expected}
        if expected > 1:
            assert plan.scheduled[1].drafts == (PLACEHOLDER_TOKEN_ID,) * 3


# ------------------------------------------------------- config rules


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_num_scheduled_tokens": 0}, r"--max-num-scheduled-tokens 0: must be at least 1"),
        (
            {"max_num_scheduled_tokens": 4096},
            r"--max-num-scheduled-tokens 4096: must not exceed max_num_batched_tokens \(2048\)",
        ),
        (
            {"max_num_scheduled_tokens": 512, "enable_chunked_prefill": False},
            r"--max-num-scheduled-tokens 512: must be at least max_model_len \(1024\)",
        ),
        (
            {"max_num_scheduled_tokens": 3, "speculative_config": DRAFT_MODEL},
            r"--max-num-scheduled-tokens 3: must be at least 1 \+ num_speculative_tokens \(4\)",
        ),
        (
            {"max_num_batched_tokens": 4, "max_num_seqs": 2, "speculative_config": DRAFT_MODEL},
            r"--max-num-batched-tokens 4: .*1 for the draft model \(5\)",
        ),
        ({"max_num_partial_prefills": 0}, r"--max-num-partial-prefills 0: must be at least 1"),
        (
            {"max_num_partial_prefills": 2, "enable_chunked_prefill": False},
            r"--max-num-partial-prefills 2: more than 1 needs chunked prefill",
        ),
        (
            {"max_num_partial_prefills": 2, "max_long_partial_prefills": 3},
            r"--max-long-partial-prefills 3: must not exceed max_num_partial_prefills \(2\)",
        ),
        (
            {"max_long_partial_prefills": 2},
            r"--max-long-partial-prefills 2: must not exceed max_num_partial_prefills \(not given\)",
        ),
    ],
)
def test_config_rules_name_flag_value_rule_and_fix(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.* Fix: "):
        EngineConfig(max_model_len=1024, **flags).validate()
