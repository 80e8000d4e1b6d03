"""What a server's log says, whichever kind of server wrote it, and what a format of logs is."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from servers.memory_plan import MemoryPlan

_PAIR = re.compile(r"(?:'(\w+)': |\b(\w+)=)('[^']*'|-?[\d.]+|True|False|None|\{[^{}]*\})")


@dataclass(frozen=True)
class LogFacts:
    """What a log says. ``complete``: the command line was there, so a flag that is not in it is a default."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    """By vLLM's names."""
    complete: bool = False
    version: str | None = None
    kv_cache_tokens: int | None = None
    device: str | None = None
    memory: MemoryPlan | None = None
    durations: Mapping[str, float] = field(default_factory=dict)
    """``startup_seconds``, ``compile_seconds``, ``load_seconds`` of the last start, as far as it says."""
    scrapes: tuple[tuple[int, str], ...] = ()
    """The lines on load as exposition text, so that a log alone can be diagnosed."""
    kind: str = "vllm"
    """Name of the kind of server that wrote it."""
    incidents: Mapping[str, float] = field(default_factory=dict)
    """How often it tells of each kind of failure (see ``incidents.py``)."""


@dataclass(frozen=True)
class LogFormat:
    """How the logs of a kind of server are read."""

    wrote: Callable[[str], bool]
    """Whether a line of a log's text is one of this server's."""
    parse: Callable[[str], LogFacts]
    """What it says; the flags by the server's own names. Of a restarted server the last start counts."""


def pairs(text: str) -> dict[str, Any]:
    """``name=value`` and ``'name': value``, where the values are literals, without those that are None."""
    found: dict[str, Any] = {}
    for match in _PAIR.finditer(text):
        try:
            value = ast.literal_eval(match[3])
        except (ValueError, SyntaxError):
            value = match[3]
        if value is not None:
            found.setdefault(match[1] or match[2], value)
    return found


def page(engine: str, samples: Mapping[str, float]) -> str:
    """One engine's samples as exposition text, by name or ``name{label="value"}``."""
    parted = ((*key.rstrip("}").partition("{"), value) for key, value in samples.items())
    return "".join(
        f'{name}{{engine="{engine}"{"," if more else ""}{more}}} {value}\n' for name, _, more, value in parted
    )
