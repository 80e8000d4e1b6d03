"""Counters without noise: one workload with arrivals by step, counted, and compared exactly.

Over live HTTP, which requests meet in a step depends on timing. When requests are added before given steps,
steps, scheduled tokens, prefix hits and preemptions are the same on every machine, and one more of any is a
change of the engine. The tokens themselves depend on the arithmetic, so their hash is compared only between
runs in one environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from loadgen.measure import saved
from servers.errors import UserError
from servers.files import write_atomically

SCHEMA = "vtune.counters/1"


class CountersError(UserError):
    """Counts of different workloads, or a model, a flag or a workload with which nothing can be counted."""


@dataclass(frozen=True)
class Counters:
    """What the engine did, over the whole workload. Tokens, steps, blocks and requests as named."""

    schedule_sha256: str
    """Of the workload; ``steps_per_second`` turned its times into steps."""
    steps_per_second: float
    flags: Mapping[str, Any]
    requests: int
    steps: int
    scheduled_tokens: int
    output_tokens: int
    prefix_queries: int
    prefix_hits: int
    """Tokens."""
    preemptions: int
    draft_tokens: int
    accepted_tokens: int
    most_running: int
    fewest_free_blocks: int
    num_blocks: int
    environment: Mapping[str, Any]
    """Where the output was computed; ``output_sha256`` means something only there."""
    output_sha256: str

    def save(self, path: Path) -> None:
        write_atomically(path, [json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2), "\n"])

    @classmethod
    def load(cls, path: Path) -> Counters:
        """Raises SavedFileError."""
        return saved.read(
            cls,
            path,
            SCHEMA,
            if_missing="write one with `vtune bench counters --out`",
            if_unusable="count anew",
        )


@dataclass(frozen=True)
class CounterChange:
    """A counter that is not what it was."""

    name: str
    baseline: Any
    now: Any

    def __str__(self) -> str:
        if isinstance(self.baseline, int) and isinstance(self.now, int) and self.baseline:
            change = f" ({100 * (self.now / self.baseline - 1):+.1f} %)"
        else:
            change = ""
        return f"{self.name}: {self.baseline} before, {self.now} now{change}"


def differences(baseline: Counters, now: Counters) -> list[CounterChange]:
    """Every counter that differs. Raises CountersError for counters of different workloads."""
    for name in ("schedule_sha256", "steps_per_second", "flags"):
        before, after = getattr(baseline, name), getattr(now, name)
        if before != after:
            raise CountersError(
                f"the counters are of different workloads: {name} was {before!r} and is {after!r}; "
                "count the baseline anew with the same options"
            )
    same_place = dict(baseline.environment) == dict(now.environment)
    if not same_place and baseline.flags.get("speculative_config"):
        raise CountersError(
            "with speculation the counters depend on the text, and that on the machine: the baseline was "
            f"counted on {baseline.environment}, this is {now.environment}; count it here, or without "
            "speculation"
        )
    ignored = {"environment"} | ({"output_sha256"} if not same_place else set())
    return [
        CounterChange(field.name, getattr(baseline, field.name), getattr(now, field.name))
        for field in fields(Counters)
        if field.name not in ignored and getattr(baseline, field.name) != getattr(now, field.name)
    ]
