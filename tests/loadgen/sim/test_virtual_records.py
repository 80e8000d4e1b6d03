"""Records of simulated runs, to the last nanosecond: digests that were saved from an earlier program,
those on a GPU when its constants last changed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_8b
import pytest
from step_server import ROOM, StepServer

from loadgen.measure.record import Records
from loadgen.plan.arrivals import ClosedLoop, Constant, Poisson
from loadgen.plan.workload import Length, PlannedRequest, RequestClass, Schedule, Workload, preset
from loadgen.sim.routing import Policy, make_route
from loadgen.sim.virtual_client import VirtualClient, records_of
from loadgen.targets.simulated import SimulatedTarget


class StopAt(threading.Event):
    """Set once the slowest server has come to a moment."""

    def __init__(self, servers: Sequence[StepServer], moment: float) -> None:
        super().__init__()
        self._servers, self._moment = servers, moment

    def is_set(self) -> bool:
        return min(server.now for server in self._servers) >= self._moment


def load(count: int, arrival: Any = None, output: int = 8, **options: Any) -> Schedule:
    workload = Workload("w", (RequestClass("c", 1, Length(200, 0.9), Length(output, 0.5)),))
    return workload.schedule(
        seed=5, arrival=arrival or Poisson(12.0), num_requests=count, warmup=0, **options
    )


def talks(schedule: Schedule, turns: int = 3, think: float = 0.25) -> Schedule:
    """Every request but those at a multiple of ``turns`` follows the one before it."""
    return replace(
        schedule,
        requests=tuple(
            replace(r, follows=r.index - 1, think=think * (r.index % 4)) if r.index % turns else r
            for r in schedule.requests
        ),
    )


def refused(schedule: Schedule, every: int = 4) -> Schedule:
    """Every so many-th prompt is too long."""

    def make(request: PlannedRequest) -> PlannedRequest:
        return replace(request, prompt_token_ids=(1,) * (ROOM + 1)) if request.index % every == 1 else request

    return replace(schedule, requests=tuple(map(make, schedule.requests)))


@dataclass(frozen=True)
class Case:
    schedule: Schedule
    options: dict[str, Any]
    replicas: int = 1
    policy: Policy = "least-loaded"
    delay: float = 0.0
    late: float = 0.0
    stop_at: float | None = None


def case(schedule: Schedule, **given: Any) -> Case:
    options: dict[str, Any] = {name: given.pop(name) for name in ("timeout", "drain") if name in given}
    return Case(schedule, options, **given)


CASES: dict[str, Callable[[], Case]] = {
    "open": lambda: case(load(60)),
    "open, in step with the server": lambda: case(load(60, Constant(10.0))),
    "open, capped": lambda: case(load(60, max_concurrency=3)),
    "open, all at once": lambda: case(load(40, Constant(1e6), max_concurrency=7)),
    "open, with a duration": lambda: case(replace(load(40, output=60), duration=6.0), drain=0.5),
    "open, timeouts": lambda: case(load(60, max_concurrency=4, output=12), timeout=1.0),
    "open, drained": lambda: case(load(40, output=60), drain=1.5),
    "open, drained, capped": lambda: case(load(40, max_concurrency=5, output=40), drain=1.5),
    "open, interrupted": lambda: case(load(60, max_concurrency=3), stop_at=2.35),
    "open, refused": lambda: case(refused(load(60, Constant(10.0), max_concurrency=2))),
    "turns": lambda: case(talks(load(60))),
    "turns, capped": lambda: case(talks(load(60, max_concurrency=3))),
    "turns, with a duration": lambda: case(replace(talks(load(90)), duration=2.0)),
    "turns, refused": lambda: case(refused(talks(load(60), 4), 5)),
    "turns, timeouts": lambda: case(talks(load(60, output=12)), timeout=1.0),
    "turns, interrupted": lambda: case(talks(load(60)), stop_at=1.55),
    "closed": lambda: case(load(60, ClosedLoop(5))),
    "closed, for a duration": lambda: case(replace(load(60, ClosedLoop(5)), duration=4.0)),
    "closed, used up": lambda: case(replace(load(20, ClosedLoop(5)), duration=60.0)),
    "closed, drained": lambda: case(replace(load(20, ClosedLoop(5), output=60), duration=4.0), drain=0.5),
    "closed, interrupted": lambda: case(load(60, ClosedLoop(5)), stop_at=1.55),
    "closed, refused": lambda: case(refused(load(60, ClosedLoop(3)), 2)),
    "closed, turns": lambda: case(talks(load(60, ClosedLoop(4)))),
    "closed, turns for a duration": lambda: case(replace(talks(load(90, ClosedLoop(4))), duration=5.0)),
    "closed, turns refused": lambda: case(refused(talks(load(60, ClosedLoop(4))), 5)),
    "late answers": lambda: case(load(60, ClosedLoop(5)), delay=0.013, late=0.031),
    "late answers, timeouts": lambda: case(
        talks(load(60, max_concurrency=6, output=12)), delay=0.2, late=0.11, timeout=1.2
    ),
    "fleet": lambda: case(load(90, Poisson(40.0)), replicas=3),
    "fleet, random": lambda: case(talks(load(90, Poisson(40.0))), replicas=3, policy="random"),
    "fleet, by length": lambda: case(load(90, Poisson(40.0)), replicas=3, policy="length-pooled"),
    "fleet, closed, refused": lambda: case(
        refused(load(90, ClosedLoop(12)), 3), replicas=4, policy="prefix-aware", late=0.013
    ),
    "fleet, everything": lambda: case(
        refused(talks(load(120, Poisson(40.0), max_concurrency=9, output=12), 4), 11),
        replicas=3,
        delay=0.1,
        late=0.02,
        timeout=1.3,
    ),
}
SAVED: dict[str, str] = {
    "open": "e30240e316117984",
    "open, in step with the server": "218a43a25d600d5b",
    "open, capped": "31090aa598a9b237",
    "open, all at once": "fc14569dde709706",
    "open, with a duration": "31649deadd41ee55",
    "open, timeouts": "e968959ea2fff8f8",
    "open, drained": "592593030a08319a",
    "open, drained, capped": "1c7c6ad20987eada",
    "open, interrupted": "8ac48bfc7ec518fe",
    "open, refused": "7518e541b3b75d52",
    "turns": "06798cc83721e153",
    "turns, capped": "3d185435cf4b1460",
    "turns, with a duration": "ff94a8fcf1b4a29c",
    "turns, refused": "a4688081cd92ca18",
    "turns, timeouts": "2a9ff52c548b7e26",
    "turns, interrupted": "86f68209a1bca4c8",
    "closed": "8e89f33b3328de00",
    "closed, for a duration": "8aae8990c0e2ca78",
    "closed, used up": "71f5700ec2a913d0",
    "closed, drained": "31154cdb4d904bbc",
    "closed, interrupted": "7a900cadc98c8989",
    "closed, refused": "3f663beba787541a",
    "closed, turns": "aa12b7f7fa3db713",
    "closed, turns for a duration": "79d4e9f6b3ae987c",
    "closed, turns refused": "845e72ade540bc75",
    "late answers": "dc757727beff559e",
    "late answers, timeouts": "54e4f4bdfdf0606c",
    "fleet": "32851793d6c8aaf1",
    "fleet, random": "b14a2df8868631dd",
    "fleet, by length": "82f395493089a3d3",
    "fleet, closed, refused": "27bd23ae5e7042b2",
    "fleet, everything": "de663e6ab3969231",
    "engine, open": "222c249cc7baf7db",
    "engine, fleet": "dc751c04ef7a9ea1",
    "engine, closed": "ea1df196d712b29b",
}


def digest(records: Records) -> str:
    """Of all but what the interpreter calls itself, and the metrics."""
    plain = replace(records, environment={}, scrapes=()).to_json()
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", CASES)
def test_records_are_the_same_as_ever(name: str) -> None:
    case = CASES[name]()
    servers = [StepServer(case.delay, case.late) for _ in range(case.replicas)]
    stop = None if case.stop_at is None else StopAt(servers, case.stop_at)
    route = make_route(case.policy, case.replicas, case.schedule)
    client = VirtualClient(case.schedule, servers, route, stop=stop, **case.options)
    client.run()
    assert digest(records_of(client, case.schedule, environment={})) == SAVED[name]


MEASURED = {
    "launch": 0.01,
    "entry": 0.001,
    "spread": [[0.012, [0.9, 1.0, 1.6]], [0.05, [0.95, 1.1]]],
    "delivery": [[3, [0.0, 0.002]], [9, [0.0, 0.0, 0.003, 0.03]]],
}
ENGINES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "engine, open": ("h100", {}, {"arrival": Poisson(30.0)}, {}),
    "engine, fleet": ("h100", {"max_num_seqs": 8}, {"arrival": Poisson(60.0)}, {"replicas": 3}),
    "engine, closed": ("times.json", {"device_memory": 40 << 30}, {"arrival": ClosedLoop(12)}, {}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_records_of_the_engine_are_the_same_as_ever(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({**llama_8b.CONFIG, "_name_or_path": "some/llama-8b"}))
    Path("times.json").write_text(json.dumps(MEASURED))
    device, flags, arrival, options = ENGINES[name]
    schedule = preset("chat", max_model_len=8192).schedule(seed=3, num_requests=60, **arrival)
    target = SimulatedTarget(f"simulated:{device}", "config.json", **options)
    with target.open(flags) as server:
        assert digest(server.run(schedule)) == SAVED[name]
