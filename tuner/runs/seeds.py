"""Which seed belongs to which measurement of a study, so that no two share their requests by accident."""

from __future__ import annotations

from dataclasses import dataclass

SEEDS_PER_STUDY = 10_000
"""A study has so many seeds; those of the next one begin behind them."""
_CONFIRMATION, _LONE, _CAPACITY, _REPEATS, _LEVELS = 1_000, 2_000, 3_000, 5_000, 9_000


@dataclass(frozen=True)
class Seeds:
    """Of the study whose own seed is ``study``."""

    study: int

    @property
    def _first(self) -> int:
        return self.study * SEEDS_PER_STUDY

    def request_set(self, number: int, parts: int) -> list[int]:
        """Of a trial's requests, a seed for each of the ``parts`` that they are drawn in. Number 0 is what
        every config gets, others are repeats.
        """
        first = self._first + (_REPEATS + parts * number if number else 0)
        return [first + part for part in range(parts)]

    def confirmation(self, pairs: int) -> list[int]:
        """One for every pair of runs."""
        return [self._first + _CONFIRMATION + pair for pair in range(pairs)]

    def pair(self, seed: int) -> int:
        """Which pair of a confirmation has that seed."""
        return seed - self._first - _CONFIRMATION

    def level(self, repeat: int) -> int:
        """Of the ``repeat``-th run at another level of load."""
        return self._first + _LEVELS + repeat

    def lone(self, attempt: int) -> int:
        """Of requests that have the server to themselves."""
        return self._first + _LONE + attempt

    def capacity(self, count: int) -> int:
        """Of a loop of ``count`` requests: the next loop's prompts must not be in the prefix cache."""
        return self._first + _CAPACITY + count
