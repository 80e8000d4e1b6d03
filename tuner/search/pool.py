"""The configs that a search chooses from, with what is computed of each but once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.search.crashes import Codes, codes_of
from tuner.search.gp import Array
from tuner.space.space import Axis, Config, Space, Value, config_key

MAX_POOL_CONFIGS = 4096
"""Configs that are weighed: a whole space of so many, else a random part and the best one's neighbours."""


@dataclass(frozen=True)
class Candidate:
    """One config. ``x``: see :func:`encode`; ``codes``: see ``crashes.codes_of``."""

    config: Config
    key: str
    x: Array
    codes: Codes
    changes: int
    """Flags that differ from the baseline's."""


@dataclass(frozen=True)
class CandidatePool:
    """Rows, and columns over them."""

    rows: Sequence[Candidate]
    x: Array
    codes: Codes
    changes: Array

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, rows: Sequence[Candidate]) -> CandidatePool:
        return cls(
            rows,
            np.array([row.x for row in rows]),
            np.array([row.codes for row in rows]),
            np.array([row.changes for row in rows], dtype=float),
        )

    def only(self, chosen: Any) -> CandidatePool:
        """``chosen``: indices, or a flag for each row."""
        at = np.arange(len(self.rows))[chosen]
        return CandidatePool([self.rows[i] for i in at], self.x[at], self.codes[at], self.changes[at])


class CandidatePools:
    """Makes them of one space. Configs that a rule refuses are in none."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._rows: dict[str, Candidate | None] = {}
        self._whole: tuple[str, ...] | None = None

    def fresh(self, rng: random.Random, taken: frozenset[str], near: Config | None) -> CandidatePool:
        """Those not ``taken``. Of a space that is too large to be weighed whole: some at random, and the
        neighbours of ``near``.
        """
        keys = self._whole
        if keys is None:
            small = self.space.size <= MAX_POOL_CONFIGS
            if len(self._rows) > 10 * MAX_POOL_CONFIGS:
                self._rows = {}
            sampled: Iterable[Config] = self.space.sample(rng, MAX_POOL_CONFIGS)
            if not small and near is not None:
                sampled = itertools.chain(sampled, neighbours(self.space, near))
            keys = tuple(dict.fromkeys(map(self._add, sampled)))
            self._whole = keys if small else None
        rows = (self._rows[key] for key in keys if key not in taken)
        return CandidatePool.of([row for row in rows if row is not None])

    def of(self, configs: Iterable[Config]) -> CandidatePool:
        """Of these, whatever rules say."""
        return CandidatePool.of(
            [self._rows[key] or self._row(c, key) for c in configs if (key := self._add(c))]
        )

    def _add(self, config: Config) -> str:
        key = config_key(config)
        if key not in self._rows:
            self._rows[key] = None if self.space.refusals(config) else self._row(config, key)
        return key

    def _row(self, config: Config, key: str) -> Candidate:
        space, params = self.space, self.space.params(config)
        x = np.array(_coordinates(space.axes, params))
        return Candidate(config, key, x, codes_of(space, params), len(space.changes(config)))


def encode(space: Space, configs: Sequence[Config]) -> Array:
    """Points (m, d) of the unit cube: a dimension an ordered axis, one a value of the others."""
    return np.array([_coordinates(space.axes, space.params(config)) for config in configs])


def _coordinates(axes: Sequence[Axis], params: Mapping[str, Value]) -> list[float]:
    found: list[float] = []
    for axis in axes:
        value = params.get(axis.name)
        if not axis.ordered:
            found += [0.5 * (value == other) for other in axis.values]
        elif value is None:  # it depends on another that is off
            found.append(0.5)
        else:
            assert isinstance(value, int), "the parameter of an ordered axis is an index"
            found.append(value / max(len(axis.values) - 1, 1))
    return found


def neighbours(space: Space, config: Config) -> Iterator[Config]:
    """Configs that differ from ``config`` in one axis, or by one rung in two."""
    own = space.params(config)
    params = {axis.name: own.get(axis.name, _values(axis)[len(axis.values) // 2]) for axis in space.axes}
    steps: list[tuple[str, Value]] = []
    for axis in space.axes:
        at = params[axis.name]
        for to in _values(axis):
            yield space.config({**params, axis.name: to})
            if isinstance(to, int) and isinstance(at, int) and abs(to - at) == 1:
                steps.append((axis.name, to))
    for (first, to), (second, other) in itertools.combinations(steps, 2):
        yield space.config({**params, first: to, second: other})


def _values(axis: Axis) -> Sequence[Value]:
    """Every parameter of the axis."""
    return range(len(axis.values)) if axis.ordered else axis.values
