"""One parameter of the search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna.trial import BaseTrial

Value = int | float | str | bool | None
"""What a rung of a ladder can be; None: the flag is not given."""
Param = int | float | str | bool
"""What the sampler sees of a rung."""


@dataclass(frozen=True)
class Axis:
    """A flag, or a key of a nested flag, and its values. Of ordered ones the sampler sees the index."""

    name: str
    values: tuple[Value, ...]
    ordered: bool = True
    needs: str | None = None
    """The axis that must have a certain value for this one to exist."""
    needs_value: Value = None
    """That value; None: any that is true."""

    @property
    def flag(self) -> str:
        return self.name.partition(".")[0]

    def exists(self, chosen: Mapping[str, Any]) -> bool:
        """Whether it exists beside these values of the axes before it."""
        if self.needs is None:
            return True
        value = chosen.get(self.needs)
        return bool(value) if self.needs_value is None else bool(value == self.needs_value)

    def suggest(self, trial: BaseTrial) -> Value:
        if self.ordered:
            return self.values[trial.suggest_int(self.name, 0, len(self.values) - 1)]
        return trial.suggest_categorical(self.name, self.values)

    def param(self, value: Value) -> Param:
        """The sampler's parameter for the rung nearest to ``value`` (by ratio, where positive)."""
        if not self.ordered:
            assert value is not None, "only ladders have a rung for a flag that is not given"
            return value
        if value in self.values:
            return self.values.index(value)
        return min(range(len(self.values)), key=lambda i: _distance(self.values[i], value))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _distance(a: Any, b: Any) -> float:
    return abs(math.log(a / b)) if is_number(a) and is_number(b) and a > 0 and b > 0 else math.inf
