"""The knobs: every flag that can be varied, as data. A knob becomes an axis once its surroundings are known.

Ranges are expressions (``servers.expression``) over the baseline's flags and over

``max_model_len``    the model's context, tokens
``longest_request``  prompt and output of the workload's longest request, tokens (else max_model_len)
``kv_requests``      how many of the workload's mean requests the baseline's KV pool holds (else inf)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servers.errors import UserError
from servers.expression import Numbers, parse_expression
from servers.flags.defaults import NAMES, Platform
from servers.flags.offered_flags import OfferedFlags
from servers.kinds import KINDS
from servers.memory_plan import MemoryPlan
from tuner.space.axis import Axis, Value, is_number

SPECULATION = "speculative_config"
DRAFTS = f"{SPECULATION}.num_speculative_tokens"
METHOD = f"{SPECULATION}.method"
THRESHOLD = "long_prefill_token_threshold"
MAX_RUNGS = 1000
_LOOKUP = {"method": "ngram", "num_speculative_tokens": 1}
"""The least of a speculative config that needs no second model."""


class SpaceError(UserError):
    """``--fix``, ``--vary`` or a space file names something that cannot be fixed or varied."""


@dataclass(frozen=True)
class Knob:
    """One flag, or one key of a nested flag (``flag.key``).

    A ladder has the rungs ``values``, or those from ``low`` to ``high`` (expressions) by ``step``; 0: powers
    of two and the steps half-way. The baseline's own value is always among them.
    """

    name: str
    values: tuple[Value, ...] = ()
    low: str = ""
    high: str = ""
    step: float = 0.0
    last: tuple[Value, ...] = ()
    """Rungs above the ladder: a threshold's 0 behaves like one that no prompt reaches."""
    ordered: bool = True
    main: bool = False
    """Searched by default; the others on ``--vary``."""
    servers: tuple[str, ...] = ()
    """Names of the kinds of server that have it so; (): every kind that has such a flag."""
    default: Value = None
    """What it is when it is not set, where ``servers.flags.defaults`` has no number for it; None: unset."""
    needs: str | None = None
    needs_value: Value = None
    """The knob that this one depends on, and the value it must have; None: any that is true."""
    inactive_with: tuple[str, ...] = ()
    """Flags beside which this one does nothing."""
    on_cpu: tuple[Value, ...] | None = None
    """``values`` for vLLM's build for CPUs, where they differ; (): there it does nothing."""

    @property
    def flag(self) -> str:
        return self.name.partition(".")[0]

    def exists(self, server: str) -> bool:
        """Whether a kind of server has it. Drafts are those of n-grams, which need no second model."""
        kind = KINDS[server]
        if self.servers:
            return server in self.servers
        return kind.has(self.flag) and (self.flag != SPECULATION or kind.prompt_lookup)

    def axis(self, numbers: Numbers, baseline: Value) -> Axis:
        """Its rungs where the expressions' names have these values. Raises SpaceError."""
        rungs = [*self.values, *self._ladder(numbers)]
        ends = [v for v in self.last if v not in rungs]
        if is_number(baseline) and (odd := [v for v in (*rungs, *ends) if not is_number(v)]):
            raise SpaceError(f"{self.name}: is the number {baseline} now, and {odd[0]!r} is none.")
        if baseline is not None and baseline not in (*rungs, *ends):
            rungs.append(baseline)
        if self.ordered:
            rungs = sorted(dict.fromkeys(rungs), key=lambda v: float(v or 0))
            if baseline is None and self.needs is None:
                ends.append(None)
        return Axis(
            self.name, tuple(dict.fromkeys((*rungs, *ends))), self.ordered, self.needs, self.needs_value
        )

    def _ladder(self, numbers: Numbers) -> list[Value]:
        if not self.low:
            return []
        low, high = (self._bound(text, numbers) for text in (self.low, self.high))
        if not self.step:
            return list(geometric(low, high))
        if not (high - low) / self.step < MAX_RUNGS:
            raise SpaceError(f"{self.name}: more than {MAX_RUNGS} values from {low:g} to {high:g}.")
        count = math.floor((high - low) / self.step + 1e-9) + 1
        steps = (round(low + at * self.step, 6) for at in range(max(count, 0)))
        return [int(value) if value == int(value) else value for value in steps]

    def _bound(self, text: str, numbers: Numbers) -> float:
        try:
            return parse_expression(text).on_numbers()(numbers)
        except KeyError as missing:
            raise SpaceError(
                f"{self.name}: {text!r}: {missing.args[0]} is not known here; known are "
                f"{', '.join(sorted(numbers))}."
            ) from None
        except ZeroDivisionError:
            raise SpaceError(f"{self.name}: {text!r}: divides by 0.") from None


def _switch(name: str, default: bool, servers: tuple[str, ...] = ()) -> Knob:
    return Knob(name, (True, False), ordered=False, default=default, servers=servers)


KNOBS = (
    Knob(
        "max_num_batched_tokens",
        low="max(32, max_num_batched_tokens / 32)",
        high="max(4 * max_num_batched_tokens, 2048)",
        main=True,
    ),
    Knob(
        "max_num_seqs",
        low="max(4, max_num_seqs / 16)",
        high="min(4 * max_num_seqs, max(max_num_seqs, 1024), max(max_num_seqs, 4 * kv_requests))",
        main=True,
    ),
    Knob(
        "gpu_memory_utilization",
        (0.75, 0.8, 0.85, 0.9, 0.95),
        main=True,
        inactive_with=("kv_cache_memory_bytes", "num_gpu_blocks_override"),
    ),
    Knob(
        THRESHOLD,
        low="max(32, max_model_len / 128)",
        high="min(max_model_len / 4, longest_request)",
        last=(0,),
        main=True,
    ),
    Knob(DRAFTS, (0, 1, 2, 3, 4, 5), main=True),
    Knob(METHOD, ("ngram", "suffix"), ordered=False, needs=DRAFTS, servers=("bundled",)),
    Knob(
        f"{SPECULATION}.prompt_lookup_min",
        (1, 2, 3),
        main=True,
        needs=DRAFTS,
        servers=("bundled", "vllm"),
    ),
    Knob(
        f"{SPECULATION}.prompt_lookup_max",
        (3, 4, 5),
        main=True,
        needs=DRAFTS,
        servers=("bundled", "vllm"),
    ),
    Knob("max_num_partial_prefills", (1, 2, 4, 8), servers=("bundled",)),
    Knob("max_num_partial_prefills", (1, 2, 4, 8), default=1, servers=("vllm",)),
    Knob(
        "max_long_partial_prefills",
        (1, 2, 4),
        default=1,
        needs="max_num_partial_prefills",
    ),
    Knob("block_size", (8, 16, 32, 64), default=16, servers=("bundled",)),
    Knob("block_size", (16, 32, 64, 128), servers=("vllm",), on_cpu=(32, 64, 128)),
    Knob("block_size", (1, 16, 32, 64), default=1, servers=("sglang",)),
    Knob(
        "kv_cache_dtype",
        ("auto", "fp8", "int8_per_token_head"),
        ordered=False,
        default="auto",
        servers=("bundled",),
    ),
    Knob("kv_cache_dtype", ("auto", "fp8"), ordered=False, default="auto", servers=("vllm", "sglang")),
    Knob("max_model_len", low="longest_request", high="max_model_len"),
    _switch("enable_prefix_caching", True),
    _switch("enable_chunked_prefill", True),
    _switch("async_scheduling", False, ("bundled",)),
    _switch("async_scheduling", True, ("vllm", "sglang")),
    Knob(
        "scheduling_policy",
        ("fcfs", "priority"),
        ordered=False,
        default="fcfs",
    ),
    Knob("max_cudagraph_capture_size", low="8", high="512", servers=("vllm", "sglang"), on_cpu=()),
    Knob("tensor_parallel_size", (1, 2, 4, 8)),
    Knob("api_server_count", (1, 2, 4), default=1),
    Knob("stream_interval", (1, 2, 4, 8), default=1),
)
"""In the order in which they are searched and shown."""

ALWAYS_NAMED = ("enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy")
"""Beside the main knobs, what every config names: rules and starting points ask for them."""


def default_of(knob: Knob, server: str) -> Value:
    """What the flag is where it is not set: the doctor's figure, else the knob's own."""
    if knob.name == DRAFTS:
        return 0
    if knob.flag in NAMES:
        usual = KINDS[server].default(knob.flag, Platform()).point
        if knob.values == (True, False):
            return bool(usual)
        return int(usual) if usual == int(usual) else usual
    return knob.default


def knobs_of(server: str) -> tuple[Knob, ...]:
    return tuple(knob for knob in KNOBS if knob.exists(server))


def started_with(server: str) -> list[str]:
    """The flags of every config of which a start tells, or a default is known."""
    named = dict.fromkeys(knob.flag for knob in knobs_of(server) if knob.main or knob.name in ALWAYS_NAMED)
    return [name for name in named if name in NAMES]


@dataclass(frozen=True)
class Surroundings:
    """What decides which knobs there are, and how far they reach."""

    server: str = "bundled"
    max_model_len: int = 4096
    longest_request: int | None = None
    mean_request: float | None = None
    """Prompt and output tokens of the workload; None: not known."""
    offered: OfferedFlags | None = None
    """What the server's program takes, by its own help; None: not known."""
    memory: MemoryPlan | None = None
    """The baseline's, from the log of its start."""

    def numbers(self, numbers: Numbers) -> dict[str, float]:
        """``numbers``, and the names that ranges are made of."""
        pool = math.inf
        if self.memory and self.mean_request:
            pool = self.memory.kv_tokens / self.mean_request
        return {
            "max_model_len": self.max_model_len,
            "longest_request": min(self.longest_request or self.max_model_len, self.max_model_len),
            "kv_requests": pool,
            **numbers,
        }

    @property
    def cpu(self) -> bool:
        """Whether the server is vLLM's build for CPUs, which says so in its version."""
        return self.offered is not None and (self.offered.version or "").endswith("+cpu")

    @property
    def program(self) -> str:
        """Who offers flags, for people: ``vllm 0.32.0``."""
        assert self.offered is not None, "asked only where it is known"
        return " ".join(filter(None, [Path(self.offered.program).name, self.offered.version]))

    def spelling(self, flag: str) -> str:
        """The server's own name of a flag."""
        return KINDS[self.server].spelling.own(flag, self.offered)

    def absent(self, knob: Knob, baseline: Mapping[str, Any]) -> str:
        """Why the knob is left alone here; "" where it can matter."""
        flag = self.spelling(knob.flag)
        if self.offered is not None and flag not in self.offered:
            return f"{self.program} has no --{flag.replace('_', '-')}"
        if self.offered is not None and knob.flag == SPECULATION and not self._takes(SPECULATION, _LOOKUP):
            return f"{self.program} does not speculate by n-grams"
        if knob.on_cpu == () and self.cpu:
            return "it has no effect on a CPU"
        if knob.flag == "gpu_memory_utilization" and self.memory and self.memory.pinned:
            return "the KV pool is set in bytes, which leaves it without effect"
        if beside := next((flag for flag in knob.inactive_with if baseline.get(flag) is not None), None):
            return f"--{beside.replace('_', '-')} is given, which leaves it without effect"
        return ""

    def narrowed(self, knob: Knob) -> Knob:
        """With the values that this build and this program take."""
        if knob.on_cpu and self.cpu:
            knob = replace(knob, values=knob.on_cpu)
        if self.offered is None or "." in knob.name:
            return knob
        return replace(knob, values=tuple(v for v in knob.values if self._takes(knob.flag, v)))

    def _takes(self, flag: str, value: Any) -> bool:
        assert self.offered is not None, "asked only where it is known"
        written = KINDS[self.server].spelling.to_own({flag: value}, self.offered)
        return all(self.offered.takes(name, own) for name, own in written.items())


def geometric(low: float, high: float, include: int = 0) -> tuple[int, ...]:
    """Powers of two and the steps half-way (…, 128, 192, 256, …) in [low, high], and ``include`` if > 0."""
    steps = {base * 2**power for base in (2, 3) for power in range(31)}
    chosen = {step for step in steps if low <= step <= high}
    return tuple(sorted(chosen | ({include} if include > 0 else set())))
