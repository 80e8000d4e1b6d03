"""``vtune serve`` and ``vtune explain``. Light: torch and friends are imported inside the commands."""

from __future__ import annotations

import typer


def mount(app: typer.Typer) -> None:
    """Add the engine's commands to ``app``."""
