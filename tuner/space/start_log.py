"""What a server says while it starts: the flags that it chose by itself, its version, its memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from servers.flags.defaults import NAMES
from servers.flags.memory_plan import MemoryPlan
from servers.kinds import KINDS
from servers.known_flags import SWITCHES, resolve
from servers.metrics.page import PageReader
from servers.server_log import parse_log
from tuner.space.knobs import HELD, knobs_of

LINES = 400
"""Of the log, from its end, when the server has just come up."""
LARGE_TOKENS, LARGE_SEQS = 8192, 1024
"""vLLM's defaults on large GPUs (``EngineArgs.get_batch_defaults``), of which its log tells the first."""
_SGLANG = {
    "max_num_batched_tokens": re.compile(r"\bchunked_prefill_size=(\d+)"),
    "max_num_seqs": re.compile(r"\bmax_running_requests=(\d+)"),
    "gpu_memory_utilization": re.compile(r"\bmem_fraction_static=(0\.\d+)"),
}


@dataclass(frozen=True)
class StartLog:
    flags: Mapping[str, Any] = field(default_factory=dict)
    """In vLLM's names: what the server runs with beside the flags that it was given."""
    version: str | None = None
    memory: MemoryPlan | None = None


def read_start_log(
    log: str,
    server: str,
    given: Mapping[str, Any],
    *,
    metrics: str = "",
    version: str = "",
    proportional: bool = False,
) -> StartLog:
    """``server``: a kind of ``tuner.space.knobs``. ``given``: the flags it was started with. ``metrics``: one
    scrape of it. ``version``: as the server reports it. ``proportional``: see MemoryPlan.

    Where neither the flags nor the log say, a flag is what the doctor knows of this version and device.
    """
    facts = parse_log(log)
    version = version or facts.version or ""
    if version.endswith("+cpu"):
        facts = replace(facts, device="cpu")
    labels = next(iter(PageReader(["cache_config"]).read(metrics).labels("cache_config")), None)
    resolved = resolve(given, facts, labels, kind=KINDS[server], version=version or None)
    found: dict[str, Any] = {
        name: bool(flag.value) if name in SWITCHES else flag.value
        for name in _varied(server)
        if (flag := resolved.known.get(name)) is not None
    }
    tokens = resolved.known["max_num_batched_tokens"]
    seqs = resolved.known["max_num_seqs"]
    if not seqs.certain and tokens.origin == "log" and tokens.number.point >= LARGE_TOKENS:
        found["max_num_seqs"] = LARGE_SEQS
    if server == "sglang":
        found |= _sglang(log)
    memory = MemoryPlan.read(
        log, utilization=float(found["gpu_memory_utilization"]), proportional=proportional
    )
    return StartLog({n: v for n, v in found.items() if n not in given}, version or None, memory)


def _varied(server: str) -> list[str]:
    """The flags of every config that the doctor knows, too."""
    named = dict.fromkeys(knob.flag for knob in knobs_of(server) if knob.main or knob.name in HELD)
    return [name for name in named if name in NAMES]


def _sglang(log: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pattern in _SGLANG.items():
        if values := pattern.findall(log):
            found[name] = float(values[-1]) if "." in values[-1] else int(values[-1])
    return found
