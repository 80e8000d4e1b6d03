"""The load policy alone, over a transport that answers by a script. Time is in whole units."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.plan.load_policy import GivenUp, LoadPlan, LoadPolicy

PLAN: LoadPlan[int] = LoadPlan(
    firsts=(), turns={}, closed=False, concurrency=None, duration=None, timeout=1000, drain=1010
)


@dataclass
class Scripted:
    """Answers request i after ``answers[i]`` = (units of time, whether it fails); not at all without one."""

    plan: LoadPlan[int]
    answers: dict[int, tuple[int, bool]]
    interrupt_at: int | None = None
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By request: when it was intended, and when sent."""
    ended: list[tuple[int, int, GivenUp | None]] = field(default_factory=list)
    """(request, when, why)."""
    in_flight: set[int] = field(default_factory=set)
    most: int = 0

    def run(self) -> LoadPolicy[int]:
        policy = LoadPolicy(self.plan, 0, self)
        policy.begin()
        while not policy.over:
            due = policy.timers.next
            assert due is not None, "what is in flight will time out"
            at, index = min((self.answered(i), i) for i in (*self.in_flight, -1))
            now = due if due <= at else int(at)
            if self.interrupt_at is not None and now >= self.interrupt_at:
                policy.interrupt(self.interrupt_at)
            elif due == now:
                policy.timers.ring(now)
            else:
                self._end(index, now, None)
                policy.ended(index, now, failed=self.answers[index][1])
        sent = len(self.sent)
        while (due := policy.timers.next) is not None:
            policy.timers.ring(due)
        assert len(self.sent) == sent, "sent after the end"
        return policy

    def answered(self, index: int) -> float:
        """When its answer comes; -1 is no request."""
        return self.sent[index][1] + self.answers[index][0] if index in self.answers else math.inf

    def send(self, index: int, intended: int, now: int) -> None:
        assert index not in self.sent
        self.sent[index] = intended, now
        self.in_flight.add(index)
        self.most = max(self.most, len(self.in_flight))

    def give_up(self, index: int, why: GivenUp, detail: str, now: int) -> None:
        self._end(index, now, why)

    def never_sent(self, index: int, intended: int, why: GivenUp, detail: str, now: int) -> None:
        assert index not in self.sent
        self.ended.append((index, now, why))

    def _end(self, index: int, now: int, why: GivenUp | None) -> None:
        self.in_flight.remove(index)
        self.ended.append((index, now, why))

    def reasons(self) -> dict[int, GivenUp | None]:
        return {index: why for index, _, why in self.ended}


@st.composite
def runs(draw: st.DrawFn) -> Scripted:
    count = draw(st.integers(1, 12))
    times = sorted(draw(st.lists(st.integers(0, 40), min_size=count, max_size=count)))
    follows = [draw(st.booleans()) and index > 0 for index in range(count)]
    closed = draw(st.booleans())
    timeout = draw(st.integers(1, 30))
    plan = LoadPlan(
        firsts=[(index, times[index]) for index in range(count) if not follows[index]],
        turns={index - 1: (index, draw(st.integers(0, 9))) for index in range(count) if follows[index]},
        closed=closed,
        concurrency=draw(st.integers(1, 4) if closed else st.none() | st.integers(1, 4)),
        duration=draw(st.none() | st.integers(1, 60)),
        timeout=timeout,
        drain=draw(st.integers(0, 40)),
    )
    answers = draw(st.dictionaries(st.integers(0, count - 1), st.tuples(st.integers(0, 35), st.booleans())))
    return Scripted(plan, answers, draw(st.none() | st.integers(0, 80)))


@given(runs())
def test_each_request_ends_once_within_the_cap_after_the_one_it_follows(run: Scripted) -> None:
    policy, plan = run.run(), run.plan
    assert plan.concurrency is None or run.most <= plan.concurrency
    times = Counter(index for index, _, _ in run.ended)
    assert set(times.values()) <= {1}
    assert set(run.sent) <= set(times)
    reasons, ends = run.reasons(), {index: at for index, at, _ in run.ended}
    for before, (turn, think) in plan.turns.items():
        if turn in run.sent:
            assert reasons[before] is None
            assert not run.answers[before][1]
            assert run.sent[turn][0] == ends[before] + think
    assert all(intended <= now for intended, now in run.sent.values())
    cut = {GivenUp.UNFINISHED, GivenUp.CANCELLED} & set(reasons.values())
    if plan.duration is None and not cut and not policy.interrupted:
        assert set(times) == {index for index, _ in plan.firsts} | {turn for turn, _ in plan.turns.values()}
    progress = policy.progress(1.0)
    failed = [index for index, why in reasons.items() if why is not None or run.answers[index][1]]
    assert (progress.in_flight, progress.finished, progress.failed) == (0, len(run.ended), len(failed))


@given(runs())
def test_an_open_loop_without_a_cap_sends_what_is_due_when_it_is_due(run: Scripted) -> None:
    run = replace(run, plan=replace(run.plan, closed=False, concurrency=None, drain=200), interrupt_at=None)
    run.run()
    assert all(intended == now for intended, now in run.sent.values())
    assert {index: run.sent[index][0] for index, _ in run.plan.firsts} == dict(run.plan.firsts)


def test_an_interrupted_closed_loop_is_not_used_up() -> None:
    plan = replace(PLAN, firsts=[(0, 0), (1, 0)], closed=True, concurrency=2, duration=500)
    run = Scripted(plan, {}, interrupt_at=50)
    policy = run.run()
    assert policy.interrupted
    assert not policy.exhausted
    assert run.reasons() == {0: GivenUp.CANCELLED, 1: GivenUp.CANCELLED}


@pytest.mark.parametrize("closed", [False, True])
def test_the_drain_begins_when_the_last_request_is_due(closed: bool) -> None:
    plan = replace(PLAN, firsts=[(0, 0), (1, 0)], closed=closed, concurrency=1, drain=30)
    run = Scripted(plan, {0: (20, False)})
    run.run()
    assert run.ended == [(0, 20, None), (1, 50 if closed else 30, GivenUp.UNFINISHED)]


def test_a_turn_that_is_due_meanwhile_puts_the_drain_off() -> None:
    plan = replace(PLAN, firsts=[(0, 0)], turns={0: (1, 5)}, drain=30)
    run = Scripted(plan, {0: (20, False), 1: (25, False)})
    run.run()
    assert run.ended == [(0, 20, None), (1, 50, None)]


def test_a_turn_that_is_due_after_the_drain_begins_it_again() -> None:
    plan = replace(PLAN, firsts=[(0, 0)], turns={0: (1, 40)}, drain=30)
    run = Scripted(plan, {0: (20, False)})
    run.run()
    assert run.ended == [(0, 20, None), (1, 90, GivenUp.UNFINISHED)]


def test_an_interrupt_ends_pauses() -> None:
    run = Scripted(replace(PLAN, firsts=[(0, 0)], turns={0: (1, 40)}), {0: (20, False)}, interrupt_at=30)
    run.run()
    assert run.ended == [(0, 20, None)]


def test_an_interrupt_before_the_start_sends_nothing() -> None:
    for closed in (False, True):
        run = Scripted(replace(PLAN, firsts=[(0, 0)], closed=closed, concurrency=1), {})
        policy = LoadPolicy(run.plan, 0, run)
        policy.interrupt(-5)
        policy.begin()
        assert policy.over
        assert not run.sent
