"""Loads in virtual time, each with what is wrong in it: what the doctor's rules are judged by.

The loads of ``SEEN`` are those that the rules were written with; those of ``FURTHER`` came afterwards, to
find rules that fit only the first. Both are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from benchmarks.loadgen.virtual_server import CPU, GPU, Job, Pace, VirtualServer

Load = Callable[[VirtualServer], None]
Scrapes = list[tuple[int, str]]

HEALTHY = "healthy"
SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """A load on a server with these flags. ``truth``: the cause's playbook, or :data:`HEALTHY`.

    ``also`` are other findings that are true as well. ``assume`` is what only a user knows, ``until`` the
    virtual second at which the recording is cut off (None: when all is done).
    """

    name: str
    truth: str
    load: Load
    flags: Mapping[str, Any] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    assume: Mapping[str, float] = field(default_factory=dict)
    until: float | None = None
    pace: Pace = CPU
    acceptance: float = 0.0
    further: bool = False
    slo: str | None = None


def each(prompt: int, output: int, **details: int) -> Callable[[], Job]:
    return lambda: Job(prompt, output, **details)


def arrivals(rate: float, job: Callable[[], Job], seconds: float = SECONDS) -> Load:
    return lambda server: server.poisson(rate, job, seconds)


def clients(number: int, job: Callable[[], Job], total: int) -> Load:
    return lambda server: server.closed(number, job, total)


def bursts(size: int, period: float, job: Callable[[], Job], seconds: float = SECONDS) -> Load:
    def load(server: VirtualServer) -> None:
        for _ in range(size):
            server.every(period, job, seconds)

    return load


def beside_long(prompt: int, period: float, streams: int = 12, total: int = 80) -> Load:
    """Some streams, and a long prompt now and then."""

    def load(server: VirtualServer) -> None:
        server.closed(streams, each(32, 128), total)
        server.every(period, each(prompt, 4), SECONDS)

    return load


def both(*loads: Load) -> Load:
    def load(server: VirtualServer) -> None:
        for part in loads:
            part(server)

    return load


@cache
def _recorded(name: str, scrape_every: float) -> tuple[Scrapes, dict[str, Any]]:
    case = CASES[name]
    server = VirtualServer(
        seed=1, acceptance=case.acceptance, pace=case.pace, scrape_every=scrape_every, **case.flags
    )
    case.load(server)
    return server.run(case.until), server.flags


def recorded(case: Case, scrape_every: float = 2.0) -> tuple[Scrapes, dict[str, Any]]:
    """The scrapes of a case, and the server's flags as ``vllm serve`` would have them."""
    return _recorded(case.name, scrape_every)


_TIGHT = {"num_gpu_blocks_override": 34}

SEEN = (
    Case("few requests", HEALTHY, arrivals(0.1, each(128, 48))),
    Case("steady", HEALTHY, arrivals(1.1, each(200, 64))),
    Case("longer prompts", HEALTHY, arrivals(0.35, each(500, 64))),
    Case("bursts", HEALTHY, bursts(8, 20.0, each(128, 48))),
    Case("bursts that no scrape meets", HEALTHY, bursts(3, 10.0, each(64, 20))),
    Case("16 busy clients", HEALTHY, clients(16, each(256, 64), 64)),
    Case("32 busy clients", HEALTHY, clients(32, each(200, 128), 96)),
    Case(
        "a prefix that hits",
        HEALTHY,
        arrivals(0.4, each(1053, 24, shared=1000)),
        assume={"shared_prefix": 700.0},
    ),
    Case(
        "drafts that pay",
        HEALTHY,
        clients(8, each(200, 128), 32),
        {"num_speculative_tokens": 3},
        acceptance=0.85,
    ),
    Case("one sequence, 4 clients", "seq-cap", clients(4, each(128, 64), 20), {"max_num_seqs": 1}),
    Case("8 sequences, 32 clients", "seq-cap", clients(32, each(256, 64), 64), {"max_num_seqs": 8}),
    Case("a mild overload, cut", "overload", arrivals(2.6, each(256, 64)), until=60.0),
    Case("a mild overload, drained", "overload", arrivals(2.6, each(256, 64))),
    Case("a heavy overload", "overload", arrivals(8.0, each(256, 64)), until=40.0),
    Case("an overload of 500-token prompts", "overload", arrivals(1.6, each(500, 64)), until=60.0),
    Case("a pool of 4,224 tokens", "kv-pressure", clients(12, each(256, 500), 16), _TIGHT),
    Case(
        "a pool of 8,192 tokens",
        "kv-pressure",
        clients(24, each(200, 300), 40),
        {"num_gpu_blocks_override": 65},
    ),
    Case(
        "long prompts every 5 s",
        "itl-spikes-long-prefill",
        beside_long(1500, 5.0),
        {"max_num_batched_tokens": 2048},
    ),
    Case(
        "long prompts every 20 s",
        "itl-spikes-long-prefill",
        beside_long(3900, 20.0),
        {"max_num_batched_tokens": 8192},
    ),
    Case(
        "long prompts in chunks",
        "itl-spikes-long-prefill",
        beside_long(2600, 12.0),
        {"max_num_batched_tokens": 256},
    ),
    Case(
        "a budget of 8",
        "prefill-slow",
        clients(1, each(2000, 24), 5),
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    ),
    Case(
        "a budget of 64, two clients",
        "prefill-slow",
        clients(2, each(3000, 24), 6),
        {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    ),
    Case(
        "a header before the prefix",
        "prefix-misses",
        arrivals(0.3, each(800, 24, header=40, shared=750)),
        assume={"shared_prefix": 700.0},
    ),
    Case(
        "2 drafts of which few are accepted",
        "speculation-loses",
        clients(8, each(200, 128), 16),
        {"num_speculative_tokens": 2},
        acceptance=0.2,
    ),
    Case(
        "8 drafts at batch 32",
        "speculation-loses",
        clients(32, each(200, 64), 64),
        {"num_speculative_tokens": 8},
        acceptance=0.1,
    ),
    Case("clients that hang up", "client-disconnects", clients(8, each(128, 128, patience=60), 60)),
)

FURTHER = (
    # Healthy servers: idle, at other speeds, with the flags of a sick one and a load that they suit.
    Case("one request a minute", HEALTHY, arrivals(0.03, each(64, 32), 120.0)),
    Case(
        "prefix hits at twice the rate",
        HEALTHY,
        arrivals(0.8, each(1053, 24, shared=1000)),
        assume={"shared_prefix": 1000.0},
    ),
    Case("unique prompts, nobody assumes", HEALTHY, arrivals(0.3, each(300, 40))),
    Case("a slower machine", HEALTHY, arrivals(0.4, each(128, 48)), pace=CPU.times(1.5)),
    Case("a faster machine", HEALTHY, arrivals(3.0, each(200, 64)), pace=CPU.times(0.3)),
    Case("a GPU at half its load", HEALTHY, arrivals(6.0, each(500, 150)), pace=GPU),
    Case("a GPU with 64 clients", HEALTHY, clients(64, each(300, 200), 600), pace=GPU),
    Case(
        "a GPU with long prompts",
        HEALTHY,
        beside_long(3500, 5.0, streams=16, total=300),
        {"max_num_batched_tokens": 2048},
        pace=GPU,
    ),
    Case("64 sequences that suffice", HEALTHY, clients(24, each(100, 100), 72), {"max_num_seqs": 64}),
    Case("a pool that suffices", HEALTHY, clients(8, each(128, 200), 24), {"num_gpu_blocks_override": 65}),
    Case(
        "a small budget, short prompts",
        HEALTHY,
        arrivals(0.8, each(100, 48)),
        {"max_num_batched_tokens": 256, "max_num_seqs": 64},
    ),
    Case("a ramp", HEALTHY, both(arrivals(0.3, each(150, 48), 60.0), arrivals(0.5, each(150, 48), 30.0))),
    Case(
        "5 drafts that pay",
        HEALTHY,
        clients(4, each(200, 200), 16),
        {"num_speculative_tokens": 5},
        acceptance=0.8,
    ),
    Case("clients come and go", HEALTHY, both(clients(10, each(64, 96), 30), bursts(4, 15.0, each(64, 48)))),
    # Sequence cap
    Case("2 sequences, 16 clients", "seq-cap", clients(16, each(128, 64), 32), {"max_num_seqs": 2}),
    Case("4 sequences, 12 clients", "seq-cap", clients(12, each(100, 100), 36), {"max_num_seqs": 4}),
    Case("16 sequences, 48 clients", "seq-cap", clients(48, each(64, 64), 144), {"max_num_seqs": 16}),
    Case("one sequence, arrivals", "seq-cap", arrivals(0.8, each(64, 48)), {"max_num_seqs": 1}),
    Case("3 sequences, arrivals", "seq-cap", arrivals(1.5, each(128, 80)), {"max_num_seqs": 3}),
    Case(
        "a GPU with 8 sequences", "seq-cap", clients(64, each(300, 150), 400), {"max_num_seqs": 8}, pace=GPU
    ),
    Case(
        "a GPU with 16 sequences, arrivals",
        "seq-cap",
        arrivals(20.0, each(200, 150), 40.0),
        {"max_num_seqs": 16},
        pace=GPU,
    ),
    # Overload
    Case("1.3 times capacity", "overload", arrivals(2.9, each(200, 64)), until=90.0),
    Case("3 times capacity", "overload", arrivals(6.0, each(256, 64)), until=60.0),
    Case("long answers", "overload", arrivals(3.5, each(128, 256)), until=60.0),
    Case(
        "long prompts without end",
        "overload",
        arrivals(0.9, each(1000, 32)),
        until=80.0,
        also=frozenset({"prefill-slow"}),
    ),
    Case(
        "a slower machine, too much",
        "overload",
        arrivals(2.5, each(256, 64)),
        until=60.0,
        pace=CPU.times(1.5),
    ),
    Case(
        "256 sequences allowed", "overload", arrivals(5.0, each(256, 64)), {"max_num_seqs": 256}, until=80.0
    ),
    # KV pool
    Case(
        "a pool of 6,000 tokens",
        "kv-pressure",
        clients(16, each(128, 500), 24),
        {"num_gpu_blocks_override": 48},
    ),
    Case(
        "a pool of 4,096 tokens",
        "kv-pressure",
        clients(16, each(128, 384), 20),
        {"num_gpu_blocks_override": 33},
    ),
    Case(
        "long answers in a small pool",
        "kv-pressure",
        clients(8, each(256, 1000), 10),
        {"num_gpu_blocks_override": 40},
    ),
    Case(
        "arrivals into a small pool",
        "kv-pressure",
        arrivals(0.7, each(300, 300)),
        {"num_gpu_blocks_override": 34},
    ),
    Case(
        "a GPU with a small pool",
        "kv-pressure",
        clients(32, each(500, 500), 96),
        {"num_gpu_blocks_override": 600},
        pace=GPU,
    ),
    # Long prefills
    Case(
        "a saturating long prompt",
        "itl-spikes-long-prefill",
        beside_long(3200, 9.0),
        {"max_num_batched_tokens": 4096},
        also=frozenset({"overload"}),
    ),
    Case(
        "2,000-token prompts every 8 s",
        "itl-spikes-long-prefill",
        beside_long(2000, 8.0),
        {"max_num_batched_tokens": 4096},
    ),
    Case(
        "long prompts beside 6 streams",
        "itl-spikes-long-prefill",
        beside_long(2600, 9.0, streams=6, total=40),
        {"max_num_batched_tokens": 4096},
    ),
    Case("long prompts, default budget", "itl-spikes-long-prefill", beside_long(3000, 12.0, streams=10)),
    Case(
        "long prompts, budget 512",
        "itl-spikes-long-prefill",
        beside_long(2600, 9.0),
        {"max_num_batched_tokens": 512},
    ),
    Case(
        "long prompts beside 20 streams",
        "itl-spikes-long-prefill",
        beside_long(1800, 10.0, streams=20, total=120),
        {"max_num_batched_tokens": 4096},
    ),
    Case(
        "a GPU, a strict objective",
        "itl-spikes-long-prefill",
        beside_long(3500, 4.0, streams=24, total=500),
        {"max_num_batched_tokens": 8192},
        pace=GPU,
        slo="itl_p99<50ms,ttft_p95<2s",
    ),
    # Prefill
    Case(
        "a budget of 16",
        "prefill-slow",
        clients(1, each(3000, 24), 8),
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    ),
    Case(
        "a budget of 32",
        "prefill-slow",
        clients(1, each(2500, 32), 8),
        {"max_num_batched_tokens": 32, "max_num_seqs": 16},
    ),
    Case("a default budget, 3,000-token prompts", "prefill-slow", clients(1, each(3000, 24), 8)),
    Case(
        "a budget of 16, 1,200-token prompts",
        "prefill-slow",
        clients(1, each(1200, 48), 12),
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    ),
    Case(
        "a budget of 48, arrivals",
        "prefill-slow",
        arrivals(0.1, each(2400, 16), 90.0),
        {"max_num_batched_tokens": 48, "max_num_seqs": 16},
    ),
    # Prefix cache
    Case(
        "1,000 words behind a header",
        "prefix-misses",
        arrivals(0.35, each(1053, 24, header=50, shared=1000)),
        assume={"shared_prefix": 1000.0},
    ),
    Case(
        "a cache that is off",
        "prefix-misses",
        arrivals(0.35, each(1053, 24, shared=1000)),
        {"enable_prefix_caching": False},
        assume={"shared_prefix": 1000.0},
    ),
    Case(
        "a prefix shorter than a block",
        "prefix-misses",
        arrivals(0.8, each(200, 32, shared=100)),
        assume={"shared_prefix": 100.0},
    ),
    Case(
        "a header, clients",
        "prefix-misses",
        clients(4, each(600, 64, header=30, shared=540), 30),
        assume={"shared_prefix": 540.0},
    ),
    # Speculation
    Case(
        "5 drafts at batch 16, nothing accepted",
        "speculation-loses",
        clients(16, each(150, 128), 48),
        {"num_speculative_tokens": 5},
        acceptance=0.01,
    ),
    Case(
        "3 drafts at batch 24",
        "speculation-loses",
        clients(24, each(150, 96), 48),
        {"num_speculative_tokens": 3},
        acceptance=0.08,
    ),
    Case(
        "4 drafts, one client",
        "speculation-loses",
        clients(1, each(150, 200), 6),
        {"num_speculative_tokens": 4},
        acceptance=0.05,
    ),
    Case(
        "drafts on a GPU with 64 clients",
        "speculation-loses",
        clients(64, each(200, 150), 256),
        {"num_speculative_tokens": 4},
        acceptance=0.1,
        pace=GPU,
    ),
    # Clients that hang up
    Case("nearly all hang up", "client-disconnects", clients(12, each(100, 128, patience=20), 100)),
    Case("a fifth hangs up", "client-disconnects", clients(8, each(128, 96, patience=400), 80)),
    Case("arrivals that hang up", "client-disconnects", arrivals(1.0, each(128, 96, patience=50))),
    # Short requests behind long prompts
    Case(
        "chats behind documents",
        "short-behind-long",
        both(arrivals(0.5, each(60, 24)), bursts(1, 15.0, each(2600, 8))),
        {"max_num_batched_tokens": 256},
        also=frozenset({"itl-spikes-long-prefill"}),
    ),
)

CASES: Mapping[str, Case] = {
    case.name: case for case in (*SEEN, *(replace(case, further=True) for case in FURTHER))
}
