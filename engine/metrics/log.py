"""Log lines in vLLM's manner, so that readers of vLLM's logs read these."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

from engine.metrics.stats import StepStats

logger = logging.getLogger("vtune")
LOG_INTERVAL_SECONDS = 10.0
"""Seconds between two statistics lines."""


def configure(process: str) -> None:
    """Send the log of this process to stderr, each line led by ``process`` and its pid."""
    handler = logging.StreamHandler(sys.stderr)
    form = f"({process} pid={os.getpid()}) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
    handler.setFormatter(logging.Formatter(form, datefmt="%m-%d %H:%M:%S"))
    for name in ("vtune", "py.warnings"):
        target = logging.getLogger(name)
        target.handlers[:] = [handler]
        target.setLevel(logging.INFO)
        target.propagate = False
    logging.captureWarnings(True)


class StatLogger:
    """One line every interval: throughput, queues, KV usage, hit rate; a second one on speculation.

    The hit rate is over everything since the start. An engine that stays idle is silent after one last line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._last = StepStats()
        self._queries = self._hits = 0
        self._was_idle = True
        self._reset()

    def _reset(self) -> None:
        self._prompt = self._generated = self._preemptions = 0
        self._drafts = self._draft_tokens = self._accepted = 0
        self._accepted_per_position: list[int] = []

    def record(self, stats: StepStats) -> None:
        """Add one step."""
        self._last = stats
        self._prompt += stats.prompt_tokens - stats.prompt_tokens_cached
        self._generated += stats.generation_tokens
        self._preemptions += stats.preemptions
        self._queries += stats.prefix_queries
        self._hits += stats.prefix_hits
        self._drafts += stats.num_drafts
        self._draft_tokens += stats.num_draft_tokens
        self._accepted += stats.num_accepted_tokens
        counts, new = self._accepted_per_position, stats.accepted_per_position
        counts += [0] * (len(new) - len(counts))
        for position, accepted in enumerate(new):
            counts[position] += accepted

    def log(self) -> None:
        """Write the lines of the interval that ends now, and begin the next one."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        self._since = now
        idle = not (self._prompt or self._generated or self._last.num_running or self._last.num_waiting)
        if not (idle and self._was_idle):
            logger.info(self._line(seconds))
            if self._drafts:
                logger.info(self._speculation_line(seconds))
        self._was_idle = idle
        self._reset()

    def _line(self, seconds: float) -> str:
        parts = [
            f"Engine 000: Avg prompt throughput: {self._prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._generated / seconds:.1f} tokens/s",
            f"Running: {self._last.num_running} reqs",
            f"Waiting: {self._last.num_waiting} reqs",
        ]
        if self._preemptions:
            parts.append(f"Preemptions: {self._preemptions}")
        parts.append(f"CPU KV cache usage: {self._last.kv_usage * 100:.1f}%")
        if self._queries:
            parts.append(f"Prefix cache hit rate: {self._hits / self._queries * 100:.1f}%")
        return ", ".join(parts)

    def _speculation_line(self, seconds: float) -> str:
        positions = ", ".join(f"{accepted / self._drafts:.3f}" for accepted in self._accepted_per_position)
        return (
            f"SpecDecoding metrics: Mean acceptance length: {1 + self._accepted / self._drafts:.2f}, "
            f"Accepted throughput: {self._accepted / seconds:.2f} tokens/s, "
            f"Drafted throughput: {self._draft_tokens / seconds:.2f} tokens/s, "
            f"Accepted: {self._accepted} tokens, Drafted: {self._draft_tokens} tokens, "
            f"Per-position acceptance rate: {positions}, "
            f"Avg Draft acceptance rate: {self._accepted / max(self._draft_tokens, 1) * 100:.1f}%"
        )
