"""The simulated runner and the driver, in virtual time: every figure is exact."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import RequestStatus, SamplingParams
from engine.sim.simulated_runner import (
    EOS_TOKEN_ID,
    ModelSize,
    RequestTimeline,
    SimulatedRunner,
    SimulationError,
    TimedRequest,
    VirtualClock,
    WallClock,
    own_prompt,
    run_workload,
)
from engine.sim.step_times import StepTimes
from engine.speculative_config import SpeculativeConfig
from engine.step import StepOutput, StepPlan

SIZE = ModelSize(weights_bytes=0, kv_bytes_per_token=1, max_model_len=256)
SECOND = StepTimes(launch=1.0)
"""A step takes a second, whatever is in it."""


def simulate(
    requests: list[TimedRequest],
    times: StepTimes = SECOND,
    runner: dict[str, Any] | None = None,
    **flags: Any,
) -> tuple[list[RequestTimeline], VirtualClock, list[StepPlan]]:
    clock = VirtualClock()
    config = EngineConfig(
        **{"num_gpu_blocks_override": 200, "max_num_batched_tokens": 256, "max_num_seqs": 8, **flags}
    )
    core = EngineCore(config, SimulatedRunner(SIZE, times, clock, **(runner or {})), clock)
    plans: list[StepPlan] = []
    timelines = run_workload(core, clock, requests, lambda plan, output, seconds: plans.append(plan))
    assert core.scheduler.kv_usage == 0.0
    return timelines, clock, plans


def timed(name: str, arrival: float, output: int, prompt: int = 10, place: int = 0) -> TimedRequest:
    return TimedRequest(name, arrival, own_prompt(place, prompt), SamplingParams(max_tokens=output))


def test_stamps_and_what_is_computed_from_them() -> None:
    (one,), clock, _ = simulate([timed("a", 2.5, 4)])
    assert one.stamps == [3.5, 4.5, 5.5, 6.5]
    assert (one.ttft, one.e2e, one.finished) == (1.0, 4.0, 6.5)
    assert one.itl == [1.0, 1.0, 1.0]
    assert clock.now == 6.5


def test_idle_time_is_jumped_over_and_arrivals_wait_for_the_step_that_runs() -> None:
    requests = [timed("late", 100.25, 1, place=1), timed("a", 0.0, 2), timed("b", 0.5, 2, place=2)]
    timelines, clock, _ = simulate(requests)
    assert [timeline.request.request_id for timeline in timelines] == ["late", "a", "b"]
    assert [timeline.stamps for timeline in timelines] == [[101.25], [1.0, 2.0], [2.0, 3.0]]
    assert clock.now == 101.25


def test_every_coefficient_takes_its_time() -> None:
    times = StepTimes(host=0.5, host_per_sequence=0.25, launch=1.0, weights=2.0, per_token=0.5, per_row=4.0)
    (one,), _, _ = simulate([timed("a", 0.0, 2)], times)
    first = 0.5 + 0.25 + 1.0 + max(2.0, 0.5 * 10) + 4.0
    second = 0.5 + 0.25 + 1.0 + max(2.0, 0.5 * 1) + 4.0
    assert one.stamps == [first, first + second]


def test_a_seed_draws_what_steps_take_from_the_factors_of_their_length() -> None:
    times = StepTimes(launch=1.0, spread=((2.0, (0.5, 1.0, 2.0)),))
    first, again, other = (simulate([timed("a", 0.0, 40)], times, {"seed": seed})[0][0] for seed in (1, 1, 2))
    assert {first.stamps[0], *first.itl} == {0.5, 1.0, 2.0}
    assert first.stamps == again.stamps != other.stamps


def test_output_lengths_end_a_request_before_max_tokens() -> None:
    timelines, _, _ = simulate(
        [timed("a", 0.0, 9), timed("b", 0.0, 3, place=1)], runner={"output_lengths": {"a": 4, "b": 5}}
    )
    a, b = (timeline.request for timeline in timelines)
    assert (a.num_output_tokens, a.status) == (4, RequestStatus.FINISHED_STOPPED)
    assert a.output_token_ids[-1] == EOS_TOKEN_ID
    assert EOS_TOKEN_ID not in a.output_token_ids[:-1]
    assert (b.num_output_tokens, b.status) == (3, RequestStatus.FINISHED_LENGTH)


def test_an_end_keeps_its_place_after_a_preemption() -> None:
    requests = [timed("a", 0.0, 90, prompt=60), timed("b", 0.0, 90, prompt=60, place=1)]
    lengths = {"a": 70, "b": 75}
    timelines, _, _ = simulate(
        requests,
        runner={"output_lengths": lengths},
        num_gpu_blocks_override=14,
        max_model_len=200,
        enable_prefix_caching=False,
    )
    assert [timeline.request.num_preemptions for timeline in timelines] == [0, 1]
    assert [timeline.request.num_output_tokens for timeline in timelines] == [70, 75]


@pytest.mark.parametrize(("acceptance", "steps"), [(0.0, 13), (1.0, 4)])
def test_drafts_are_proposed_and_accepted_by_rate(acceptance: float, steps: int) -> None:
    """13 tokens: one of the prefill, then one, or one and three drafts, a step."""
    speculation = SpeculativeConfig(num_speculative_tokens=3)
    (one,), _, plans = simulate(
        [timed("a", 0.0, 13)],
        runner={"num_speculative_tokens": 3, "acceptance": acceptance},
        speculative_config=speculation,
    )
    assert len(plans) == steps
    assert one.request.num_output_tokens == 13
    assert one.itl == [steps and (1.0 if acceptance == 0.0 else 0.25)] * 12


def test_acceptance_is_a_rate_and_a_seed_repeats_it() -> None:
    def steps(seed: int) -> int:
        _, _, plans = simulate(
            [timed("a", 0.0, 200)],
            runner={"num_speculative_tokens": 1, "acceptance": 0.5, "seed": seed},
            speculative_config=SpeculativeConfig(num_speculative_tokens=1),
        )
        return len(plans)

    assert steps(1) == steps(1)
    assert {steps(seed) for seed in range(4)} != {steps(1)}
    assert 120 < sum(steps(seed) for seed in range(8)) / 8 < 146  # 200 / 1.5


def test_async_scheduling_hides_what_overlaps_of_the_hosts_time() -> None:
    """Planning, half of the host's 0.4 s, passes while the device computes for a second. After the last step
    nothing is left to do."""
    times = StepTimes(launch=1.0, host=0.4, overlap=0.5)
    (plain,), _, _ = simulate([timed("a", 0.0, 6)], times)
    (ahead,), _, _ = simulate([timed("a", 0.0, 6)], times, async_scheduling=True)
    assert plain.itl == pytest.approx([1.4] * 5)
    assert ahead.itl == pytest.approx([1.2, 1.2, 1.2, 1.2, 1.0])
    assert ahead.request.num_output_tokens == 6


def test_async_scheduling_hides_no_more_than_the_device_takes() -> None:
    times = StepTimes(launch=1.0, host=3.0, overlap=1.0)
    (ahead,), _, _ = simulate([timed("a", 0.0, 6)], times, async_scheduling=True)
    assert ahead.itl == pytest.approx([3.0, 3.0, 3.0, 3.0, 1.0])


def test_async_scheduling_changes_no_request() -> None:
    requests = [timed(f"r{i}", 0.7 * i, 5 + i, prompt=20 + 7 * i, place=i) for i in range(12)]
    lengths = {"r3": 2, "r5": 40}
    tight = {"num_gpu_blocks_override": 20, "max_model_len": 200}
    for flags in (dict[str, Any](), tight):
        plain, _, _ = simulate(requests, runner={"output_lengths": lengths}, **flags)
        ahead, _, _ = simulate(requests, runner={"output_lengths": lengths}, async_scheduling=True, **flags)
        assert [t.request.token_ids for t in plain] == [t.request.token_ids for t in ahead]


@pytest.mark.parametrize("scheduler", ["unified", "two-track", "static"])
def test_time_never_runs_backwards_and_all_requests_get_all_tokens(scheduler: str) -> None:
    requests = [timed(f"r{i}", 0.3 * i, 1 + i % 7, prompt=10 + 5 * (i % 9), place=i) for i in range(40)]
    times = StepTimes(host=0.01, launch=0.1, per_token=0.01, per_pair=1e-4)
    timelines, clock, _ = simulate(requests, times, scheduler=scheduler)
    for request, timeline in zip(requests, timelines, strict=True):
        assert timeline.request.num_output_tokens == request.sampling.max_tokens
        assert timeline.ttft > 0.0
        assert all(before < after for before, after in pairwise(timeline.stamps))
    assert clock.now == max(timeline.finished for timeline in timelines)


def test_swapping_takes_the_time_of_its_copies() -> None:
    requests = [timed("a", 0.0, 40, prompt=60), timed("b", 0.0, 40, prompt=60, place=1)]
    flags: dict[str, Any] = {
        "scheduler": "two-track",
        "preemption_mode": "swap",
        "num_gpu_blocks_override": 11,
        "max_model_len": 128,
        "enable_prefix_caching": False,
    }
    ends = []
    for seconds in (0.0, 2.0):
        timelines, clock, plans = simulate(requests, StepTimes(launch=1.0, per_moved_block=seconds), **flags)
        moved = sum(len(plan.swap_out) + len(plan.swap_in) for plan in plans)
        assert sum(timeline.request.num_preemptions for timeline in timelines) == 1
        ends.append(clock.now)
    assert moved > 0
    assert ends[1] - ends[0] == 2.0 * moved


def test_a_workload_that_cannot_end_is_told() -> None:
    """A gate that never opens, as a stand-in for any bug that leaves all requests waiting."""

    class Stuck(SimulatedRunner):
        def execute(self, plan: StepPlan) -> Any:
            raise AssertionError("nothing is computed")

    clock = VirtualClock()
    core = EngineCore(
        EngineConfig(num_gpu_blocks_override=40, max_num_batched_tokens=256),
        Stuck(SIZE, SECOND, clock),
        clock,
    )
    core.step = lambda: (StepPlan(0, (), token_budget=0), StepOutput(()))  # type: ignore[method-assign]
    with pytest.raises(SimulationError, match="nothing was scheduled in 10 steps"):
        run_workload(core, clock, [timed("a", 0.0, 1)])


def test_what_the_scheduler_refuses_is_raised() -> None:
    with pytest.raises(ValueError, match="leaves no room for output"):
        simulate([timed("a", 0.0, 1, prompt=256)])


def test_the_wall_clock_waits_only_for_what_is_to_come() -> None:
    clock = WallClock()
    clock.advance_to(-1.0)
    clock.advance_to(0.01)
    assert clock() >= 0.01
