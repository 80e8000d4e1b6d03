"""A fault of vLLM 0.33 that this engine does not have: hits on blocks that were never computed."""

from __future__ import annotations

import pytest
from scheduler_lab import Lab, shares


def preempt_a_scheduled_prefill() -> Lab:
    """``low`` is mid-prefill and has its share of the step, two full blocks, when ``high`` needs a block."""
    lab = Lab(
        num_blocks=9,
        max_num_batched_tokens=12,
        max_model_len=36,
        scheduling_policy="priority",
        long_prefill_token_threshold=8,
    )
    lab.add("low", 30, max_tokens=3, priority=5)
    lab.step()
    lab.add("high", 4, max_tokens=3, priority=0)
    lab.step()
    return lab


def test_a_victims_blocks_that_this_step_was_to_compute_are_not_hit() -> None:
    lab = preempt_a_scheduled_prefill()
    plan = lab.schedule()
    assert (shares(plan), plan.preempted) == ({"high": 1}, ("low",))
    lab.update(plan)
    plans = lab.finish()
    resumed = [plan.admitted_with_computed for plan in plans if "low" in plan.admitted_with_computed]
    assert resumed == [{"low": 20}]  # what it had computed before; the lab checks what is read


def test_as_in_vllm_they_are_hit_where_only_decisions_are_shown() -> None:
    lab = preempt_a_scheduled_prefill()
    lab.scheduler.unhashes_preempted = False
    lab.step()
    lab.step()
    plan = lab.schedule()
    assert plan.admitted_with_computed == {"low": 24}
    with pytest.raises(AssertionError, match="low reads a wrong KV at 20"):
        lab.execute(plan)
