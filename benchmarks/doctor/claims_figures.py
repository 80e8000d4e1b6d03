"""A claim, and the figures that an experiment sets beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["change", "amount", "at most", "at least"]


@dataclass(frozen=True)
class Figure:
    """``kind``: a change is a ratio after/before; an amount has a ``unit``; the rest are bounds on an
    amount."""

    name: str
    claimed: float
    found: float
    kind: Kind = "change"
    unit: str = ""

    @property
    def agrees(self) -> bool:
        """Between half and twice what is claimed (of a change: of its logarithm); bounds hold."""
        if self.kind == "at most":
            return self.found <= self.claimed
        if self.kind == "at least":
            return self.found >= self.claimed
        if self.kind == "amount":
            return 0.5 <= self.found / self.claimed <= 2
        return 0.5 <= math.log(self.found) / math.log(self.claimed) <= 2

    @property
    def same_direction(self) -> bool:
        """Of a change: it goes the same way, by a twentieth at least."""
        if self.kind != "change":
            return False
        claimed, found = math.log(self.claimed), math.log(self.found)
        return claimed * found > 0 and abs(found) >= math.log(1.05)

    @property
    def claimed_text(self) -> str:
        prefix = {"at most": "<= ", "at least": ">= "}.get(self.kind, "")
        return prefix + self._show(self.claimed)

    @property
    def found_text(self) -> str:
        return self._show(self.found)

    def _show(self, value: float) -> str:
        if self.kind != "change":
            return (
                f"{value:,.3g} {self.unit}".strip() if value < 1000 else f"{value:,.0f} {self.unit}".strip()
            )
        return f"{value - 1:+.0%}" if value < 2 else f"x{value:.3g}"


@dataclass(frozen=True)
class Claim:
    """``says``: the claim in a sentence; ``because``: why what is found differs, or why it holds."""

    says: str
    setup: str
    experiment: Callable[[], Iterator[Figure]]
    because: str
