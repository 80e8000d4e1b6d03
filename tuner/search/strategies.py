"""The strategies by the names that the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.search.model import ModelStrategy
from tuner.search.prior import Prior
from tuner.search.strategy import RandomStrategy, StaircaseStrategy, Strategy, TpeStrategy

AUTO = "auto"
"""The one that the benchmark favours."""
STRATEGIES: Mapping[str, type[Strategy]] = {
    "gp": ModelStrategy,
    "tpe": TpeStrategy,
    "random": RandomStrategy,
    "staircase": StaircaseStrategy,
}


def make_strategy(name: str = AUTO, seed: int = 0, prior: Prior | None = None) -> Strategy:
    """``name``: AUTO or a key of STRATEGIES. Only the model makes use of a prior."""
    chosen = ModelStrategy if name == AUTO else STRATEGIES[name]
    return chosen(seed, prior) if issubclass(chosen, ModelStrategy) else chosen(seed)
