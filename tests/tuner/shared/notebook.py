"""An observer for tests."""

from typing import Any

from tuner.study.observer import Observer


class Notebook(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.phases: list[str] = []
        self.trials: list[tuple[int, str, Any]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def trial_ends(self, result: Any, outcome: Any) -> None:
        self.trials.append((result.number, result.status, outcome))
