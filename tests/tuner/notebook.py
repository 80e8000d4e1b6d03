"""An observer for tests."""

from tuner.study.observer import Observer


class Notebook(Observer):
    """Writes down what it is told."""

    def __init__(self):
        self.notes, self.phases, self.trials = [], [], []

    def note(self, text):
        self.notes.append(text)

    def phase(self, name):
        self.phases.append(name)

    def trial_ends(self, result, outcome):
        self.trials.append((result.number, result.status, outcome))
