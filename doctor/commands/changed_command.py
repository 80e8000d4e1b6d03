"""``vtune changed``: what another release of the server changes for a command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from doctor.commands.options import flags_of

if TYPE_CHECKING:
    from servers.release_changes import Change, ReleaseChanges


class ChangedFormat(StrEnum):
    text = "text"
    json = "json"


def changed_command(
    older: Annotated[str, typer.Argument(help="The release that runs now, such as 0.10.2.")],
    newer: Annotated[str, typer.Argument(help="The release to move to, such as 0.32.0.")],
    flags: Annotated[str, typer.Option(help="The server's command: 'vllm serve M --max-num-seqs 64'.")],
    format: Annotated[ChangedFormat, typer.Option(help="text or json.")] = ChangedFormat.text,
) -> None:
    """Say what another release of vLLM or SGLang changes for your command: flags, defaults, metrics.

    Read off the released wheels; a default that the server works out at its start is not compared.
    Exits with 1 where the newer release would refuse the command.

    Example: vtune changed 0.10.2 0.32.0 --flags "vllm serve my-model --swap-space 4"
    """
    import json

    from servers.release_changes import release_changes

    found = release_changes(flags_of(flags), older, newer)
    if format is ChangedFormat.json:
        typer.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(_lines(found)))
    if found.refused:
        raise typer.Exit(1)


def _lines(found: ReleaseChanges) -> Iterator[str]:
    yield f"{found.server} {found.older} -> {found.newer}"
    yield from _section("Refused of your command", found.refused)
    yield from _section("Defaults that your command leaves alone", _each(found.defaults))
    yield from _section("Flags gone that you do not use", found.flags_gone)
    yield from _section("New flags", found.flags_new)
    yield from _section("Metrics gone", _each(found.metrics_gone))
    yield from _section("Metrics changed", _each(found.metrics_changed))
    yield from _section("New metrics", found.metrics_new)


def _each(changes: Iterable[Change]) -> list[str]:
    return [f"{change.name}: {change.before} -> {change.after}" for change in changes]


def _section(title: str, items: Iterable[str]) -> Iterator[str]:
    listed = [f"  {item}" for item in items]
    if listed:
        yield f"\n{title} ({len(listed)}):"
        yield from listed
