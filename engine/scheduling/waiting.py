"""The queues of requests that wait to be admitted."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from engine.request import Request


class WaitingQueue(ABC):
    """The order of admission. A request stands in the queue at most once."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new arrival."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """A preempted request: it goes to the front, unless the policy has another order."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request, which stays. The queue must not be empty."""

    @abstractmethod
    def pop(self) -> Request:
        """The next request, taken out. The queue must not be empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take out a request that stands in the queue, at any position."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In the order of admission."""


class FCFSQueue(WaitingQueue):
    """First come, first served. Ordered by id in a dictionary, so that an abort is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue(WaitingQueue):
    """Lowest (priority, arrival time, id) first, preempted requests included."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, Request]] = []

    def add(self, request: Request) -> None:
        entry = (request.priority, request.arrival_time, request.request_id, request)
        heapq.heappush(self._heap, entry)

    put_back = add

    def peek(self) -> Request:
        return self._heap[0][-1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[-1] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))


def make_queue(policy: Literal["fcfs", "priority"]) -> WaitingQueue:
    """The queue of a ``--scheduling-policy``."""
    return FCFSQueue() if policy == "fcfs" else PriorityQueue()
