"""The command ``vtune``: mounts the sub-apps. Nothing heavy is imported here or in any ``cli.py``."""

from __future__ import annotations

import typer

import doctor.cli
import engine.cli
import loadgen.cli
import tuner.cli

app = typer.Typer(
    name="vtune",
    help="Find the flags that meet your SLO, prove it, and diagnose a live LLM server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)

tuner.cli.mount(app)
doctor.cli.mount(app)
loadgen.cli.mount(app)
engine.cli.mount(app)
