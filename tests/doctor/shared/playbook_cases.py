"""Servers with the symptom of each playbook, and servers near it that must not fire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from synthetic_server import Server

BASE = Server()
LONG = {
    "itl": {0.03: 970, 1.5: 30},
    "prefill_length": {100.0: 9, 4000.0: 1},
    "prompt_length": {100.0: 9, 4000.0: 1},
    "prefill_time": {0.1: 9, 1.5: 1},
}
MIXED = {
    "prefill_length": {100.0: 270, 4000.0: 30},
    "prompt_length": {100.0: 270, 4000.0: 30},
}
QUEUE = {"queue_time": {8.0: 10}, "ttft": {8.1: 10}}
SLOW = {"itl": {0.35: 1000}, "prefill_time": {0.8: 10}}
"""No prompt takes less than a step."""
ADAPTERS = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "b,c,d"}
SPECULATING = {"drafts": 1000, "draft_tokens": 5000, "accepted_tokens": 200}


@dataclass(frozen=True)
class Case:
    """A server with the symptom, and one that is near it and has another or none."""

    firing: Server
    quiet: Server
    flags: Mapping[str, Any] = field(default_factory=dict)
    quiet_flags: Mapping[str, Any] | None = None
    """The quiet server's own flags, where it has others."""
    assume: Mapping[str, float] = field(default_factory=dict)
    slo: str | None = None


def slowing(intervals: int, elapsed: float) -> float:
    """A counter that grows at 2^-6 of its first rate in the end."""
    return 400 * (intervals - 1) * (1 - 2 ** (-6 * elapsed)) / elapsed if elapsed else 0.0


CASES: dict[str, Case] = {
    "itl-spikes-long-prefill": Case(
        replace(BASE, histograms=LONG),
        # As high and as rare, but the prompts are short: no chunk size makes such a spike smaller.
        replace(BASE, histograms={"itl": {0.03: 970, 1.5: 30}}),
    ),
    "seq-cap": Case(
        replace(BASE, running=4, waiting=12, kv=0.1, histograms=QUEUE),
        # The same picture with slow steps in a wide batch is overload.
        replace(BASE, running=64, waiting=192, kv=0.1, histograms={**QUEUE, **SLOW}),
        flags={"max_num_seqs": 4},
        quiet_flags={"max_num_seqs": 64},
    ),
    "overload": Case(
        replace(BASE, running=128, waiting=lambda t: 150 * t, histograms={**QUEUE, **SLOW}),
        replace(BASE, running=128, waiting=lambda t: 40 * (t > 0.9), histograms={"itl": {0.09: 1000}}),
    ),
    "prefill-slow": Case(
        replace(
            BASE,
            running=1,
            histograms={
                "ttft": {6.0: 10},
                "prefill_time": {5.9: 10},
                "prefill_length": {3000.0: 10},
                "prompt_length": {3000.0: 10},
            },
        ),
        # A burst of short prompts that share a step: slow first tokens, but no prompt is cut.
        replace(BASE, histograms={"ttft": {3.0: 10}, "prefill_time": {2.0: 10}}),
        flags={"max_num_batched_tokens": 64},
        quiet_flags={"max_num_batched_tokens": 2048},
    ),
    "kv-pressure": Case(
        replace(BASE, kv=0.98, running=lambda t: 16 - 8 * t, waiting=lambda t: 8 * t),
        replace(BASE, kv=1.0, running=16),
    ),
    "kv-near-capacity": Case(replace(BASE, kv=1.0, running=16), replace(BASE, kv=lambda t: 0.5 + 0.5 * t)),
    "kv-idle": Case(
        replace(BASE, running=3, waiting=6, kv=0.05, histograms={**QUEUE, "prefill_time": {4.0: 10}}),
        replace(BASE, running=3, kv=0.05),
        flags={"max_num_seqs": 64, "max_num_batched_tokens": 256},
    ),
    "prefix-misses": Case(
        replace(BASE, histograms={"prompt_length": {1200.0: 10}, "prefill_length": {1200.0: 10}}),
        replace(
            BASE,
            counters={"prefix_queries": 12000, "prefix_hits": 9600},
            histograms={"prompt_length": {1200.0: 10}, "prefill_length": {240.0: 10}},
        ),
        assume={"shared_prefix": 1000.0},
    ),
    "speculation-loses": Case(
        replace(BASE, running=16, counters=SPECULATING),
        replace(BASE, running=4, counters={**SPECULATING, "accepted_tokens": 3000}),
    ),
    "speculation-preempts": Case(
        replace(
            BASE,
            running=64,
            kv=0.97,
            counters={**SPECULATING, "accepted_tokens": 4500, "preemptions": 2},
            config={"num_gpu_blocks": "501"},
        ),
        # The pool is so large that the drafts' slots cannot be the reason.
        replace(
            BASE, running=8, kv=0.97, counters={**SPECULATING, "accepted_tokens": 4500, "preemptions": 2}
        ),
    ),
    "client-disconnects": Case(
        replace(BASE, counters={"finished": 5}),
        # All of them finish, and the batch fills up meanwhile.
        replace(BASE, running=lambda t: 40 * t, counters={"finished": 9}),
    ),
    "itl-flat-high": Case(
        replace(
            BASE,
            running=64,
            histograms={"itl": {0.35: 1000}, "tpot": {0.35: 10}, "prefill_time": {1.2: 10}},
        ),
        replace(BASE, running=64, histograms={"itl": {0.12: 1000}, "tpot": {0.12: 10}}),
    ),
    "slow-steps": Case(
        replace(BASE, running=2, histograms={"itl": {0.35: 1000}, "tpot": {0.35: 10}}),
        replace(BASE, running=2, histograms={"itl": {0.15: 1000}, "tpot": {0.15: 10}}),
    ),
    "prefill-burst": Case(
        replace(
            BASE,
            running=lambda t: 2 + 6 * t,
            waiting=lambda t: 6 - 6 * t,
            counters={"prompt_tokens": 30000, "generation_tokens": 60},
            histograms={"prefill_time": {4.0: 10}, "decode_time": {0.5: 10}},
        ),
        # The queue does not drain.
        replace(BASE, waiting=6, histograms={"prefill_time": {4.0: 10}, "decode_time": {0.5: 10}}),
    ),
    "short-behind-long": Case(
        replace(BASE, histograms={**LONG, "ttft": {0.2: 8, 4.0: 2}}),
        # Only the long prompts themselves are slow.
        replace(BASE, histograms={**LONG, "ttft": {0.2: 9, 4.0: 1}}),
    ),
    "oversized-max-model-len": Case(
        replace(BASE, histograms={"generation_length": {100.0: 10}}),
        replace(BASE, histograms={"generation_length": {9000.0: 10}}),
        flags={"max_model_len": 32768},
    ),
    "myth-fragmentation": Case(
        replace(BASE, running=64, kv=0.97, counters={"preemptions": 2}),
        replace(BASE, running=64, kv=0.97),
        flags={"gpu_memory_utilization": 0.85},
    ),
    "budget-eats-pool": Case(
        replace(BASE, running=64, kv=0.97, counters={"preemptions": 2}),
        # The prompts are so long that the budget is used.
        replace(
            BASE,
            running=64,
            kv=0.97,
            counters={"preemptions": 2},
            histograms={"prompt_length": {9000.0: 10}, "prefill_length": {9000.0: 10}},
        ),
        flags={"max_num_batched_tokens": 16384},
    ),
    "long-and-short-mixed": Case(
        replace(BASE, histograms={**MIXED, "ttft": {0.1: 270, 1.5: 30}}),
        # The short ones are as slow: it is not the order.
        replace(BASE, histograms={**MIXED, "ttft": {1.2: 270, 1.5: 30}}),
        flags={"max_num_batched_tokens": 2048},
    ),
    "ttft-missed": Case(
        replace(BASE, histograms={"ttft": {6.0: 10}, "prefill_time": {5.9: 10}, "e2e": {9.0: 10}}),
        replace(BASE, histograms={"ttft": {0.9: 10}}),
    ),
    "itl-missed": Case(
        replace(BASE, histograms={"itl": {0.03: 970, 0.9: 30}}),
        replace(BASE, histograms={"itl": {0.03: 995, 0.9: 5}}),
    ),
    "work-missed": Case(
        replace(BASE, histograms={"e2e": {6.0: 10}, "decode_time": {5.8: 10}}), BASE, slo="e2e_p95<5s"
    ),
    "front-end-slow": Case(
        replace(BASE, histograms={"ttft": {3.0: 10}, "e2e": {6.1: 10}}),
        # As slow, and all of it in the engine.
        replace(BASE, histograms={"ttft": {3.0: 10}, "prefill_time": {2.9: 10}, "e2e": {6.0: 10}}),
    ),
    "adapter-slots": Case(
        replace(BASE, running=8, waiting=60, deferred=60, kv=0.05, adapters=ADAPTERS, histograms=QUEUE),
        # The same queue waits for capacity.
        replace(BASE, running=8, waiting=60, deferred=0, kv=0.05, adapters=ADAPTERS, histograms=QUEUE),
    ),
    "deferred-requests": Case(
        replace(BASE, running=8, waiting=60, deferred=50, kv=0.05, histograms=QUEUE),
        replace(BASE, running=8, waiting=60, deferred=10, kv=0.05, histograms=QUEUE),
    ),
    "throughput-collapse": Case(
        replace(BASE, counters={"generation_tokens": slowing}),
        # Fewer requests run, and fewer tokens come.
        replace(BASE, running=lambda t: 8 - 7 * t, counters={"generation_tokens": slowing}),
    ),
    "requests-refused": Case(
        replace(BASE, counters={"rejections": 5}),
        replace(BASE, counters={"rejections": 0}),
    ),
    "ttft-slo-queue": Case(
        replace(BASE, running=64, waiting=15, kv=0.95, histograms=QUEUE),
        replace(BASE, running=64, waiting=5, kv=0.95, histograms=QUEUE),
    ),
}
