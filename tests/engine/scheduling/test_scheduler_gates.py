"""Rule 6: requests that wait for more than their turn are set aside, and put back in order."""

from __future__ import annotations

import pytest
from scheduler_lab import Lab, shares

from engine.request import Gate, GateError, RequestStatus
from engine.step import AdmissionStop


class Door(Gate):
    """Opens, or breaks, when the test says so."""

    status = RequestStatus.WAITING_FOR_GRAMMAR

    def __init__(self) -> None:
        self.open = self.broken = False
        self.asked = 0

    def ready(self) -> bool:
        self.asked += 1
        if self.broken:
            raise GateError("broken")
        return self.open


def test_a_blocked_request_lets_others_pass_and_keeps_its_place() -> None:
    lab = Lab(max_num_seqs=2)
    doors = Door(), Door()
    first = lab.add("first", 4, gate=doors[0])
    lab.add("second", 4, gate=doors[1])
    lab.add("free", 4, max_tokens=2)
    lab.add("later", 4)
    assert first.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert lab.step() == {"free": 4, "later": 4}
    assert lab.waiting == ["first", "second"]
    for door in doors:
        door.open = True
    lab.step()  # free ends
    plan = lab.schedule()
    assert shares(plan) == {"later": 1, "first": 4}
    assert (first.status, first.gate) == (RequestStatus.RUNNING, None)
    assert plan.admission_stop is AdmissionStop.SEQUENCES


def test_the_reason_is_given_where_only_blocked_ones_are_left() -> None:
    lab = Lab()
    lab.add("blocked", 4, gate=Door())
    plan = lab.schedule()
    assert plan.admission_stop is AdmissionStop.GATE
    assert not plan.scheduled
    assert plan.num_waiting == 1


def test_priority_blocked_requests_go_back_to_their_place() -> None:
    lab = Lab(scheduling_policy="priority", max_num_seqs=1)
    lab.add("urgent", 4, priority=0, gate=Door())
    lab.add("low", 4, priority=9)
    lab.add("middle", 4, priority=5)
    assert lab.step() == {"middle": 4}
    assert lab.waiting == ["urgent", "low"]


def test_no_gate_is_asked_where_no_request_can_be_admitted() -> None:
    lab = Lab(max_num_seqs=1)
    lab.add("running", 4)
    lab.step()
    door = Door()
    lab.add("blocked", 4, gate=door)
    lab.step()
    assert door.asked == 0


def test_a_victim_stands_before_a_blocked_request() -> None:
    lab = Lab(num_blocks=3, enable_prefix_caching=False)
    lab.add("a", 4)
    lab.add("b", 4)
    lab.step()
    lab.add("blocked", 1, gate=Door())
    assert lab.schedule().preempted == ("b",)
    assert lab.waiting == ["b", "blocked"]


def test_a_gate_that_never_opens_ends_its_request_with_an_error() -> None:
    lab = Lab()
    door = Door()
    door.broken = True
    failed = lab.add("failed", 4, gate=door)
    lab.add("fine", 4)
    plan = lab.schedule()
    assert shares(plan) == {"fine": 4}
    assert plan.failed == (failed,)
    output = lab.update(plan)
    assert [(item.request_id, item.finish) for item in output.outputs] == [
        ("failed", RequestStatus.FINISHED_ERROR),
        ("fine", None),
    ]
    assert output.finished == (failed,)
    assert lab.waiting == []


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_abort_of_a_blocked_request(policy: str) -> None:
    lab = Lab(scheduling_policy=policy)
    blocked = lab.add("blocked", 4, gate=Door())
    lab.step()
    assert lab.scheduler.abort(["blocked"]) == [blocked]
    lab.scheduler.check()
    assert not lab.scheduler.has_unfinished


def test_blocked_requests_count_as_alive_for_the_threshold() -> None:
    lab = Lab(long_prefill_token_threshold=5)
    lab.add("blocked", 4, gate=Door())
    lab.add("a", 20)
    assert lab.step() == {"a": 5}
