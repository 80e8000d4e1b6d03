"""CUDA graphs of decode steps: the launches of all layers, recorded once for a batch size and replayed.

A small model's decode step is hundreds of launches that take the host longer than the device. What a graph
reads and writes keeps its address: the workspace, the caches, and here the step's own numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

Launch = Callable[[], None]
Recorder = Callable[[Launch], Launch]
"""Runs what launches something once; returns what launches the same again."""

NUMBERS_PER_SEQUENCE = 7
"""Position, slot, query start, context length, table start, and a tile's sequence and first query."""
ALIGNMENT = 64
"""Numbers that lie between these, at most."""


class CudaRecorder:
    """Records CUDA graphs, which share their scratch memory, since they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Launch) -> Launch:
        # Compiles kernels and starts libraries, neither of which can be recorded.
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        replay: Launch = graph.replay
        return replay


class LayerGraphs:
    """The graphs of one decoder, by their size; each is recorded when a step first needs it."""

    def __init__(
        self, sizes: Sequence[int], blocks_per_sequence: int, device: torch.device, record: Recorder
    ) -> None:
        self.sizes = sorted(sizes)
        self._record = record
        self._replays: dict[int, Launch] = {}
        numbers = self.sizes[-1] * (NUMBERS_PER_SEQUENCE + blocks_per_sequence) + ALIGNMENT
        self._numbers = torch.zeros(numbers, dtype=torch.int32, device=device)

    def size_for(self, sequences: int) -> int:
        """The smallest size that holds that many sequences; 0 where none does."""
        place = bisect_left(self.sizes, sequences)
        return self.sizes[place] if sequences and place < len(self.sizes) else 0

    def place(self, numbers: torch.Tensor) -> torch.Tensor:
        """A step's numbers, where the graphs read them, and the room behind them for those of later steps."""
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)
        return self._numbers

    def run(self, size: int, launch: Launch) -> None:
        """What ``launch`` does, whose arguments lie where they lay when the size was first run."""
        replay = self._replays.get(size)
        if replay is None:
            self._replays[size] = self._record(launch)
        else:
            replay()
