"""What a server says while it starts: the flags that it chose by itself, its version, its memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from servers.kind import ServerKind
from servers.known_flags import SWITCHES, resolve
from servers.memory_plan import MemoryPlan
from servers.metrics.page import PageReader
from servers.server_log import parse_log

LINES = 400
"""Of the log, from its end, when the server has just come up."""
LARGE_TOKENS, LARGE_SEQS = 8192, 1024
"""vLLM's defaults on large GPUs (``EngineArgs.get_batch_defaults``), of which its log tells the first."""


@dataclass(frozen=True)
class StartLog:
    flags: Mapping[str, Any] = field(default_factory=dict)
    """In vLLM's names: what the server runs with beside the flags that it was given."""
    version: str | None = None
    memory: MemoryPlan | None = None


def read_start_log(
    log: str,
    kind: ServerKind,
    given: Mapping[str, Any],
    names: Collection[str],
    *,
    metrics: str = "",
    version: str = "",
    proportional: bool = False,
) -> StartLog:
    """``given``: the flags it was started with. ``names``: those that are asked for. ``metrics``: one scrape.
    ``version``: as the server reports it. ``proportional``: see MemoryPlan.

    Where neither the flags nor the log say, a flag is what is known of this version and device.
    """
    facts = parse_log(log)
    version = version or facts.version or ""
    labels = next(iter(PageReader(["cache_config"]).read(metrics).labels("cache_config")), None)
    known = resolve(given, facts, labels, kind=kind, version=version or None).known
    found: dict[str, Any] = {
        name: bool(known[name].value) if name in SWITCHES else known[name].value for name in names
    }
    tokens, seqs = known["max_num_batched_tokens"], known["max_num_seqs"]
    if not seqs.certain and tokens.origin == "log" and tokens.number.point >= LARGE_TOKENS:
        found["max_num_seqs"] = LARGE_SEQS
    share = float(known["gpu_memory_utilization"].value)
    plan = facts.memory.settled(share, proportional) if facts.memory else None
    return StartLog({n: v for n, v in found.items() if n not in given}, version or None, plan)
