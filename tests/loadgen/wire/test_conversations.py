"""Later turns on the wire: after the answer before and the pause, in the same slot, or skipped."""

from collections.abc import Iterator

import pytest
from mock_sse_server import MockServer, running

from loadgen.measure.record import Failure, Records
from loadgen.plan.arrivals import Arrival, ClosedLoop, Constant
from loadgen.plan.datasets import Dataset, Turn
from loadgen.plan.workload import Message, Schedule
from loadgen.wire.client import ClientOptions, run_schedule

PAUSE = 0.02


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[MockServer, str]]:
    mock = MockServer()
    with running(mock) as port:
        yield mock, f"http://127.0.0.1:{port}"


def plan(arrival: Arrival, count: int = 6, turns: int = 3, **options: float) -> Schedule:
    talks = tuple(tuple(Turn(None, f"{c}/{t}", 3) for t in range(turns)) for c in range(count))
    return Dataset("talks", talks).schedule(seed=1, arrival=arrival, think=PAUSE, **options)  # type: ignore[arg-type]


def check_order(run: Records, schedule: Schedule) -> None:
    records = {record.index: record for record in run.requests}
    for request in schedule.requests:
        if request.follows is not None:
            turn, before = records[request.index], records[request.follows]
            assert turn.intended == before.end + round(request.think * 1e9)
            assert turn.sent is not None
            assert turn.sent >= turn.intended


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("arrival", [Constant(100.0), ClosedLoop(2)], ids=["open", "closed"])
def test_a_turn_is_sent_when_its_pause_after_the_answer_is_over(
    server: tuple[MockServer, str], arrival: Arrival, workers: int
) -> None:
    schedule = plan(arrival)
    run = run_schedule(server[1], schedule, model="mock", options=ClientOptions(workers=workers, timeout=30))
    assert sorted(record.index for record in run.requests) == list(range(18))
    assert all(record.ok for record in run.requests)
    check_order(run, schedule)


def test_a_closed_loops_slot_stays_with_its_conversation(server: tuple[MockServer, str]) -> None:
    schedule = plan(ClosedLoop(1), count=3)
    run = run_schedule(server[1], schedule, model="mock", options=ClientOptions(workers=0, timeout=30))
    sent = sorted(run.requests, key=lambda record: record.sent or 0)
    assert [record.index for record in sent] == list(range(9))


def test_the_rest_of_a_conversation_whose_turn_failed_is_counted_as_failed(
    server: tuple[MockServer, str],
) -> None:
    schedule = plan(Constant(100.0), count=2)
    run = run_schedule(
        f"{server[1]}/503", schedule, model="mock", options=ClientOptions(workers=0, timeout=30)
    )
    kinds = [record.failure for record in sorted(run.requests, key=lambda record: record.index)]
    assert kinds == [Failure.UNAVAILABLE, Failure.SKIPPED, Failure.SKIPPED] * 2
    assert all(record.sent is None for record in run.requests if record.failure is Failure.SKIPPED)


def test_turns_that_are_due_after_the_duration_are_not_sent(server: tuple[MockServer, str]) -> None:
    schedule = plan(Constant(1000.0), count=4, duration=0.004, turns=2)
    run = run_schedule(server[1], schedule, model="mock", options=ClientOptions(workers=0, timeout=30))
    assert all(record.ok for record in run.requests)
    late = [r for r in run.requests if schedule.requests[r.index].follows is not None and r.intended >= 4e6]
    assert late == []


def test_chats_go_to_the_chat_path_as_messages(server: tuple[MockServer, str]) -> None:
    mock, url = server
    talk = (Turn((Message("system", "brief"), Message("user", "hello")), None, 3),)
    schedule = Dataset("chat", (talk,)).schedule(seed=1, arrival=ClosedLoop(1))
    before = len(mock.seen.bodies)
    run_schedule(url, schedule, model="mock", options=ClientOptions(workers=0, timeout=30))
    body = mock.seen.bodies[before]
    assert body["messages"] == [{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}]
    assert "prompt" not in body
