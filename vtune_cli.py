"""The command ``vtune``: mounts the sub-apps. Nothing heavy is imported here or in any ``cli.py``."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

UNUSABLE, INTERRUPTED, READER_GONE = 2, 130, 128 + signal.SIGPIPE

_alone = threading.current_thread() is threading.main_thread() and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _alone:  # a Ctrl-C while modules are imported has nothing to tidy up, and no use for a traceback
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))

import typer
from typer.core import TyperGroup

import doctor.cli
import engine.cli
import loadgen.cli
import tuner.cli
from engine.errors import EngineUserError
from loadgen.output.escape import BLOCK, printable
from servers.errors import UserError

if _alone:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Commands(TyperGroup):
    """Says what the user got wrong in one message. Any other exception is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except (UserError, EngineUserError) as error:
            typer.echo(f"error: {printable(str(error), BLOCK)}", err=True)
            raise typer.Exit(UNUSABLE) from None


app = typer.Typer(
    name="vtune",
    cls=Commands,
    help="Find the flags that meet your SLO, prove it, and diagnose a live LLM server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich would take [words in brackets] for markup, and cut long option names
    add_completion=False,
    context_settings={"max_content_width": 100},
)


def _show_version(asked: bool) -> None:
    if asked:
        commit = f" ({found})" if (found := _commit(Path(__file__).parent)) else ""
        typer.echo(f"vtune {_version()}{commit}")
        raise typer.Exit


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vtune-llm")
    except PackageNotFoundError:  # run from its source
        return "of no release"


def _commit(place: Path) -> str:
    """Of the checkout in ``place``, with "-dirty" where files differ from it; "" where there is none."""
    if not (place / ".git").exists():
        return ""
    import subprocess

    command = ["git", "-C", str(place), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or no right to read it
        return ""


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """What holds for every command."""


tuner.cli.mount(app)
doctor.cli.mount(app)
loadgen.cli.mount(app)
engine.cli.mount(app)


def _keep_examples(app: typer.Typer) -> None:
    """Every example in a help text stays on a line of its own, so that it can be copied."""
    infos: list[Any] = [*app.registered_commands]
    if app.registered_callback and not isinstance(app.info.help, str):
        infos.append(app.registered_callback)
    for info in infos:
        text = info.help if isinstance(info.help, str) else info.callback.__doc__ or ""
        info.help = "\n\n".join(map(_unwrapped, inspect.cleandoc(text).split("\n\n")))
    for group in app.registered_groups:
        if group.typer_instance:
            _keep_examples(group.typer_instance)


def _unwrapped(paragraph: str) -> str:
    """Click leaves a paragraph alone that begins with ``\\b``."""
    if not paragraph.startswith(("  ", "Example: ")):
        return paragraph
    indent = " " * (len(paragraph) - len(paragraph.lstrip()))
    return f"\b\n{indent}{' '.join(paragraph.split())}"


_keep_examples(app)


def main() -> None:
    """Run ``app`` as a program, whatever its standard streams are and however they end.

    One whose reader leaves early (``| head``) ends quietly, with the status of a program that SIGPIPE ends.
    """
    _settle_streams()
    try:
        try:
            app()
        finally:
            if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # Typer's, once the reader is gone
                sys.exit(READER_GONE)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # what no command expects, such as a full disk under standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains once more at its end
        if isinstance(error, BrokenPipeError):
            sys.exit(READER_GONE)
        with contextlib.suppress(OSError):  # standard error may be full as well
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _settle_streams() -> None:
    """Streams that were closed lead nowhere; what an encoding does not have is written as "?"."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # Takes the number of the closed descriptor, which no other file should get, here or in a child.
            opened = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(opened.fileno(), True)
            setattr(sys, name, opened)
        elif isinstance(stream, io.TextIOWrapper) and mode == "w":
            stream.reconfigure(errors="replace")
