"""What the bench commands share: exit codes, errors, Ctrl-C, progress. Light to import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from servers.errors import UserError

if TYPE_CHECKING:
    from loadgen.plan.load_policy import Progress
    from loadgen.plan.workload import Schedule

FAILED, INVALID, INCONCLUSIVE, INTERRUPTED = 1, 3, 4, 130
_PLAIN_EVERY = 10.0


class Format(StrEnum):
    """What goes to stdout."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the run ends with what it has; a second one ends the program."""
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def display(schedule: Schedule) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr; a line every ten seconds where that is no terminal."""
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    timed = schedule.duration is not None
    total = schedule.duration if timed else len(schedule.requests)
    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming up", total=total)

        def show(progress: Progress) -> None:
            bar.update(
                task,
                completed=max(0.0, progress.elapsed) if timed else progress.finished,
                description=_counts(progress),
            )

        yield show


def _plain_progress() -> Callable[[Progress], None]:
    due = 0.0

    def show(progress: Progress) -> None:
        nonlocal due
        if progress.elapsed >= due:
            due += _PLAIN_EVERY
            typer.echo(f"{progress.elapsed:6.0f} s  {_counts(progress)}", err=True)

    return show


def _counts(progress: Progress) -> str:
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.sent} sent, {progress.in_flight} in flight, {progress.finished} done{failed}"


def check_writable(out: Path | None, *files: Path | None) -> None:
    """Before the run: a minute of load must not end in "permission denied". Raises UserError."""
    for folder in (out, *(file.parent for file in files if file)):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise UserError(f"cannot write to {folder}: no permission")
