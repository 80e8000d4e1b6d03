"""What a study looks like while it runs: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadgen.plan.load_policy import Progress
from tuner.runs.result import TrialResult
from tuner.study.budget import format_seconds
from tuner.study.observer import Observer

LAST_OUTCOMES = 6
STYLES = {"measured": "green", "stopped": "yellow", "failed": "red", "refused": "dim", "duplicate": "dim"}


class Terminal(Console):
    """Standard error. Rich ends the process with status 1 once its reader is gone, which would say that
    no config holds the SLO.
    """

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class PlainObserver(Observer):
    """A line an event on ``console``: for logs, CI and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _line(self, text: str) -> None:
        stamp = f"[{format_seconds(time.monotonic() - self._begun):>12}]"
        self._console.print(f"{stamp} {text}", markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        self._line(f"== {name}")

    def note(self, text: str) -> None:
        self._line(text)

    def trial_begins(self, number: int, changes: str, origin: str) -> None:
        self._line(f"trial {number} ({origin}): {changes or 'your config'}")

    def step(self, text: str, seconds: float | None = None) -> None:
        self._line(f"  {text}" + (f", {seconds:.0f} s" if seconds else ""))

    def trial_ends(self, result: TrialResult, outcome: str) -> None:
        self._line(f"  {outcome}")

    def incumbent(self, result: TrialResult, outcome: str) -> None:
        self._line(f"  best so far: trial {result.number}")


class LiveObserver(Observer):
    """One panel that is redrawn: phase, trial, load, budget, best so far, last outcomes."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._phase, self._trial, self._step, self._load = "starting", "", "", ""
        self._step_begun, self._step_seconds = time.monotonic(), 0.0
        self._spent_until, self._spent, self._total = time.monotonic(), 0.0, 0.0
        self._best = "nothing measured yet"
        self._notes: list[str] = []
        self._outcomes: deque[tuple[str, str]] = deque(maxlen=LAST_OUTCOMES)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def phase(self, name: str) -> None:
        self._phase, self._trial, self._load = name, "", ""
        self._begin_step("", None)

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def budget(self, spent: float, total: float | None) -> None:
        self._spent, self._total, self._spent_until = spent, total or 0.0, time.monotonic()

    def trial_begins(self, number: int, changes: str, origin: str) -> None:
        self._trial = f"trial {number} ({origin}): {changes or 'your config'}"

    def step(self, text: str, seconds: float | None = None) -> None:
        self._begin_step(text, seconds)

    def load(self, progress: Progress) -> None:
        failed = f", {progress.failed} failed" if progress.failed else ""
        self._load = f"{progress.sent} sent, {progress.finished} answered{failed}"

    def trial_ends(self, result: TrialResult, outcome: str) -> None:
        self._outcomes.append((STYLES.get(result.status, ""), f"{result.number:>3} {outcome}"))
        self._begin_step("", None)

    def incumbent(self, result: TrialResult, outcome: str) -> None:
        self._best = f"trial {result.number}: {outcome}"

    def _begin_step(self, text: str, seconds: float | None) -> None:
        self._step, self._step_seconds, self._load = text, seconds or 0.0, ""
        self._step_begun = time.monotonic()

    def _render(self) -> Panel:
        now = time.monotonic()
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row("phase", self._phase)
        if self._trial:
            rows.add_row("now", Text(self._trial))
        if self._step:
            rows.add_row("step", self._step_line(now - self._step_begun))
        spent = self._spent + now - self._spent_until
        rows.add_row("elapsed", self._budget_line(spent))
        rows.add_row("best", Text(self._best, style="cyan"))
        outcomes = [
            Text(text, style=style, overflow="ellipsis", no_wrap=True) for style, text in self._outcomes
        ]
        return Panel(Group(rows, *outcomes), title=self._title, title_align="left", border_style="blue")

    def _step_line(self, elapsed: float) -> Table | Text:
        details = f"{self._step}  {elapsed:.0f} s  {self._load}"
        if not self._step_seconds:
            return Text(details)
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._step_seconds, completed=min(elapsed, self._step_seconds), width=20)
        line.add_row(bar, Text(details))
        return line

    def _budget_line(self, spent: float) -> Table | Text:
        if not self._total:
            return Text(format_seconds(spent))
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._total, completed=min(spent, self._total), width=20)
        line.add_row(bar, Text(f"{format_seconds(spent)} of {format_seconds(self._total)}"))
        return line


def make_observer(console: Console, title: str) -> LiveObserver | PlainObserver:
    """Live on a terminal that can be drawn on, plain otherwise."""
    drawable = console.is_terminal and not console.is_dumb_terminal
    return LiveObserver(console, title) if drawable else PlainObserver(console)
