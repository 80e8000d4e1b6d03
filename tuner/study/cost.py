"""What a study's time was spent on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.runs.result import TrialResult

SPENT_ON = "spent_on"
"""The study's attribute with the seconds that trials do not account for, by purpose."""
PURPOSES = {
    "profile": "calibration: the device's speed and the load",
    "start": "starting servers",
    "warm-up": "warming up, scraping, parsing",
    "load": "measuring trials",
    "simulation": "simulating",
    "choosing": "choosing configs",
    "confirmation": "confirming on fresh runs",
    "other loads": "comparing at other loads",
}
"""By the word that a study books them under, in the order of a study."""
REST = "anything else: stopping servers, reading results, waiting"


@dataclass(frozen=True)
class CostItem:
    purpose: str
    """For people."""
    seconds: float
    share: float
    """Of the whole."""


def time_spent(results: Sequence[TrialResult], spent_on: Mapping[str, float], total: float) -> list[CostItem]:
    """Every purpose that took time, and the rest of ``total`` seconds.

    Where several workers measured at once, their trials take more than the whole and there is no rest.
    """
    launched = [r for r in results if r.launched]
    booked = {
        purpose: spent_on.get(purpose, 0.0) + sum(r.seconds.get(purpose, 0.0) for r in launched)
        for purpose in PURPOSES
    }
    rest = max(0.0, total - sum(booked.values()))
    named = [(PURPOSES[purpose], seconds) for purpose, seconds in booked.items()] + [(REST, rest)]
    whole = sum(seconds for _, seconds in named)
    return [CostItem(name, seconds, seconds / whole) for name, seconds in named if seconds > 0]
