"""Other loads than the recorded ones: the true cause still comes first or second, and health stays health."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from virtual_server import Job, VirtualServer

from doctor.diagnose import Diagnosis, diagnose
from doctor.sources import Scrapes

Load = Callable[[VirtualServer], None]


def each(prompt: int, output: int, **details: int) -> Callable[[], Job]:
    return lambda: Job(prompt, output, **details)


def arrivals(rate: float, job: Callable[[], Job], seconds: float = 60.0) -> Load:
    return lambda server: server.poisson(rate, job, seconds)


def clients(number: int, job: Callable[[], Job], total: int) -> Load:
    return lambda server: server.closed(number, job, total)


def bursts(size: int, period: float, job: Callable[[], Job]) -> Load:
    def load(server: VirtualServer) -> None:
        for _ in range(size):
            server.every(period, job, 60.0)

    return load


def beside_long(prompt: int, period: float) -> Load:
    """Twelve streams, and a long prompt now and then."""

    def load(server: VirtualServer) -> None:
        server.closed(12, each(32, 128), 80)
        server.every(period, each(prompt, 4), 60.0)

    return load


HEALTHY: dict[str, tuple[Load, dict[str, Any]]] = {
    "few requests": (arrivals(0.1, each(128, 48)), {}),
    "steady": (arrivals(1.1, each(200, 64)), {}),
    "longer prompts": (arrivals(0.35, each(500, 64)), {}),
    "bursts": (bursts(8, 20.0, each(128, 48)), {}),
    "bursts that no scrape meets": (bursts(3, 10.0, each(64, 20)), {}),
    "16 busy clients": (clients(16, each(256, 64), 64), {}),
    "32 busy clients": (clients(32, each(200, 128), 96), {}),
    "a prefix that hits": (arrivals(0.4, each(1053, 24, shared=1000)), {}),
    "drafts that pay": (
        clients(8, each(200, 128), 32),
        {"num_speculative_tokens": 3, "acceptance": 0.85},
    ),
}

SICK: dict[str, tuple[str, Load, dict[str, Any], float | None]] = {
    "one sequence, 4 clients": ("seq-cap", clients(4, each(128, 64), 20), {"max_num_seqs": 1}, None),
    "8 sequences, 32 clients": ("seq-cap", clients(32, each(256, 64), 64), {"max_num_seqs": 8}, None),
    "a mild overload, cut": ("overload", arrivals(2.6, each(256, 64)), {}, 60.0),
    "a mild overload, drained": ("overload", arrivals(2.6, each(256, 64)), {}, None),
    "a heavy overload": ("overload", arrivals(8.0, each(256, 64)), {}, 40.0),
    "an overload of 500-token prompts": ("overload", arrivals(1.6, each(500, 64)), {}, 60.0),
    "a pool of 4,224 tokens": (
        "kv-pressure",
        clients(12, each(256, 500), 16),
        {"num_gpu_blocks_override": 34},
        None,
    ),
    "a pool of 8,192 tokens": (
        "kv-pressure",
        clients(24, each(200, 300), 40),
        {"num_gpu_blocks_override": 65},
        None,
    ),
    "long prompts every 5 s": (
        "itl-spikes-long-prefill",
        beside_long(1500, 5.0),
        {"max_num_batched_tokens": 2048},
        None,
    ),
    "long prompts every 20 s": (
        "itl-spikes-long-prefill",
        beside_long(3900, 20.0),
        {"max_num_batched_tokens": 8192},
        None,
    ),
    "long prompts in chunks": (
        "itl-spikes-long-prefill",
        beside_long(2600, 12.0),
        {"max_num_batched_tokens": 256},
        None,
    ),
    "a budget of 8": (
        "prefill-slow",
        clients(1, each(2000, 24), 5),
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        None,
    ),
    "a budget of 64, two clients": (
        "prefill-slow",
        clients(2, each(3000, 24), 6),
        {"max_num_batched_tokens": 64, "max_num_seqs": 8},
        None,
    ),
    "a header before the prefix": (
        "prefix-misses",
        arrivals(0.3, each(800, 24, header=40, shared=750)),
        {},
        None,
    ),
    "2 drafts of which few are accepted": (
        "speculation-loses",
        clients(8, each(200, 128), 16),
        {"num_speculative_tokens": 2, "acceptance": 0.2},
        None,
    ),
    "8 drafts at batch 32": (
        "speculation-loses",
        clients(32, each(200, 64), 64),
        {"num_speculative_tokens": 8, "acceptance": 0.1},
        None,
    ),
    "clients that hang up": (
        "client-disconnects",
        clients(8, each(128, 128, patience=60), 60),
        {},
        None,
    ),
}


@cache
def recorded(case: str) -> tuple[list[tuple[int, str]], dict[str, Any]]:
    """The scrapes of a case, and the server's flags."""
    if case in HEALTHY:
        load, options = HEALTHY[case]
        until = None
    else:
        _, load, options, until = SICK[case]
    server = VirtualServer(seed=1, **options)
    load(server)
    return server.run(until), server.flags


def examine(case: str, flags_known: bool, thinned: slice = slice(None)) -> Diagnosis:
    scrapes, flags = recorded(case)
    assume = {"shared_prefix": 700.0} if "prefix" in case else None
    return diagnose(Scrapes(scrapes[thinned]), flags if flags_known else None, assume=assume)


@pytest.mark.parametrize("flags_known", [True, False])
@pytest.mark.parametrize("case", SICK)
def test_the_true_cause_is_found(case: str, flags_known: bool) -> None:
    found = examine(case, flags_known)
    assert SICK[case][0] in [finding.id for finding in found.findings[:2]]
    assert not found.healthy


@pytest.mark.parametrize("flags_known", [True, False])
@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_server_is_called_healthy(case: str, flags_known: bool) -> None:
    found = examine(case, flags_known)
    assert (found.findings, found.healthy) == ((), True)


@pytest.mark.parametrize(
    "case", ["one sequence, 4 clients", "8 sequences, 32 clients", "a mild overload, cut"]
)
@pytest.mark.parametrize("offset", range(0, 7, 2))
def test_a_scrape_every_15_s_calls_no_sick_server_healthy(case: str, offset: int) -> None:
    found = examine(case, True, slice(offset, None, 7))
    assert SICK[case][0] in [finding.id for finding in found.findings[:2]]
    assert not found.healthy
