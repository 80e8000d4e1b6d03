"""What a trial's measurement is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from servers.slo.bounds import Bound
from servers.slo.objective import Slo
from tuner.runs.result import Measurement, TrialResult


@dataclass(frozen=True)
class Criteria:
    """Bounds, each that is relative to the baseline as what the baseline has."""

    slo: Slo
    bounds: tuple[Bound, ...]
    short_bounds: tuple[Bound, ...] = ()
    """Of the short rung, which ends a trial that misses one for certain."""
    incumbent: Measurement | None = None
    """The best config's short rung; None: no trial is out of its reach."""
    incumbent_whole: Measurement | None = None
    """All of the best config's measurement."""

    @classmethod
    def of(
        cls, slo: Slo, baseline: TrialResult | None, best: TrialResult | None, *, repeated: bool = False
    ) -> Self:
        """The baseline is measured in full, whatever its short rung says: bounds are relative to it. So are
        ``repeated`` trials, which the study judges once it has the baseline's own.
        """
        unmeasured = slo.resolve(lambda metric, cls: math.nan)
        if repeated or baseline is None:
            return cls(slo, unmeasured)
        if baseline.measurement is None or baseline.short is None:
            return cls(slo, unmeasured, unmeasured)
        whole, short = baseline.measurement, baseline.short

        def worse(metric: str, cls: str | None) -> float:
            """Of the baseline's short rung and its whole measurement, as either may lack the rare stalls."""
            return float(np.fmax(short.value(metric, cls), whole.value(metric, cls)))

        return cls(
            slo,
            slo.resolve(whole.value),
            slo.resolve(worse),
            best.short if best else None,
            best.measurement if best else None,
        )
