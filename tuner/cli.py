"""Commands of this folder. Light: heavy imports sit inside the commands."""

from __future__ import annotations

import typer


def mount(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
