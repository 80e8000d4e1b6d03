"""Requests in virtual time, against servers that answer one token a step of fixed length."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from step_server import STEP, StepServer

from loadgen.measure.record import Failure, Records
from loadgen.plan.arrivals import ClosedLoop, Constant
from loadgen.plan.workload import Length, Message, PlannedRequest, RequestClass, Schedule, Workload
from loadgen.sim.routing import (
    LeastLoadedRoute,
    LengthPooledRoute,
    Policy,
    PrefixAwareRoute,
    make_route,
    tokens_of,
)
from loadgen.sim.virtual_client import VirtualClient, records_of


def load(count: int, output: int = 5, **options: Any) -> Schedule:
    workload = Workload("w", (RequestClass("c", 1, Length(20), Length(output)),))
    arrival = options.pop("arrival", Constant(10.0))
    return workload.schedule(seed=0, arrival=arrival, num_requests=count, warmup=0, **options)


def run(
    schedule: Schedule, replicas: int = 1, policy: Policy = "least-loaded", **options: Any
) -> tuple[Records, list[StepServer]]:
    servers = [StepServer() for _ in range(replicas)]
    client = VirtualClient(schedule, servers, make_route(policy, replicas, schedule), **options)
    client.run()
    return records_of(client, schedule, environment={}), servers


def ms(records: Records, name: str) -> list[float]:
    return [getattr(r, name) / 1e6 for r in records.requests]


def test_what_comes_late_is_stamped_then_and_answered_then() -> None:
    server, schedule = StepServer(delay=0.01, late=0.03), load(2, output=2, arrival=ClosedLoop(1))
    client = VirtualClient(schedule, [server], make_route("random", 1, schedule))
    client.run()
    records = records_of(client, schedule, environment={})
    stamps = [[at / 1e6 for at in request.chunk_at] for request in records.requests]
    assert stamps == [pytest.approx([140, 240]), pytest.approx([380, 480])]
    assert ms(records, "sent") == pytest.approx([0, 240])


def test_an_open_loop_sends_on_time_and_stamps_every_step() -> None:
    records, _ = run(load(3))
    assert ms(records, "intended") == pytest.approx([0, 100, 200])
    assert ms(records, "sent") == ms(records, "intended")
    first = records.requests[0]
    assert [at / 1e6 for at in first.chunk_at] == pytest.approx([100, 200, 300, 400, 500])
    assert first.chunk_tokens == (1.0,) * 5
    assert (first.end, first.finish_reason, first.status) == (first.chunk_at[-1], "length", 200)
    assert (first.completion_tokens, first.prompt_tokens, first.server_prefill) == (5, 20, STEP)


def test_who_comes_in_the_middle_of_a_step_waits_for_the_next() -> None:
    schedule = load(2)
    late = replace(schedule.requests[1], intended=0.05)
    records, _ = run(replace(schedule, requests=(schedule.requests[0], late)))
    assert records.requests[1].chunk_at[0] / 1e6 == pytest.approx(200)


def test_a_closed_loop_goes_on_when_its_last_answer_has_ended() -> None:
    records, servers = run(load(4, arrival=ClosedLoop(2)))
    assert ms(records, "intended") == pytest.approx([0, 0, 500, 500])
    assert servers[0].now == pytest.approx(1.0)


def test_a_closed_loop_sends_nothing_after_its_duration() -> None:
    schedule = replace(load(50, arrival=ClosedLoop(1)), duration=1.2)
    records, _ = run(schedule)
    assert ms(records, "intended") == pytest.approx([0, 500, 1000])
    assert records.requests[-1].ok


def test_a_closed_loop_that_runs_out_of_requests_says_so() -> None:
    records, _ = run(replace(load(2, arrival=ClosedLoop(1)), duration=60.0))
    assert any("used up" in reason for reason in records.reasons)


def test_a_cap_holds_requests_back_which_stay_intended_when_they_were() -> None:
    records, _ = run(load(3, max_concurrency=1))
    assert ms(records, "intended") == pytest.approx([0, 100, 200])
    assert ms(records, "sent") == pytest.approx([0, 500, 1000])


def test_a_refused_request_fails_alone() -> None:
    schedule = load(2)
    long = replace(schedule.requests[0], prompt_token_ids=(1,) * 2000)
    records, _ = run(replace(schedule, requests=(long, schedule.requests[1])))
    refused, served = records.requests
    assert (refused.failure, refused.status) == (Failure.HTTP_ERROR, 400)
    assert "2000 tokens are too many" in refused.detail
    assert served.ok


def test_refusals_do_not_stop_a_closed_loop() -> None:
    schedule = load(3000, arrival=ClosedLoop(1))
    long = tuple(replace(r, prompt_token_ids=(1,) * 2000) for r in schedule.requests)
    records, _ = run(replace(schedule, requests=long))
    assert len(records.requests) == 3000


def test_a_timeout_is_a_stall_or_no_answer() -> None:
    records, servers = run(load(1, output=50), timeout=1.05)
    assert records.requests[0].failure is Failure.STALLED
    assert len(records.requests[0].chunk_at) == 10
    assert not servers[0].left
    records, _ = run(load(1), timeout=0.05)
    assert records.requests[0].failure is Failure.NO_ANSWER


def test_the_drain_ends_a_run() -> None:
    records, _ = run(load(2, output=500), drain=2.0)
    assert [r.failure for r in records.requests] == [Failure.UNFINISHED] * 2
    assert ms(records, "end") == pytest.approx([2100, 2100])


def test_an_interrupted_run_keeps_what_there_is() -> None:
    stop = threading.Event()
    stop.set()
    records, _ = run(load(3), stop=stop)
    assert records.partial
    assert not any(r.ok for r in records.requests)


def test_turns_follow_their_answers_after_a_pause() -> None:
    schedule = load(2)
    turn = replace(schedule.requests[1], follows=0, think=0.25)
    records, _ = run(replace(schedule, requests=(schedule.requests[0], turn)))
    assert ms(records, "intended") == pytest.approx([0, 750])


def test_turns_of_a_failed_conversation_are_skipped() -> None:
    schedule = load(2)
    long = replace(schedule.requests[0], prompt_token_ids=(1,) * 2000)
    records, _ = run(replace(schedule, requests=(long, replace(schedule.requests[1], follows=0))))
    assert [r.failure for r in records.requests] == [Failure.HTTP_ERROR, Failure.SKIPPED]


def test_replicas_share_one_clock() -> None:
    records, servers = run(load(40, output=20), replicas=3)
    assert [len(server.served) for server in servers] == [14, 13, 13]
    assert all(r.ok for r in records.requests)
    assert max(r.end / 1e9 for r in records.requests) == pytest.approx(max(s.now for s in servers))


def planned(index: int, prompt: Sequence[int], output: int = 10) -> PlannedRequest:
    return PlannedRequest(index, "c", 0.0, tuple(prompt), None, output)


def test_random_routing_is_the_same_each_time() -> None:
    first, second = (run(load(30), 4, "random")[1] for _ in range(2))
    assert [s.served for s in first] == [s.served for s in second]


def test_the_least_loaded_replica_is_the_one_with_the_fewest_in_flight() -> None:
    route = LeastLoadedRoute(2)
    chosen = [route.choose(planned(i, [i]), [i]) for i in range(3)]
    assert chosen == [0, 1, 0]
    route.ended(planned(1, [1]), 1)
    assert route.choose(planned(3, [3]), [3]) == 1


def test_a_known_prefix_is_sent_where_it_is_known() -> None:
    route = PrefixAwareRoute(3)
    shared, other = list(range(640)), list(range(5000, 5640))
    assert route.choose(planned(0, shared), shared) == 0
    assert route.choose(planned(1, other), other) == 1
    again = [*shared, *range(9000, 9100)]
    assert route.choose(planned(2, again), again) == 0
    assert route.choose(planned(3, list(range(20_000, 20_640))), list(range(20_000, 20_640))) == 2


def test_a_known_prefix_does_not_outweigh_a_crowd() -> None:
    route = PrefixAwareRoute(2)
    shared = list(range(640))
    chosen = [route.choose(planned(i, shared), shared) for i in range(20)]
    assert chosen[:9] == [0] * 9
    assert 1 in chosen


def test_pools_part_at_the_widest_gap_between_lengths() -> None:
    schedule = load(12)
    requests = tuple(
        replace(r, prompt_token_ids=(1,) * (900 if i % 3 == 0 else 50 + i))
        for i, r in enumerate(schedule.requests)
    )
    route = LengthPooledRoute(4, replace(schedule, requests=requests))
    assert route.threshold == 61
    assert (list(route.pools[0]), list(route.pools[1])) == ([0], [1, 2, 3])
    assert route.choose(planned(0, [1] * 50), [1] * 50) == 0
    assert route.choose(planned(1, [1] * 900), [1] * 900) == 1


def test_text_has_a_token_for_every_four_characters() -> None:
    chat = PlannedRequest(0, "c", 0.0, None, None, 5, messages=(Message("user", "Hello, how are you?"),))
    longer = replace(chat, messages=(*(chat.messages or ()), Message("user", "And now?")))
    assert len(tokens_of(chat)) == -(-len("user: Hello, how are you?\n") // 4)
    assert list(tokens_of(longer))[:6] == list(tokens_of(chat))[:6]


def test_a_request_takes_its_time_to_the_servers_queue() -> None:
    server = StepServer(delay=0.25)
    schedule = load(2)
    client = VirtualClient(schedule, [server], make_route("random", 1, schedule))
    client.run()
    first = records_of(client, schedule, environment={}).requests[0]
    assert first.sent == first.intended
    assert first.chunk_at[0] == round((0.25 + STEP) * 1e9)


def test_who_hangs_up_on_the_way_to_the_queue_never_gets_there() -> None:
    server = StepServer(delay=0.25)
    schedule = load(1)
    client = VirtualClient(schedule, [server], make_route("random", 1, schedule), timeout=0.2)
    client.run()
    (request,) = records_of(client, schedule, environment={}).requests
    assert request.failure is Failure.NO_ANSWER
    assert not server.served
