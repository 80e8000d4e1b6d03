"""The queues: order, prepending, removal."""

from __future__ import annotations

from typing import Literal

import pytest

from engine.request import Request, SamplingParams
from engine.scheduling.waiting import WaitingQueue, make_queue


def request(name: str, priority: int = 0, arrival: float = 0.0) -> Request:
    return Request(name, [1], SamplingParams(), priority=priority, arrival_time=arrival)


def names(queue: WaitingQueue) -> list[str]:
    return [item.request_id for item in queue]


def test_fcfs_puts_back_before_everything() -> None:
    queue = make_queue("fcfs")
    for name in "ab":
        queue.add(request(name, priority=-5))
    queue.put_back(request("victim 2"))
    queue.put_back(request("victim 1"))
    queue.add(request("c"))
    assert names(queue) == ["victim 1", "victim 2", "a", "b", "c"]


def test_priority_orders_by_priority_arrival_and_id_also_what_is_put_back() -> None:
    queue = make_queue("priority")
    queue.add(request("late", 0, 2.0))
    queue.add(request("low", 5, 0.0))
    queue.add(request("b", 0, 1.0))
    queue.add(request("a", 0, 1.0))
    queue.put_back(request("victim", 3, 0.0))
    assert names(queue) == ["a", "b", "late", "victim", "low"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_peek_pop_and_remove(policy: Literal["fcfs", "priority"]) -> None:
    queue = make_queue(policy)
    items = [request(name, arrival=float(place)) for place, name in enumerate("abcd")]
    for item in items:
        queue.add(item)
    queue.remove(items[1])
    assert queue.peek() is items[0]
    assert len(queue) == 3
    assert [queue.pop() for _ in range(3)] == [items[0], items[2], items[3]]
    assert not queue
