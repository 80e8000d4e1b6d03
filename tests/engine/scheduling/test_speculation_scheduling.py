"""Speculation in the token budget: padding on admission, hashing at update, drafts under preemption."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_lab import Lab, all_accepted, shares

from engine.step import PLACEHOLDER_TOKEN_ID, AdmissionStop

PROMPT = list(range(100, 109))  # two full blocks of 4, and one token


def warm(**flags: Any) -> Lab:
    """The blocks of PROMPT are cached, and no request runs."""
    lab = Lab(**{"k": 3, **flags})
    lab.add("first", PROMPT, max_tokens=1)
    lab.finish()
    return lab


def test_a_full_hit_that_lacks_one_token_is_padded_with_placeholders() -> None:
    lab = warm()
    a = lab.add("a", PROMPT)
    plan = lab.schedule()
    assert shares(plan) == {"a": 4}
    assert plan.admitted_with_computed == {"a": 8}
    assert plan.scheduled[0].drafts == (PLACEHOLDER_TOKEN_ID,) * 3
    assert plan.scheduled[0].emits
    lab.update(plan)
    assert (a.num_tokens, a.num_computed_tokens) == (10, 9)  # the runner rejects them all
    assert lab.output.num_draft_tokens == 0  # they are placeholders


def test_without_a_hit_and_without_running_requests_one_token_is_not_padded() -> None:
    lab = Lab(k=3)
    lab.add("a", 1)
    assert lab.step() == {"a": 1}


def test_a_single_token_is_padded_beside_a_running_request() -> None:
    lab = Lab(k=3, propose=lambda request, emitted: [])
    lab.add("running", 5)
    lab.step()
    lab.add("a", 1)
    assert lab.step() == {"running": 1, "a": 4}


def test_requests_admitted_in_the_same_step_do_not_count_as_running() -> None:
    lab = Lab(k=3)
    lab.add("first", 5)
    lab.add("a", 1)
    assert lab.step() == {"first": 5, "a": 1}


def test_no_request_is_padded_while_a_running_request_was_mid_prefill() -> None:
    lab = warm(max_num_batched_tokens=16)
    lab.add("long", 20)
    lab.step()
    lab.add("a", PROMPT)
    assert lab.step() == {"long": 4, "a": 1}


def test_mid_prefill_counts_even_if_only_one_token_is_left() -> None:
    lab = warm(max_num_batched_tokens=16)
    lab.add("long", 17)
    lab.step()
    lab.add("a", PROMPT)
    assert lab.step() == {"long": 1, "a": 1}


@pytest.mark.parametrize(("max_model_len", "expected"), [(13, 4), (12, 1)])
def test_padding_must_leave_room_in_max_model_len(max_model_len: int, expected: int) -> None:
    lab = warm(max_model_len=max_model_len)  # 8 + 1 + 3 + 1 = 13
    lab.add("a", PROMPT)
    assert lab.step() == {"a": expected}


def test_padding_beyond_the_budget_left_ends_admission() -> None:
    lab = warm(max_num_batched_tokens=12)
    lab.add("b", 9)
    lab.add("a", PROMPT)
    lab.add("behind", 1)
    plan = lab.schedule()
    assert shares(plan) == {"b": 9}
    assert plan.admission_stop is AdmissionStop.PADDING


def test_padding_is_exempt_from_the_threshold() -> None:
    lab = warm(long_prefill_token_threshold=2)
    lab.add("a", PROMPT)
    lab.add("b", PROMPT)
    assert lab.step() == {"a": 4, "b": 4}


def test_padding_comes_before_the_chunking_check() -> None:
    lab = warm(enable_chunked_prefill=False, max_model_len=16, max_num_batched_tokens=16)
    lab.add("b", 13)
    lab.add("a", PROMPT)
    plan = lab.schedule()
    assert plan.admission_stop is AdmissionStop.PADDING  # 4 > 3; the one token it lacks would fit


def test_padding_needs_its_own_blocks_too() -> None:
    # the whole sequence needs 3 blocks, with the placeholders 4: the ordinary check holds as well
    lab = warm(num_blocks=4, k=4, max_model_len=32)
    lab.add("a", PROMPT)
    plan = lab.schedule()
    assert plan.admission_stop is AdmissionStop.BLOCKS


def test_blocks_filled_by_accepted_drafts_are_hashed_at_update() -> None:
    lab = Lab(k=3, emit=all_accepted)
    a = lab.add("a", 5)
    lab.step()
    plan = lab.schedule()  # tokens 5 to 8: the second block is full, but of drafts
    assert a.num_hashed_blocks == 1
    lab.update(plan)
    assert a.num_computed_tokens == 9
    assert a.num_hashed_blocks == 2


def test_blocks_are_hashed_only_up_to_what_is_computed_after_rejection() -> None:
    lab = Lab(k=3, emit=lambda request, drafts: [*drafts[:1], 0])
    a = lab.add("a", 6)
    lab.step()
    lab.step()  # 7 tokens + 3 drafts fill the second block; one draft is accepted: 9 tokens, 8 computed
    assert (a.num_tokens, a.num_computed_tokens, a.num_hashed_blocks) == (9, 8, 2)
    lab = Lab(k=3)
    a = lab.add("a", 6)
    lab.step()
    lab.step()  # none accepted: 8 tokens, but 7 computed
    assert (a.num_tokens, a.num_computed_tokens, a.num_hashed_blocks) == (8, 7, 1)


def test_a_stop_lowers_computed_by_what_it_drops_before_hashing() -> None:
    lab = Lab(k=5, emit=all_accepted)
    a = lab.add("a", 6, max_tokens=2)
    lab.step()
    lab.step()  # six emitted, one kept: 8 tokens, 7 computed, so the second block stays without a hash
    assert (a.num_tokens, a.num_computed_tokens) == (8, 7)
    lab.add("b", [*a.token_ids, 5])
    assert lab.schedule().admitted_with_computed == {"b": 4}


def test_a_finished_request_leaves_its_hashed_outputs_behind() -> None:
    lab = Lab(k=3, emit=all_accepted)
    a = lab.add("a", 5, max_tokens=5)
    lab.finish()
    lab.add("b", [*a.token_ids[:9], 5])
    assert lab.schedule().admitted_with_computed == {"b": 8}


def test_a_preempted_request_loses_its_drafts_and_its_resumption_has_none() -> None:
    lab = Lab(num_blocks=4, k=2, enable_prefix_caching=False)
    lab.add("a", 7, max_tokens=3)
    lab.add("b", 3)
    lab.step()
    plan = lab.schedule()
    assert plan.preempted == ("b",)
    lab.update(plan)
    while "b" in lab.waiting:
        plan = lab.schedule()
        lab.update(plan)
    (item,) = (item for item in plan.scheduled if item.request.request_id == "b")
    assert item.drafts == ()
    assert item.num_tokens == 4


def test_drafts_of_the_last_step_are_replaced_not_added() -> None:
    lab = Lab(k=3)
    a = lab.add("a", 4)
    lab.step()
    lab.step()
    assert len(a.spec_token_ids) == 3


def test_a_config_whose_padding_exceeds_the_budget_blocks_the_head() -> None:
    lab = warm(k=3, max_num_batched_tokens=3)
    lab.add("a", PROMPT)
    lab.add("behind", 1)
    for _ in range(3):
        plan = lab.schedule()
        assert not plan.scheduled
        assert plan.admission_stop is AdmissionStop.PADDING
