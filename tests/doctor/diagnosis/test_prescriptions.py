"""Whatever the figures and the flags: no prescription that the server refuses, that changes nothing, or that
turns the wrong way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from doctor.diagnosis.engine_view import EngineView
from doctor.diagnosis.finding import Prescription
from doctor.diagnosis.playbook import Playbook, load_all
from doctor.diagnosis.prescribe import prescriptions
from doctor.metrics.evaluators import Group
from doctor.metrics.signals import SIGNALS, SignalUnit
from servers.command import parse_command
from servers.kind import ServerKind
from servers.kinds import BUNDLED, SGLANG, VLLM
from servers.known_flags import Flags, resolve
from servers.logs.incidents import SIGNS
from servers.reading import Missing, Number, Reading

DIRECTION = {
    "adapter-slots": {"max_loras": 1},
    "engine-died": {"gpu_memory_utilization": -1, "max_num_batched_tokens": -1},
    "budget-eats-pool": {"max_num_batched_tokens": -1},
    "itl-flat-high": {"max_num_seqs": -1},
    "itl-spikes-long-prefill": {"max_num_batched_tokens": -1, "long_prefill_token_threshold": 1},
    "myth-fragmentation": {"gpu_memory_utilization": 1},
    "kv-idle": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "kv-pressure": {"max_num_seqs": -1, "gpu_memory_utilization": 1},
    "long-and-short-mixed": {"long_prefill_token_threshold": 1},
    "overload": {"max_num_seqs": 0, "max_num_batched_tokens": 1},
    "front-end-slow": {"api_server_count": 1},
    "prefill-slow": {"max_num_batched_tokens": 1, "enable_prefix_caching": 1},
    "prefix-misses": {"enable_prefix_caching": 1},
    "scheduler-bound": {"max_num_seqs": -1},
    "seq-cap": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "short-behind-long": {"long_prefill_token_threshold": 1},
    "speculation-loses": {"num_speculative_tokens": -1},
    "speculation-preempts": {"num_speculative_tokens": -1},
}
"""Which way each cure turns each flag; 0: its cures turn it either way. Another cures something else."""

SPANS: Mapping[SignalUnit, tuple[float, float]] = {
    "s": (1e-4, 100),
    "tokens": (1, 20_000),
    "tokens/s": (0.1, 1e5),
    "requests": (0, 600),
    "1/s": (-5, 5),
    "share": (0, 1),
    "ratio": (0.1, 10),
    "count": (0, 5000),
    "s/token": (1e-6, 0.02),
}


def figure(chance: Random, unit: SignalUnit) -> float:
    """Evenly spread over orders of magnitude where these vary."""
    low, high = SPANS[unit]
    if low > 0 and high / low > 100:
        return math.exp(chance.uniform(math.log(low), math.log(high)))
    return chance.uniform(low, high)


def readings(chance: Random) -> dict[str, Reading]:
    """A figure for every signal, a few of them missing."""
    return {
        name: Missing(name, "metric", "missing")
        if chance.random() < 0.05
        else Number.exactly(figure(chance, signal.unit))
        for name, signal in SIGNALS.items()
    }


def command(chance: Random) -> dict[str, Any]:
    """Flags that a server accepts, each given or left at its default."""

    def maybe(value: Any) -> Any:
        return value if chance.random() < 0.6 else None

    length = chance.choice([256, 1000, 4096, 32_768])
    chunked = maybe(False) is None
    seqs = maybe(chance.randint(1, chance.choice([8, 64, 1100])))
    least = max(seqs or 1, 1 if chunked else length, 9)
    drafts = {"method": "ngram", "num_speculative_tokens": chance.randint(1, 8)}
    flags = {
        "max_model_len": length,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": maybe(least + chance.randint(0, chance.choice([16, 1000, 30_000]))),
        "enable_chunked_prefill": None if chunked else False,
        "enable_prefix_caching": maybe(chance.random() < 0.5),
        "long_prefill_token_threshold": maybe(chance.choice([0, 0, chance.randint(1, length)])),
        "gpu_memory_utilization": maybe(chance.randint(10, 100) / 100),
        "num_gpu_blocks_override": maybe(chance.randint(33, 10_000)),
        "kv_cache_memory_bytes": maybe(chance.randint(1 << 28, 1 << 34)),
        "kv_cache_dtype": maybe(chance.choice(["auto", "fp8", "fp8_e4m3"])),
        "speculative_config": maybe(drafts),
        "max_loras": maybe(chance.randint(1, 4)),
    }
    return {name: value for name, value in flags.items() if value is not None}


def view(chance: Random) -> EngineView:
    kind = chance.choice([VLLM, VLLM, BUNDLED, SGLANG])
    cpu = {"block_size": "128", "user_specified_block_size": "False"}
    config = chance.choice([{}, {"block_size": "16"}, cpu])
    given = command(chance) if chance.random() < 0.8 else None
    slo = chance.choice([0.02, 0.05, 0.2, math.inf])
    return EngineView(
        group=Group.of(instance="host:1", model_name="m", engine="0"),
        name="host:1",
        readings=readings(chance),
        queries={},
        flags=resolve(given, None, config, kind=kind, version=None),
        constants={
            "slo_itl_p99": slo,
            "slo_ttft_p95": 2.0,
            "slow_itl": min(slo, 0.2),
            "shared_prefix": 1000.0,
            "ranks": 1.0,
            "servers": 2.0,
            "adapters_running": float(chance.randint(0, 4)),
            "adapters_waiting": float(chance.randint(0, 4)),
            "adapters_seen": float(chance.randint(0, 8)),
            "reasons_told": float(chance.randint(0, 1)),
            **{name: float(chance.choice([0, 0, 1, 3])) for name in SIGNS},
        },
    )


def current(flags: Flags, name: str) -> float:
    """The value that a prescription starts from: what is known, or the best guess."""
    return flags.known[name].number.point if name in flags.known else math.inf


def complaint(flags: Flags, changes: Mapping[str, Any]) -> str | None:
    """What vLLM would say to the current flags with these changes, or None."""

    def after(name: str) -> float:
        return float(changes[name]) if changes.get(name) is not None else current(flags, name)

    if flags.kind is SGLANG:
        return None
    tokens, seqs, length = map(after, ("max_num_batched_tokens", "max_num_seqs", "max_model_len"))
    if tokens < seqs:
        return f"{tokens} tokens for {seqs} sequences"
    if not after("enable_chunked_prefill") and math.isfinite(length) and tokens < length:
        return f"{tokens} tokens for prompts of {length} in one piece"
    if after("long_prefill_token_threshold") > length:
        return "the threshold exceeds the context"
    if not 0 < after("gpu_memory_utilization") <= 1:
        return "memory utilization outside (0, 1]"
    return None


def check(book: Playbook, prescription: Prescription, flags: Flags) -> None:
    changes = dict(prescription.changes)
    if changes.get("speculative_config") is not None:
        changes["num_speculative_tokens"] = changes.pop("speculative_config")["num_speculative_tokens"]
    for name, value in changes.items():
        if value is None:
            held = flags.known["num_speculative_tokens" if name == "speculative_config" else name]
            assert held.number.high > 0, f"{name} is not set"
        elif isinstance(value, str):
            assert not str(flags.value(name)).startswith(value), f"{name} is {value} already"
        else:
            turn = DIRECTION[book.id][name]
            if "only if" not in prescription.text:  # else the current value is a guess
                assert not turn or (value - current(flags, name)) * turn > 0, (
                    f"{name}: {current(flags, name)} -> {value}"
                )
            assert isinstance(value, float if name == "gpu_memory_utilization" else int), name
            assert value >= 1 or name == "gpu_memory_utilization"
    if complaint(flags, {}) is None:
        assert complaint(flags, changes) is None
    if changes and None not in changes.values() and flags.kind is not SGLANG:
        typed = parse_command(f"vllm serve m {prescription.args}").flags
        assert json.dumps(typed, sort_keys=True) == json.dumps(dict(prescription.changes), sort_keys=True)


def test_no_proof_of_vllms_scheduler_speaks_of_another_server() -> None:
    told = {(book.id, cure.verification) for book in load_all() for cure in on(SGLANG, book)}
    assert {status for _, status in told} == {"not verified"}


def on(kind: ServerKind, book: Playbook) -> list[Prescription]:
    examined = [view(Random(seed)) for seed in range(40)]
    return [cure for one in examined if one.flags.kind is kind for cure in prescriptions(book, one)]


@pytest.mark.parametrize("book", load_all(), ids=lambda book: book.id)
def test_every_prescription_is_one_that_the_server_takes(book: Playbook) -> None:
    made = 0
    for seed in range(400):
        examined = view(Random(seed))
        for prescription in prescriptions(book, examined):
            made += 1
            try:
                check(book, prescription, examined.flags)
            except AssertionError as error:
                raise AssertionError(
                    f"seed {seed}: {prescription.args}: {error}\n{examined.flags}"
                ) from error
    assert made > 0
