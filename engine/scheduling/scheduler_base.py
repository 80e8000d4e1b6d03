"""What every scheduler has: its requests, and the counts that the metrics read."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.kv.kv_cache import KVCacheManager
from engine.metrics.stats import SchedulerStats
from engine.request import Request
from engine.scheduling.waiting import WaitingQueue


class SchedulerBase:
    """A scheduler's requests, running and waiting, and their blocks. ``config.max_model_len`` is resolved."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager, waiting: WaitingQueue) -> None:
        assert config.max_model_len is not None
        self.config = config
        self.max_model_len = config.max_model_len
        self.kv, self.waiting = kv, waiting
        self.running: list[Request] = []
        """In order of admission; never sorted."""
        self.stats = SchedulerStats()
        self._requests: dict[str, Request] = {}
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0..1. Cached blocks without a reference are not in use."""
        return self.kv.pool.usage
