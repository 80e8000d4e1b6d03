"""max_loras: a step has at most so many adapters, and requests of others are set aside, as in vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_lab import Lab, shares

from engine.step import AdmissionStop


def lab(max_loras: int = 1, **flags: Any) -> Lab:
    return Lab(enable_lora=True, max_loras=max_loras, **flags)


def test_a_request_without_a_slot_is_passed_and_keeps_its_place() -> None:
    slots = lab()
    slots.add("a1", 4, max_tokens=2, lora_name="a")
    slots.add("b1", 4, lora_name="b")
    slots.add("base", 4)
    slots.add("a2", 4, max_tokens=1, lora_name="a")
    slots.add("c1", 4, lora_name="c")
    plan = slots.schedule()
    assert shares(plan) == {"a1": 4, "base": 4, "a2": 4}
    assert (plan.num_waiting, plan.num_deferred) == (2, 2)
    assert plan.admission_stop is AdmissionStop.ADAPTERS
    assert slots.waiting == ["b1", "c1"]
    slots.update(plan)
    slots.step()  # a1 ends, and its slot is free
    assert slots.step() == {"base": 1, "b1": 4}
    assert slots.waiting == ["c1"]


def test_a_slot_is_an_adapter_and_not_a_request() -> None:
    slots = lab(max_loras=2)
    for name, adapter in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("c1", "c"), ("b2", "b")):
        slots.add(name, 4, lora_name=adapter)
    assert list(slots.step()) == ["a1", "a2", "b1", "a3", "b2"]
    assert slots.waiting == ["c1"]


def test_who_waits_for_room_keeps_all_behind_it_waiting_whatever_their_adapter() -> None:
    """Only the slots let others pass: budget and sequences do not. So those behind are not deferred."""
    slots = lab(max_num_seqs=1)
    slots.add("a1", 4, lora_name="a")
    slots.add("b1", 4, lora_name="b")
    plan = slots.schedule()
    assert plan.admission_stop is AdmissionStop.SEQUENCES
    assert (plan.num_waiting, plan.num_deferred) == (1, 0)


def test_what_is_set_aside_comes_first_once_it_has_a_slot() -> None:
    slots = lab(max_num_seqs=2)
    slots.add("a1", 4, max_tokens=3, lora_name="a")
    slots.add("b1", 4, lora_name="b")
    slots.add("a2", 4, max_tokens=2, lora_name="a")
    assert list(slots.step()) == ["a1", "a2"]
    slots.add("a3", 4, lora_name="a")
    assert list(slots.step()) == ["a1", "a2"]
    assert list(slots.step()) == ["a1", "a3"]  # a2 has ended; a1 holds the slot
    slots.scheduler.abort(["a3"])
    assert list(slots.step()) == ["b1"]


def test_only_scheduled_requests_hold_slots() -> None:
    """One that got nothing of the budget holds none; but then there is none to give either."""
    slots = lab(max_loras=2, max_num_batched_tokens=8)
    slots.add("a1", 20, lora_name="a")
    slots.add("b1", 4, lora_name="b")
    plan = slots.schedule()
    assert shares(plan) == {"a1": 8}
    assert plan.admission_stop is AdmissionStop.BUDGET
    assert plan.num_deferred == 0


def test_a_preempted_request_gives_its_slot_up() -> None:
    slots = lab(num_blocks=3, enable_prefix_caching=False)
    slots.add("a1", 4, max_tokens=4, lora_name="a")
    slots.add("a2", 4, max_tokens=1, lora_name="a")
    slots.step()
    slots.add("b1", 4, max_tokens=1, lora_name="b")
    order = [list(plan.admitted_with_computed) for plan in slots.finish()]
    assert [name for step in order for name in step] == ["b1"]


def test_priority_is_asked_first_and_slots_let_others_pass() -> None:
    slots = lab(scheduling_policy="priority")
    slots.add("a1", 4, lora_name="a", priority=1)
    slots.add("b1", 4, lora_name="b", priority=0)
    slots.add("b2", 4, lora_name="b", priority=2)
    assert list(slots.step()) == ["b1", "b2"]
    assert slots.waiting == ["a1"]


@pytest.mark.parametrize("salt", ["", "s"])
def test_prefixes_are_shared_within_one_adapter(salt: str) -> None:
    slots = lab(max_loras=2)
    prompt = list(range(100, 112))
    for name, adapter in (("first", "a"), ("other", "b"), ("base", ""), ("again", "a")):
        slots.add(name, prompt, max_tokens=1, lora_name=adapter, cache_salt=salt)
        plan = slots.schedule()
        slots.update(plan)
        assert plan.admitted_with_computed == {name: 8 if name == "again" else 0}


def test_an_adapter_and_a_salt_are_not_taken_for_each_other() -> None:
    slots = lab()
    prompt = list(range(100, 112))
    for adapter, salt in (("a", "b"), ("ab", ""), ("", "ab"), ("", "1:ab")):
        slots.add(f"{adapter}-{salt}", prompt, max_tokens=1, lora_name=adapter, cache_salt=salt)
        plan = slots.schedule()
        slots.update(plan)
        assert list(plan.admitted_with_computed.values()) == [0]
