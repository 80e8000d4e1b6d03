"""The rules of vLLM V1 scheduling, one by one, numbered in the order in which a step applies them."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_lab import Lab, shares

from engine.request import RequestStatus, SamplingParams
from engine.step import AdmissionStop, StepResult, TokenLogprobs


def no_cache(**flags: Any) -> Lab:
    return Lab(**{"enable_prefix_caching": False, **flags})


# ------------------------------------------------------- rule 1: the budget


def test_rule_1_the_budget_is_max_num_batched_tokens() -> None:
    lab = Lab(max_num_batched_tokens=8)
    lab.add("a", 20)
    plan = lab.schedule()
    assert plan.token_budget == 8
    assert shares(plan) == {"a": 8}


# -------------------------------------------------- rule 2: running first


def test_rule_2_running_requests_are_served_before_waiting_ones_in_list_order() -> None:
    lab = Lab(max_num_batched_tokens=8)
    lab.add("a", 3)
    lab.add("b", 3)
    lab.step()
    lab.add("c", 20)
    plan = lab.schedule()
    assert list(shares(plan).items()) == [("a", 1), ("b", 1), ("c", 6)]


def test_rule_2_a_cut_request_keeps_n_minus_1_drafts_and_an_unserved_one_keeps_all() -> None:
    lab = Lab(k=5, max_num_batched_tokens=8)
    requests = [lab.add(name, 2) for name in "abc"]
    lab.step()
    plan = lab.schedule()
    assert shares(plan) == {"a": 6, "b": 2}
    assert [len(item.drafts) for item in plan.scheduled] == [5, 1]
    assert [len(request.spec_token_ids) for request in requests] == [0, 0, 5]


def test_rule_2_the_cap_of_max_model_len_cuts_drafts() -> None:
    lab = Lab(k=3, max_model_len=16, max_num_batched_tokens=32)
    lab.add("a", 13, max_tokens=10)
    lab.step()  # 14 tokens, 13 computed: at most 16 - 13 - 1 = 2 more
    plan = lab.schedule()
    assert shares(plan) == {"a": 2}
    assert len(plan.scheduled[0].drafts) == 1


def test_rule_2_a_request_that_can_get_nothing_is_skipped_and_does_not_end_the_loop() -> None:
    lab = Lab()
    a = lab.add("a", 4)
    lab.add("b", 4)
    lab.step()
    a.num_computed_tokens = a.num_tokens  # nothing left to compute until its next token is known
    assert shares(lab.scheduler.schedule()) == {"b": 1}


def test_rule_2_the_threshold_applies_only_while_more_than_one_is_alive() -> None:
    lab = Lab(long_prefill_token_threshold=5, max_num_batched_tokens=16)
    lab.add("a", 30)
    assert lab.step() == {"a": 16}  # alone: no threshold
    lab.add("b", 12)
    assert lab.step() == {"a": 5, "b": 5}


def test_rule_2_alive_counts_those_that_only_wait() -> None:
    lab = Lab(long_prefill_token_threshold=5, max_num_batched_tokens=16, max_num_seqs=1)
    lab.add("a", 30)
    lab.add("b", 12)
    assert lab.step() == {"a": 5}


def test_rule_2_the_threshold_cuts_decode_and_drafts() -> None:
    lab = Lab(k=5, long_prefill_token_threshold=3)
    lab.add("a", 2)
    lab.add("b", 2)
    lab.step()
    plan = lab.schedule()
    assert shares(plan) == {"a": 3, "b": 3}
    assert [len(item.drafts) for item in plan.scheduled] == [2, 2]


# ------------------------------------------- rules 3 to 5: blocks, preemption


def fill(policy: str, priorities: tuple[int, int, int] = (0, 0, 0)) -> Lab:
    """Three requests of one block each in a pool of three: the next token of the first needs a victim."""
    lab = no_cache(num_blocks=4, scheduling_policy=policy)
    for name, priority in zip("abc", priorities, strict=True):
        lab.add(name, 4, priority=priority)
    lab.step()
    return lab


def test_rule_3_fcfs_the_victim_is_the_tail_of_running() -> None:
    lab = fill("fcfs")
    plan = lab.schedule()
    # a takes c's block; b needs one as well, is the tail itself by now, and goes too
    assert plan.preempted == ("c", "b")
    assert shares(plan) == {"a": 1}
    assert (lab.running, lab.waiting) == (["a"], ["b", "c"])


def test_rule_3_fcfs_when_the_tail_is_the_request_itself_the_loop_ends() -> None:
    lab = no_cache(num_blocks=4)
    lab.add("a", 7)  # two blocks, its next token fits
    lab.add("b", 4)  # one block, its next token does not
    lab.step()
    plan = lab.schedule()
    assert shares(plan) == {"a": 1}
    assert plan.preempted == ("b",)
    assert (lab.running, lab.waiting) == (["a"], ["b"])


def test_rule_3_priority_the_victim_is_the_worst_of_all_running() -> None:
    lab = fill("priority", (1, 0, 0))
    # running is b, c, a (admitted by priority); b needs a block, and a is the worst
    assert lab.running == ["b", "c", "a"]
    plan = lab.schedule()
    assert "a" in plan.preempted


def test_rule_3_priority_a_victim_already_scheduled_gives_budget_and_blocks_back() -> None:
    lab = no_cache(num_blocks=4, scheduling_policy="priority", max_num_batched_tokens=10)
    lab.add("low", 6, priority=5)  # two blocks: its next token needs none
    lab.step()
    lab.add("high", 4, priority=0)
    lab.step()
    plan = lab.schedule()  # low is scheduled first, then high needs its block
    assert plan.preempted == ("low",)
    assert shares(plan) == {"high": 1}
    assert plan.scheduled[0].drafts == ()


def test_rule_3_priority_the_budget_given_back_serves_the_next() -> None:
    lab = no_cache(num_blocks=5, scheduling_policy="priority", max_num_batched_tokens=7, k=3)
    lab.propose = lambda request, emitted: []
    lab.add("low", 1, priority=9)
    lab.step()
    lab.propose = lambda request, emitted: [0] * 3
    lab.add("x", 4, priority=0)
    lab.add("y", 2, priority=0)
    assert lab.step() == {"low": 1, "x": 4, "y": 2}
    plan = lab.schedule()  # low takes 4 and leaves 3 for x, which needs a block: the 4 go to y
    assert plan.preempted == ("low",)
    assert shares(plan) == {"x": 3, "y": 4}


def test_rule_3_priority_a_request_that_is_its_own_victim_does_not_end_the_loop() -> None:
    lab = no_cache(num_blocks=5, scheduling_policy="priority")
    lab.add("low", 3, priority=5)
    lab.step()
    lab.add("high", 9, priority=0)
    lab.step()  # low has one full block, high three: none is free, and only low needs one
    plan = lab.schedule()
    assert plan.preempted == ("low",)
    assert shares(plan) == {"high": 1}


def test_rule_3_priority_a_victim_before_the_request_shifts_the_loop() -> None:
    lab = no_cache(num_blocks=5, scheduling_policy="priority")
    lab.add("low", 5, priority=9)  # two blocks
    lab.step()
    lab.add("x", 4, priority=0)
    lab.add("y", 2, priority=1)
    lab.step()
    assert lab.running == ["low", "x", "y"]
    plan = lab.schedule()  # x evicts low, and y after it must not be skipped
    assert plan.preempted == ("low",)
    assert shares(plan) == {"x": 1, "y": 1}


def test_rule_3_priority_ties_are_broken_by_arrival_not_by_id() -> None:
    lab = no_cache(num_blocks=3, scheduling_policy="priority")
    lab.add("z", 4)
    lab.add("a", 4)  # arrived later: the victim, though its id sorts first
    lab.step()
    assert lab.schedule().preempted == ("a",)
    lab = no_cache(num_blocks=3, scheduling_policy="priority")
    lab.add("a", 4, arrival_time=1.0)
    lab.add("b", 4, arrival_time=1.0)  # nothing to choose by: the first in the list, as max() has it
    lab.step()
    assert lab.schedule().preempted == ("a",)


def test_rule_4_a_preempted_request_keeps_its_outputs_and_loses_the_rest() -> None:
    lab = no_cache(num_blocks=4, k=2, propose=lambda request, emitted: [0])
    a = lab.add("a", 7)
    b = lab.add("b", 3)
    lab.step()
    assert b.spec_token_ids == [0]
    plan = lab.schedule()
    assert plan.preempted == ("b",)
    assert b.status is RequestStatus.PREEMPTED
    assert (b.num_computed_tokens, b.block_ids, b.spec_token_ids) == (0, [], [])
    assert b.output_token_ids == [0]
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert lab.scheduler.stats.num_preemptions == 1


def test_rule_4_fcfs_victims_stand_before_everything_that_waits_in_their_order() -> None:
    lab = no_cache(num_blocks=7)
    lab.add("a", 4, max_tokens=20)
    lab.add("b", 8)
    lab.add("c", 8)
    lab.step()
    lab.add("new", 4)
    plan = lab.schedule()  # a takes the last free block, b needs one: c goes
    assert plan.preempted == ("c",)
    assert lab.waiting == ["c", "new"]
    lab.update(plan)
    seen = list(plan.preempted)
    while "b" not in seen:
        plan = lab.schedule()
        seen += plan.preempted
        lab.update(plan)
    assert lab.waiting == ["b", "c", "new"]


def test_rule_4_priority_victims_take_their_place_by_key() -> None:
    lab = no_cache(num_blocks=3, scheduling_policy="priority")
    lab.add("a", 4, priority=0)
    lab.add("b", 4, priority=2)
    lab.step()
    lab.add("c", 4, priority=1)
    plan = lab.schedule()
    assert plan.preempted == ("b",)
    assert lab.waiting == ["c", "b"]


def test_rule_5_no_request_is_admitted_in_a_step_with_a_preemption_but_in_the_next() -> None:
    lab = no_cache(num_blocks=5)
    lab.add("a", 4, max_tokens=2)
    lab.add("b", 12)
    lab.step()
    lab.add("new", 1)
    plan = lab.schedule()  # b goes, and three blocks come free for one token of a
    assert plan.preempted == ("b",)
    assert not plan.admitted_with_computed
    assert plan.admission_stop is AdmissionStop.PREEMPTION
    assert plan.free_blocks == 2
    lab.update(plan)  # finishes a
    assert lab.step() == {"b": 13}


# -------------------------------------------------- rules 6 and 7: admission


def test_rule_6_max_num_seqs_ends_admission() -> None:
    lab = Lab(max_num_seqs=2)
    for name in "abc":
        lab.add(name, 2)
    plan = lab.schedule()
    assert shares(plan) == {"a": 2, "b": 2}
    assert plan.admission_stop is AdmissionStop.SEQUENCES


def test_rule_6_a_lookup_leaves_the_last_token_to_compute() -> None:
    lab = Lab()
    prompt = list(range(12))
    lab.add("a", prompt, max_tokens=1)
    lab.step()
    lab.add("same", prompt)
    lab.add("longer", [*prompt, 99])
    plan = lab.schedule()
    assert plan.admitted_with_computed == {"same": 8, "longer": 12}


def test_rule_6_a_lookup_stops_at_the_first_miss() -> None:
    lab = Lab()
    lab.add("a", [1] * 4 + [2] * 4 + [3] * 4, max_tokens=1)
    lab.step()
    lab.add("b", [1] * 4 + [9] * 4 + [3] * 4 + [0])
    assert lab.schedule().admitted_with_computed == {"b": 4}


def test_rule_6_equal_tokens_after_unequal_ones_are_no_hit() -> None:
    lab = Lab()
    lab.add("a", [1] * 4 + [2] * 4, max_tokens=1)
    lab.step()
    lab.add("b", [2] * 4 + [7])
    assert lab.schedule().admitted_with_computed == {"b": 0}


def test_rule_6_outputs_of_a_resumed_request_count_as_tokens_and_its_own_blocks_are_hit() -> None:
    lab = Lab(num_blocks=5, block_size=4)
    lab.add("a", 7, max_tokens=6)
    b = lab.add("b", 3, max_tokens=8)
    plans = lab.finish()
    resumed = [plan for plan in plans[1:] if "b" in plan.admitted_with_computed]
    assert b.num_preemptions == len(resumed) > 0
    assert any(plan.admitted_with_computed["b"] >= 4 for plan in resumed)  # one block is prompt and output


def test_rule_6_without_prefix_caching_nothing_is_hit() -> None:
    lab = no_cache()
    lab.add("a", [1] * 9, max_tokens=1)
    lab.step()
    lab.add("b", [1] * 9)
    assert lab.schedule().admitted_with_computed == {"b": 0}
    assert lab.scheduler.stats.prefix_queries == 0


def test_rule_6_requests_of_different_salt_share_nothing() -> None:
    lab = Lab()
    lab.add("a", [1] * 9, max_tokens=1, cache_salt="alice")
    lab.step()
    lab.add("b", [1] * 9, cache_salt="bob")
    lab.add("c", [1] * 9, cache_salt="alice")
    assert lab.schedule().admitted_with_computed == {"b": 0, "c": 8}


def test_rule_7_chunked_prefill_on_cuts_the_prompt_to_the_budget() -> None:
    lab = Lab(max_num_batched_tokens=8)
    lab.add("a", 20)
    assert [lab.step() for _ in range(3)] == [{"a": 8}, {"a": 8}, {"a": 4}]


def test_rule_7_chunked_prefill_off_decodes_can_leave_too_little_for_a_prompt() -> None:
    lab = Lab(enable_chunked_prefill=False, max_model_len=16, max_num_batched_tokens=16)
    lab.add("a", 1)
    lab.add("b", 1)
    lab.step()
    lab.add("long", 15)
    lab.add("fits", 14)
    plan = lab.schedule()
    assert shares(plan) == {"a": 1, "b": 1}
    assert plan.admission_stop is AdmissionStop.CHUNKING


def test_rule_7_chunked_prefill_off_no_request_overtakes_the_blocked_head() -> None:
    lab = Lab(enable_chunked_prefill=False, max_model_len=16, max_num_batched_tokens=16)
    lab.add("a", 10)
    lab.add("b", 10)
    lab.add("c", 2)
    plan = lab.schedule()
    assert shares(plan) == {"a": 10}
    assert plan.admission_stop is AdmissionStop.CHUNKING
    assert lab.waiting == ["b", "c"]


def test_rule_7_the_threshold_comes_before_the_chunking_check() -> None:
    lab = Lab(
        enable_chunked_prefill=False,
        max_model_len=16,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=6,
    )
    lab.add("a", 10)
    lab.add("b", 10)
    assert lab.step() == {"a": 6, "b": 6}


def test_rule_7_admission_needs_room_for_the_whole_known_sequence() -> None:
    lab = no_cache(num_blocks=6, max_num_batched_tokens=4)
    lab.add("a", 12)
    lab.add("b", 12)
    assert lab.step() == {"a": 4}
    lab.step()
    lab.step()
    plan = lab.schedule()  # a holds 4 of 5 blocks after its first output token; b would need 3
    assert shares(plan) == {"a": 1}
    assert plan.admission_stop is AdmissionStop.BLOCKS


def test_rule_7_the_reserve_leaves_max_tokens_out() -> None:
    lab = no_cache(num_blocks=3)
    lab.add("a", 8, max_tokens=50)
    assert lab.step() == {"a": 8}


def test_rule_7_the_reserve_counts_the_outputs_of_a_resumed_request() -> None:
    lab = no_cache(num_blocks=6, max_num_batched_tokens=64)
    lab.add("a", 8, max_tokens=9)
    b = lab.add("b", 7, max_tokens=9)
    while not b.num_preemptions:
        lab.step()
    assert b.num_output_tokens > 0
    needed = -(-b.num_tokens // 4)
    while "b" in lab.waiting:
        free = lab.pool.num_free
        plan = lab.schedule()
        assert ("b" in plan.admitted_with_computed) == (needed <= free and not plan.preempted)
        lab.update(plan)


def test_rule_7_hit_blocks_without_a_holder_count_against_what_is_free() -> None:
    lab = Lab(num_blocks=5)
    lab.add("a", [1] * 8, max_tokens=1)
    lab.step()  # a's two blocks are free and hashed
    lab.add("other", 6, max_tokens=9)
    lab.step()  # takes the two blocks never used
    lab.add("b", [1] * 9)  # three blocks: two hits, which are all that is free, and one more
    plan = lab.schedule()
    assert plan.admission_stop is AdmissionStop.BLOCKS
    assert shares(plan) == {"other": 1}


def test_rule_7_an_admission_that_fails_leaves_the_order_of_the_free_list() -> None:
    lab = Lab(num_blocks=6, max_num_seqs=3)
    lab.add("a", [1] * 8, max_tokens=1)
    lab.step()
    lab.add("other", 5, max_tokens=9)
    lab.step()
    order = lab.pool.free_list()
    lab.add("b", [1] * 8 + [2] * 12)
    plan = lab.schedule()
    assert plan.admission_stop is AdmissionStop.BLOCKS
    assert lab.pool.free_list() == order


def test_rule_7_the_admitted_go_to_the_tail_of_running_also_under_priority() -> None:
    lab = no_cache(num_blocks=9, scheduling_policy="priority")
    lab.add("late", 4, priority=1)
    lab.step()
    lab.add("early", 4, priority=0)
    lab.step()
    assert lab.running == ["late", "early"]  # never sorted again


# ------------------------------------------------ rules 8 and 9: the update


def test_rule_8_computed_moves_on_at_schedule_and_mid_prefill_emits_nothing() -> None:
    lab = Lab(max_num_batched_tokens=8)
    a = lab.add("a", 12)
    plan = lab.schedule()
    assert a.num_computed_tokens == 8
    assert not plan.scheduled[0].emits
    assert not lab.update(plan).outputs
    plan = lab.schedule()
    assert plan.scheduled[0].emits
    assert [output.token_ids for output in lab.update(plan).outputs] == [(0,)]


def test_rule_9_rejected_drafts_are_taken_back() -> None:
    lab = Lab(k=3, emit=lambda request, drafts: [*drafts[:1], 0])
    a = lab.add("a", 4)
    lab.step()
    plan = lab.schedule()
    assert a.num_computed_tokens == 4 + 4
    lab.update(plan)  # one of three accepted
    assert a.num_tokens == 7
    assert a.num_computed_tokens == 6
    assert (lab.output.num_drafts, lab.output.num_draft_tokens, lab.output.num_accepted_tokens) == (1, 3, 1)
    assert lab.output.accepted_per_position == (1,)


def finish_with(tokens: list[int], **sampling: Any) -> Lab:
    """One request that decodes, and then emits ``tokens`` in one step."""
    lab = Lab(k=5)
    lab.add("a", 4, sampling=SamplingParams(**{"max_tokens": 50, **sampling}), eos_token_ids=(2,))
    lab.step()
    lab.emit = lambda request, drafts: tokens
    lab.step()
    return lab


def test_rule_9_eos_ends_a_request_and_what_follows_is_dropped() -> None:
    lab = finish_with([7, 2, 7, 7])
    (output,) = lab.output.outputs
    assert (output.token_ids, output.finish, output.stop_reason) == (
        (7, 2),
        RequestStatus.FINISHED_STOPPED,
        None,
    )
    lab.assert_all_free()


def test_rule_9_stop_ids_end_a_request_and_are_named() -> None:
    lab = finish_with([7, 9, 2], stop_token_ids=(9,))
    (output,) = lab.output.outputs
    assert (output.token_ids, output.finish, output.stop_reason) == (
        (7, 9),
        RequestStatus.FINISHED_STOPPED,
        9,
    )


def test_rule_9_eos_comes_before_stop_ids_and_these_before_length() -> None:
    lab = finish_with([2], stop_token_ids=(2,), max_tokens=2)
    assert lab.output.outputs[0].stop_reason is None
    lab = finish_with([9], stop_token_ids=(9,), max_tokens=2)
    assert lab.output.outputs[0].finish is RequestStatus.FINISHED_STOPPED


def test_rule_9_ignore_eos_and_min_tokens_hold_stops_off() -> None:
    lab = finish_with([2, 7], ignore_eos=True)
    assert lab.output.outputs[0].finish is None
    lab = finish_with([9, 2, 9], min_tokens=4, stop_token_ids=(9,))
    (output,) = lab.output.outputs  # one token before: the third of these is the fourth
    assert output.token_ids == (9, 2, 9)
    assert output.stop_reason == 9


def test_rule_9_max_tokens_ends_a_request() -> None:
    lab = finish_with([7, 7, 7, 7], max_tokens=3)
    (output,) = lab.output.outputs
    assert (output.token_ids, output.finish) == ((7, 7), RequestStatus.FINISHED_LENGTH)


def test_rule_9_max_model_len_ends_a_request() -> None:
    lab = Lab(max_model_len=8, max_num_batched_tokens=8)
    a = lab.add("a", 6, max_tokens=50)
    lab.finish()
    assert a.num_tokens == 8
    assert a.status is RequestStatus.FINISHED_LENGTH


def test_rule_9_logprobs_are_cut_with_the_tokens() -> None:
    lab = Lab(k=3)
    lab.add("a", 4, max_tokens=3)
    lab.step()
    plan = lab.schedule()
    logprobs = [TokenLogprobs(token, -1.0, 1) for token in (5, 6, 7)]
    output = lab.scheduler.update(plan, StepResult({"a": [5, 6, 7]}, logprobs={"a": logprobs}))
    assert output.outputs[0].token_ids == (5, 6)
    assert output.outputs[0].logprobs == tuple(logprobs[:2])


# ------------------------------------------------------- rule 10: priority


def test_rule_10_admission_is_by_priority_then_arrival_then_id() -> None:
    lab = Lab(scheduling_policy="priority")
    lab.add("d", 2, priority=1, arrival_time=0.0)
    lab.add("c", 2, priority=0, arrival_time=5.0)
    lab.add("b", 2, priority=0, arrival_time=1.0)
    lab.add("a", 2, priority=0, arrival_time=1.0)
    lab.step()
    assert lab.running == ["a", "b", "c", "d"]


def test_rule_10_a_waiting_request_does_not_preempt_by_itself() -> None:
    lab = no_cache(num_blocks=5, scheduling_policy="priority", max_num_seqs=4)
    lab.add("low", 10, priority=9)
    lab.step()
    lab.add("urgent", 9, priority=0)
    plan = lab.schedule()
    assert plan.preempted == ()
    assert shares(plan) == {"low": 1}
    assert plan.admission_stop is AdmissionStop.BLOCKS


def test_rule_10_fcfs_ignores_priority() -> None:
    lab = Lab()
    lab.add("a", 2, priority=9)
    lab.add("b", 2, priority=0)
    lab.step()
    assert lab.running == ["a", "b"]


# ---------------------------------------------------------- rule 11: abort


def test_rule_11_abort_while_waiting_running_and_preempted() -> None:
    lab = no_cache(num_blocks=4)
    lab.add("a", 7)
    lab.add("b", 4)
    lab.step()
    lab.add("c", 4)
    plan = lab.schedule()
    assert plan.preempted == ("b",)
    aborted = lab.scheduler.abort(["c", "b", "a", "a", "unknown"])
    assert [request.request_id for request in aborted] == ["c", "b", "a"]
    assert all(request.status is RequestStatus.FINISHED_ABORTED for request in aborted)
    lab.scheduler.check()
    lab.assert_all_free()
    assert not lab.scheduler.has_unfinished
    assert lab.scheduler.abort(["a"]) == []


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_rule_11_output_in_flight_of_an_aborted_request_is_ignored(policy: str) -> None:
    lab = Lab(scheduling_policy=policy)
    a = lab.add("a", 4)
    lab.add("b", 4)
    plan = lab.schedule()
    lab.scheduler.abort(["a"])
    again = lab.add("a", 4)  # the id may be used again at once
    output = lab.scheduler.update(plan, StepResult({"a": [5], "b": [6]}))
    lab.scheduler.check()
    assert [item.request_id for item in output.outputs] == ["b"]
    assert a.output_token_ids == again.output_token_ids == []
    assert lab.waiting == ["a"]


# -------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 4, "the prompt is empty"),
        (64, 4, "leaves no room for output in max_model_len"),
        (4, 0, "max_tokens is 0"),
    ],
)
def test_a_request_that_could_never_finish_is_refused(prompt: int, max_tokens: int, message: str) -> None:
    lab = Lab(max_model_len=64)
    with pytest.raises(ValueError, match=message):
        lab.add("a", prompt, max_tokens=max_tokens)
    assert not lab.scheduler.has_unfinished


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    lab = Lab()
    lab.add("a", 4, max_tokens=1)
    with pytest.raises(ValueError, match="'a': a request of this id is unfinished"):
        lab.add("a", 4)
    lab.finish()
    lab.add("a", 4)


# ------------------------------------------------------------------- counts


def test_prefix_counters_count_first_admissions_in_tokens() -> None:
    lab = Lab(num_blocks=5)
    lab.add("a", [1] * 7, max_tokens=6)
    b = lab.add("b", [1] * 6, max_tokens=8)
    lab.finish()
    assert b.num_preemptions > 0  # its resumption does not count
    assert b.num_cached_tokens == 4
    assert (lab.scheduler.stats.prefix_queries, lab.scheduler.stats.prefix_hits) == (13, 4)


def test_usage_is_one_minus_free_over_usable() -> None:
    lab = Lab(num_blocks=11)
    lab.add("a", 12)
    lab.schedule()
    assert lab.scheduler.kv_usage == pytest.approx(0.3)
    assert (lab.scheduler.num_running, lab.scheduler.num_waiting) == (1, 0)


def test_free_blocks_of_a_plan_include_cached_ones_and_follow_preemptions() -> None:
    lab = Lab(num_blocks=4)
    lab.add("a", 8, max_tokens=1)
    lab.step()
    assert lab.schedule().free_blocks == 3


def test_reset_prefix_cache_only_while_everything_is_free() -> None:
    lab = Lab()
    lab.add("a", [1] * 9, max_tokens=2)
    lab.step()
    assert not lab.scheduler.reset_prefix_cache()
    lab.finish()
    assert lab.scheduler.reset_prefix_cache()
    lab.add("b", [1] * 9)
    assert lab.schedule().admitted_with_computed == {"b": 0}
