"""Faults to inject, and healthy servers to leave alone: one live set-up each, and three simulated ones.

A set-up is written as ``reproduce:`` in a playbook is (``doctor/diagnosis/experiment.py``). Live ones
are sized for the bundled model on two CPU cores, simulated ones for an 8B model on an H100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from doctor.diagnosis.experiment import ExperimentSide, overlaid

HEALTHY = "healthy"


@dataclass(frozen=True)
class Setup:
    """One server, or several, under load. ``sides`` beside the first run at the same time (live only)."""

    sides: tuple[ExperimentSide, ...]
    slo: str | None = None
    assume: Mapping[str, float] = field(default_factory=dict)
    acceptance: float = 0.6
    """Of drafts, where they are simulated."""
    earlier: ExperimentSide | None = None
    """What ran before, for rules that compare with a baseline."""


@dataclass(frozen=True)
class Fault:
    """``right``: what the first cure must do: a flag and where it goes (up, down, drop, or its new value), or
    ``do`` and a word of the advice. ``also``: other findings that are true of the same set-up."""

    name: str
    truth: str
    right: Mapping[str, Any]
    live: Setup
    simulated: tuple[Setup, ...]
    also: frozenset[str] = frozenset()


def stream(name: str, prompt: Any, output: Any, **details: Any) -> dict[str, Any]:
    return {"name": name, "prompt": prompt, "output": output, **details}


def setup(*load: dict[str, Any], **details: Any) -> Setup:
    """``beside``, ``earlier``: further sides, with what differs from the first one."""
    own: dict[str, Any] = {
        name: details.pop(name) for name in ("engine", "replicas", "routing", "timeout") if name in details
    }
    first = overlaid(ExperimentSide(), {**own, "load": list(load)})
    beside = tuple(overlaid(first, changes) for changes in details.pop("beside", ()))
    earlier = details.pop("earlier", None)
    return Setup(
        sides=(first, *beside),
        earlier=None if earlier is None else overlaid(first, earlier),
        **details,
    )


def _chat(clients: int, prompt: Any = 128, output: Any = 64, **details: Any) -> dict[str, Any]:
    return stream("chat", prompt, output, clients=clients, **details)


def _arriving(rate: float, prompt: Any, output: Any, name: str = "chat", **details: Any) -> dict[str, Any]:
    return stream(name, prompt, output, rate=rate, **details)


def _long(prompt: int, every: float) -> dict[str, Any]:
    return stream("long", prompt, 4, rate=1 / every, even=True)


_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_EAGER_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_max": 1,
    "prompt_lookup_min": 1,
}
"""Drafts whenever the last token occurred before."""

FAULTS = (
    Fault(
        "a cap of 2 sequences",
        "seq-cap",
        {"max_num_seqs": "up"},
        setup(_chat(12), engine={"max_num_seqs": 2}),
        (
            setup(_chat(64, 500, 200), engine={"max_num_seqs": 16}),
            setup(_arriving(12, [200, 800], [100, 300]), engine={"max_num_seqs": 8}),
            setup(_chat(24, 2000, 300), engine={"max_num_seqs": 4}),
        ),
    ),
    Fault(
        "twice the load it can carry",
        "overload",
        {"do": "scale out"},
        setup(_arriving(8, 256, 64)),
        (
            setup(_arriving(120, 1000, 200), slo="itl_p99<50ms,ttft_p95<1s"),
            setup(_arriving(40, 3000, 200), slo="itl_p99<50ms,ttft_p95<1s"),
            setup(_arriving(90, [200, 1800], [100, 400]), slo="itl_p99<40ms,ttft_p95<1s"),
        ),
    ),
    Fault(
        "a pool of 4,096 tokens",
        "kv-pressure",
        {"num_gpu_blocks_override": "drop"},
        setup(_chat(16, 128, 384), engine={"num_gpu_blocks_override": 257, "max_model_len": 4096}),
        (
            setup(_chat(64, 1000, 500), engine={"num_gpu_blocks_override": 2000, "max_model_len": 8192}),
            setup(_chat(100, 500, 1000), engine={"num_gpu_blocks_override": 3000, "max_model_len": 8192}),
            setup(
                _arriving(10, [500, 1500], [300, 900]),
                engine={"num_gpu_blocks_override": 1500, "max_model_len": 8192},
            ),
        ),
    ),
    Fault(
        "long prompts in one step",
        "itl-spikes-long-prefill",
        {"max_num_batched_tokens": "down"},
        setup(_chat(8, 32, 128), _long(1800, 12), engine={"max_num_batched_tokens": 2048}),
        (
            setup(
                _chat(32, 100, 300),
                _long(15000, 4),
                engine={"max_num_batched_tokens": 16384},
                slo="itl_p99<50ms,ttft_p95<2s",
            ),
            setup(
                _chat(64, 200, 200),
                _long(7000, 2),
                engine={"max_num_batched_tokens": 8192},
                slo="itl_p99<60ms,ttft_p95<2s",
            ),
            setup(
                _arriving(10, 200, 200),
                _long(30000, 3),
                engine={"max_num_batched_tokens": 32768},
                slo="itl_p99<100ms,ttft_p95<2s",
            ),
        ),
        also=frozenset({"short-behind-long"}),
    ),
    Fault(
        "a budget of 16 tokens",
        "prefill-slow",
        {"max_num_batched_tokens": "up"},
        setup(_chat(1, 3000, 24), engine={"max_num_batched_tokens": 16, "max_num_seqs": 8}),
        (
            setup(_chat(2, 16000, 100), engine={"max_num_batched_tokens": 48, "max_num_seqs": 32}),
            setup(
                _arriving(0.5, 4000, 50),
                engine={"max_num_batched_tokens": 32, "max_num_seqs": 32},
                slo="ttft_p95<500ms,itl_p99<100ms",
            ),
            setup(
                _chat(1, 20000, 100),
                engine={"max_num_batched_tokens": 128, "max_num_seqs": 64},
                slo="ttft_p95<1s,itl_p99<100ms",
            ),
        ),
    ),
    Fault(
        "a header before the common prefix",
        "prefix-misses",
        {"do": "first"},
        setup(_arriving(0.8, 1080, 24, shared=1000, header=50), assume={"shared_prefix": 1000.0}),
        (
            setup(_arriving(8, 4000, 100, shared=3900, header=50), assume={"shared_prefix": 3900.0}),
            setup(_chat(16, 2000, 200, shared=1500, header=30), assume={"shared_prefix": 1500.0}),
            setup(
                _arriving(5, 6000, 150, shared=5000, header=100, groups=3), assume={"shared_prefix": 5000.0}
            ),
        ),
    ),
    Fault(
        "a prefix cache that is off",
        "prefix-misses",
        {"enable_prefix_caching": True},
        setup(
            _arriving(0.8, 1050, 24, shared=1000),
            engine={"enable_prefix_caching": False},
            assume={"shared_prefix": 1000.0},
        ),
        tuple(
            setup(
                load,
                engine={"enable_prefix_caching": False},
                assume={"shared_prefix": float(load["shared"])},
            )
            for load in (
                _arriving(8, 4000, 100, shared=3900),
                _chat(16, 2000, 200, shared=1500),
                _arriving(5, 6000, 150, shared=5000, groups=3),
            )
        ),
    ),
    Fault(
        "drafts that are not accepted",
        "speculation-loses",
        {"speculative_config": "drop"},
        setup(_chat(12, 200, 256, temperature=1.0), engine={"speculative_config": _EAGER_NGRAM}),
        tuple(
            setup(load, engine={"speculative_config": _NGRAM}, acceptance=acceptance)
            for load, acceptance in (
                (_chat(64, 300, 200), 0.05),
                (_arriving(15, 500, 300), 0.1),
                (_chat(16, 1000, 400), 0.02),
            )
        ),
    ),
    Fault(
        "drafts into a small pool",
        "speculation-preempts",
        {"speculative_config": "down"},
        setup(
            _chat(24, 40, 120),
            engine={"speculative_config": _NGRAM, "num_gpu_blocks_override": 132, "max_model_len": 2048},
        ),
        tuple(
            setup(
                load,
                engine={
                    "speculative_config": _NGRAM,
                    "num_gpu_blocks_override": blocks,
                    "max_model_len": 2048,
                },
                acceptance=0.8,
            )
            for load, blocks in (
                (_chat(48, 60, 150), 430),  # short contexts, of which the drafts' slots are a large part
                (_chat(40, 50, 120), 290),
                (_chat(56, 80, 140), 530),
            )
        ),
        also=frozenset({"kv-pressure"}),
    ),
    Fault(
        "clients that hang up",
        "client-disconnects",
        {"do": "timeouts"},
        setup(_arriving(1.0, 128, 400), timeout=3.0),
        (
            setup(_arriving(5, 500, 800), timeout=4.0),
            setup(_arriving(10, 300, 600), timeout=3.0),
            setup(_arriving(20, 200, [200, 800]), timeout=5.0),
        ),
    ),
    Fault(
        "short prompts behind long ones",
        "short-behind-long",
        {"long_prefill_token_threshold": "up"},
        setup(
            _arriving(1.0, 60, 24),
            _long(2600, 11),
            engine={"max_num_batched_tokens": 512, "max_num_seqs": 64},
            slo="ttft_p95<400ms",
        ),
        (
            setup(
                _arriving(12, 100, 100),
                _long(30000, 4),
                engine={"max_num_batched_tokens": 2048, "max_num_seqs": 256},
                slo="ttft_p95<300ms",
            ),
            setup(
                _arriving(20, 150, 50),
                _long(15000, 2),
                engine={"max_num_batched_tokens": 1024, "max_num_seqs": 256},
                slo="ttft_p95<250ms",
            ),
            setup(
                _arriving(5, [50, 300], 200),
                _long(28000, 5),
                engine={"max_num_batched_tokens": 4096, "max_num_seqs": 256},
                slo="ttft_p95<400ms",
            ),
        ),
        also=frozenset({"itl-spikes-long-prefill"}),
    ),
    Fault(
        "a batch that is too wide",
        "itl-flat-high",
        {"max_num_seqs": "down"},
        setup(_chat(48, 64, 192), slo="itl_p99<50ms"),
        (
            setup(_chat(256, 200, 600), slo="itl_p99<12ms"),
            setup(_chat(128, 2000, 600), slo="itl_p99<14ms"),
            setup(_chat(384, 100, 800), slo="itl_p99<12ms"),
        ),
        also=frozenset({"overload"}),
    ),
    Fault(
        "one replica with most of the load",
        "replica-imbalance",
        {"do": "router"},
        setup(_chat(10, 128, [32, 96]), beside=[{"load": [_chat(1, 128, [32, 96])]}]),
        (
            setup(_chat(40, 500, 300), beside=[{"load": [_chat(6, 500, 300)]}]),
            setup(
                _chat(64, 300, 200),
                beside=[{"load": [_chat(8, 300, 200)]}, {"load": [_chat(6, 300, 200)]}],
            ),
            setup(_arriving(20, 800, 200), beside=[{"load": [_arriving(2, 800, 200)]}]),
        ),
    ),
    Fault(
        "longer prompts than last week",
        "baseline-shift",
        {"do": "tune again"},
        setup(_arriving(1.0, 400, 32), earlier={"load": [_arriving(1.0, 100, 32)]}),
        tuple(
            setup(_arriving(rate, now, 150), earlier={"load": [_arriving(rate, before, 150)]})
            for rate, before, now in ((6.0, 1000, 3000), (10.0, 800, 1600), (3.0, 2000, 6000))
        ),
    ),
)

CONTROLS = (
    Fault(
        "steady chat",
        HEALTHY,
        {},
        setup(_arriving(1.0, 200, 48)),
        (
            setup(_arriving(10, 1000, 200)),
            setup(_arriving(5, [500, 3000], [100, 500])),
            setup(_arriving(0.2, 500, 200)),
        ),
    ),
    Fault(
        "busy clients",
        HEALTHY,
        {},
        setup(_chat(8, 128, 96)),
        (setup(_chat(64, 500, 300)), setup(_chat(16, 4000, 200)), setup(_chat(128, 200, 300))),
    ),
    Fault(
        "a prefix that hits",
        HEALTHY,
        {},
        setup(_arriving(1.5, 1050, 24, shared=1000), assume={"shared_prefix": 1000.0}),
        (
            setup(_arriving(10, 4000, 100, shared=3900), assume={"shared_prefix": 3900.0}),
            setup(_chat(16, 2000, 200, shared=1500), assume={"shared_prefix": 1500.0}),
            setup(_arriving(5, 6000, 150, shared=5000, groups=3), assume={"shared_prefix": 5000.0}),
        ),
    ),
    Fault(
        "drafts that pay",
        HEALTHY,
        {},
        setup(_chat(2, 64, 200), engine={"speculative_config": _NGRAM}),
        tuple(
            setup(load, engine={"speculative_config": _NGRAM}, acceptance=0.85)
            for load in (_chat(4, 500, 400), _arriving(2, 1000, 300), _chat(8, 300, 300))
        ),
    ),
    Fault(
        "bursts",
        HEALTHY,
        {},
        setup(*(stream(f"burst{n}", 100, 40, rate=0.05, even=True, starts=n * 0.1) for n in range(6))),
        (
            setup(*(stream(f"b{n}", 500, 100, rate=0.1, even=True, starts=n * 0.01) for n in range(20))),
            setup(_arriving(3, 300, 200), _chat(4, 1000, 100, think=5.0)),
            setup(*(stream(f"b{n}", 2000, 50, rate=0.05, even=True, starts=n * 0.02) for n in range(10))),
        ),
    ),
)
