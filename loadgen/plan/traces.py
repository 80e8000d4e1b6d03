"""Recorded traffic: arrivals, lengths and shared prefixes, and the schedule that replays them.

A trace never holds text. Prompts are drawn from the seed; where the trace says which blocks of a prompt
were the same as another's (``blocks``), so are the drawn ones, and a prefix cache finds what it found then.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from loadgen.plan.workload import (
    DEFAULT_VOCAB_SIZE,
    MAX_PROMPT_TOKENS,
    Mode,
    PlannedRequest,
    PromptSource,
    Schedule,
    WorkloadError,
    schedule_hash,
    warm,
)

_CLASSES = ((1000, "short"), (8000, "medium"), (math.inf, "long"))
"""Of rows that name no class, by prompt tokens as recorded."""


class TraceError(WorkloadError):
    """A trace cannot be read or replayed as asked; the message says where, what and the fix."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. ``arrival``: seconds after the first one. ``blocks``: one id for every ``block_tokens`` of
    the prompt, the last perhaps for fewer; equal ids are equal content."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    cls: str
    blocks: tuple[int, ...] = ()
    sampling: tuple[tuple[str, Any], ...] = ()
    """Further fields of the request's body, e.g. temperature."""


@dataclass(frozen=True)
class Trace:
    """Requests by arrival. ``notes`` say what was done to them since they were read."""

    name: str
    rows: tuple[TraceRow, ...]
    block_tokens: int = 0
    """Tokens of a block; 0: the trace knows nothing of shared prefixes."""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.rows:
            raise TraceError(f"{self.name}: no requests{' left' if self.notes else ''}")

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.rows[-1].arrival - self.rows[0].arrival

    @property
    def rate(self) -> float:
        """Mean requests per second; nan for less than two arrival times."""
        return (len(self.rows) - 1) / self.duration if self.duration else math.nan

    @property
    def gap_cv(self) -> float:
        """Coefficient of variation of the gaps between arrivals: 1 is Poisson, above comes in bursts."""
        gaps = np.diff([row.arrival for row in self.rows])
        return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() else math.nan

    def window(self, start: float, end: float) -> Trace:
        """The requests of [start, end) seconds, their times anew from 0. Raises TraceError for none."""
        rows = [replace(row, arrival=row.arrival - start) for row in self.rows if start <= row.arrival < end]
        if not rows:
            raise TraceError(
                f"{self.name}: no request arrives between {start:g} and {end:g} s; "
                f"it lasts {self.duration:g} s"
            )
        return self._changed(rows, f"of {start:g}-{end:g} s")

    def head(self, count: int) -> Trace:
        """The first ``count`` requests."""
        return self._changed(self.rows[:count], f"the first {count}")

    def scaled(self, *, rate: float = 1.0, length: float = 1.0) -> Trace:
        """Arrivals ``rate`` times as quick; prompts and outputs ``length`` times as long, at least 1 token.

        Blocks shrink with the prompts, so that the same share of each prompt stays shared. Raises TraceError.
        """
        if not (0 < rate < math.inf and 0 < length < math.inf):
            raise TraceError(f"{self.name}: scales must be positive numbers, got {rate:g} and {length:g}")
        rows = tuple(
            replace(
                row,
                arrival=row.arrival / rate,
                prompt_tokens=max(1, round(row.prompt_tokens * length)),
                output_tokens=max(1, round(row.output_tokens * length)),
            )
            for row in self.rows
        )
        blocks = max(1, round(self.block_tokens * length)) if self.block_tokens else 0
        notes = [f"rate x{rate:g}"] * (rate != 1) + [f"lengths x{length:g}"] * (length != 1)
        return replace(self, rows=rows, block_tokens=blocks, notes=(*self.notes, *notes))

    def dequantized(self, seed: int) -> Trace:
        """Arrivals spread uniformly over the tick that they were rounded to.

        The tick is the median gap between different times. Raises TraceError where fewer than half of the
        requests share their time with another: such times are not rounded.
        """
        times = np.array([row.arrival for row in self.rows])
        gaps = np.diff(times)
        if 2 * np.count_nonzero(gaps) >= len(times) or not gaps.any():
            raise TraceError(f"{self.name}: its times are not rounded to a tick; leave out --dequantize")
        tick = float(np.median(gaps[gaps > 0]))
        rng = np.random.default_rng((seed, 1))
        spread = times + rng.uniform(0, tick, len(times))
        order = np.argsort(spread, kind="stable")
        rows = [replace(self.rows[i], arrival=float(spread[i] - spread[order[0]])) for i in order]
        return self._changed(rows, f"spread over ticks of {tick:g} s")

    def fitted(self, max_model_len: int, oversized: str = "error") -> Trace:
        """Every request within ``max_model_len`` tokens: ``clip`` shortens prompt, then output; ``drop``
        leaves requests out. Raises TraceError if any is too long and ``oversized`` is ``error``."""
        long = [row for row in self.rows if row.prompt_tokens + row.output_tokens > max_model_len]
        if not long:
            return self
        longest = max(row.prompt_tokens + row.output_tokens for row in long)
        if oversized == "error":
            fit = math.floor(1000 * max_model_len / longest) / 1000
            raise TraceError(
                f"{self.name}: {len(long)} of {len(self.rows)} requests exceed the context of "
                f"{max_model_len} tokens, the longest has {longest}; give "
                f"--length-scale {fit:g}, --oversized clip or --oversized drop"
            )
        if oversized == "drop":
            kept = [row for row in self.rows if row.prompt_tokens + row.output_tokens <= max_model_len]
            return self._changed(kept, f"{len(long)} longer than {max_model_len} tokens dropped")
        rows = [_clipped(row, max_model_len) for row in self.rows]
        return self._changed(rows, f"{len(long)} clipped to {max_model_len} tokens")

    def schedule(
        self,
        *,
        seed: int,
        max_model_len: int,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        max_concurrency: int | None = None,
        oversized: str = "error",
        warmup: int = 1,
    ) -> Schedule:
        """The requests at their recorded times, with prompts drawn from ``seed``.

        ``warmup`` requests, of the first rows' lengths and with prompts of their own, go before. Raises
        TraceError, or WorkloadError where too much would have to be planned at once.
        """
        trace = self.fitted(max_model_len, oversized)
        total = sum(row.prompt_tokens for row in trace.rows)
        if total > MAX_PROMPT_TOKENS:
            raise TraceError(
                f"{self.name}: {total:,} prompt tokens are more than the {MAX_PROMPT_TOKENS:,} that are "
                "planned at once; replay a part (--trace-window 0s,600s) or shorten it (--length-scale)"
            )
        unique = PromptSource(vocab_size, np.random.default_rng((seed, 2)))
        blocks = _block_source(seed, trace.block_tokens, vocab_size)
        requests = tuple(
            PlannedRequest(
                index=index,
                cls=row.cls,
                intended=row.arrival,
                prompt_token_ids=_prompt(row, trace.block_tokens, blocks, unique),
                prompt=None,
                max_tokens=row.output_tokens,
                sampling=row.sampling,
            )
            for index, row in enumerate(trace.rows)
        )
        first = [
            PlannedRequest(-1 - k, row.cls, 0.0, unique.tokens(row.prompt_tokens), None, row.output_tokens)
            for k, row in enumerate(trace.rows[:warmup])
        ]
        mode: Mode = "open" if max_concurrency is None else "semi-open"
        duration = trace.rows[-1].arrival or None
        return Schedule(
            requests=requests,
            warmup=tuple(map(warm, first)),
            mode=mode,
            concurrency=max_concurrency,
            duration=duration,
            sha256=schedule_hash(requests, mode, max_concurrency, duration),
            description=f"{trace.description}; seed {seed}"
            + (f"; at most {max_concurrency} in flight (semi-open)" if max_concurrency else ""),
            seed=seed,
        )

    @property
    def description(self) -> str:
        """One line for the report."""
        did = f" ({', '.join(self.notes)})" if self.notes else ""
        return f"trace {self.name}{did}: {len(self.rows)} requests, {self.rate:.3g} req/s"

    def prefix_hits(self, capacity: int | None = None) -> tuple[int, int]:
        """(prompt tokens, those in blocks that a prefix cache still holds), requests one after another.

        The cache keeps the ``capacity`` blocks used last (None: all), and a prompt's hits end at its first
        miss. Only whole blocks count.
        """
        held: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for row in self.rows:
            whole = row.blocks[: row.prompt_tokens // self.block_tokens] if self.block_tokens else ()
            found = next((i for i, block in enumerate(whole) if block not in held), len(whole))
            hits += found * self.block_tokens
            for block in whole:
                held[block] = None
                held.move_to_end(block)
            while capacity is not None and len(held) > capacity:
                held.popitem(last=False)
        return sum(row.prompt_tokens for row in self.rows), hits

    def _changed(self, rows: Sequence[TraceRow], note: str) -> Trace:
        return replace(self, rows=tuple(rows), notes=(*self.notes, note))


def class_of(prompt_tokens: int) -> str:
    """The class of a row that names none."""
    return next(name for limit, name in _CLASSES if prompt_tokens <= limit)


def _clipped(row: TraceRow, max_model_len: int) -> TraceRow:
    output = min(row.output_tokens, max_model_len - 1)
    return replace(row, prompt_tokens=min(row.prompt_tokens, max_model_len - output), output_tokens=output)


def _block_source(seed: int, block_tokens: int, vocab_size: int) -> Callable[[int], tuple[int, ...]]:
    """The content of a block by its id: the same for equal ids, whatever was asked for before."""
    made: dict[int, tuple[int, ...]] = {}

    def content(block: int) -> tuple[int, ...]:
        if block not in made:
            source = PromptSource(vocab_size, np.random.default_rng((seed, 3, block)))
            made[block] = source.tokens(block_tokens)
        return made[block]

    return content


def _prompt(
    row: TraceRow, block_tokens: int, content: Callable[[int], tuple[int, ...]], unique: PromptSource
) -> tuple[int, ...]:
    """The recorded blocks, cut to the prompt's length; the rest is shared with no other."""
    needed = row.blocks[: -(-row.prompt_tokens // block_tokens)] if block_tokens else ()
    tokens = tuple(token for block in needed for token in content(block))[: row.prompt_tokens]
    missing = row.prompt_tokens - len(tokens)
    return tokens + unique.tokens(missing) if missing else tokens
