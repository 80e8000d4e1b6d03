"""What a study reports while it runs. The base class shows nothing; see ``display``."""

from __future__ import annotations

from loadgen.plan.load_policy import Progress
from tuner.runs.result import TrialResult


class Observer:
    """Methods are called from the thread that runs the study, in the order of events; none may raise."""

    def phase(self, name: str) -> None:
        """A phase begins: baseline, search, confirmation, report."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""

    def budget(self, spent: float, total: float | None) -> None:
        """Seconds spent on the study so far, and its budget; None: a number of trials limits it."""

    def trial_begins(self, number: int, changes: str, origin: str) -> None:
        """``changes`` against the baseline, "" for the baseline itself."""

    def step(self, text: str, seconds: float | None = None) -> None:
        """A step of a trial begins; ``seconds`` it should take, where known."""

    def load(self, progress: Progress) -> None:
        """Called some times a second while a load runs."""

    def trial_ends(self, result: TrialResult, outcome: str) -> None:
        """``outcome``: a line for people."""

    def incumbent(self, result: TrialResult, outcome: str) -> None:
        """``result`` is the best so far."""
