"""``vtune playbook``: what the doctor knows, and the proof of each cure. Light: heavy imports sit inside."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from doctor.commands.options import interrupted
from servers.errors import OptionError, UserError

if TYPE_CHECKING:
    from doctor.diagnosis.playbook import Playbook
    from doctor.proof.result import Proof

playbook_app = typer.Typer(no_args_is_help=True, help="The symptoms that the doctor knows, and their cures.")
REFUTED, UNUSABLE, NOT_REPRODUCED, INCONCLUSIVE, INTERRUPTED = 1, 2, 3, 4, 130


@playbook_app.command("list")
def list_playbooks() -> None:
    """List every symptom: id, severity, title.

    Example: vtune playbook list
    """
    for book in _playbooks():
        typer.echo(f"{book.id:26} {book.severity:9} {book.title}")


@playbook_app.command("show")
def show_playbook(
    identity: Annotated[str, typer.Argument(metavar="ID", help="A symptom's id, such as seq-cap.")],
) -> None:
    """Print one playbook: its rule, its cures, what goes on, when the cure does not help.

    Example: vtune playbook show seq-cap
    """
    from importlib import resources

    book = _named(identity)
    typer.echo(resources.files("playbooks").joinpath(f"{book.id}.md").read_text(encoding="utf-8"), nl=False)


@playbook_app.command("run")
def run_playbook(
    identities: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Symptoms' ids, such as seq-cap.")
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Every playbook, one after another.")] = False,
    target: Annotated[
        str | None,
        typer.Option(
            help="bundled; in virtual time: simulated:h100 and the like, or simulated:two-cores (the bundled "
            "engine by step times that were measured). [as the playbook says]"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="config.json, a checkpoint or a hub id. [as the playbook says]")
    ] = None,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of runs, in the order AB BA AB …")] = 4,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Length of one run's load. [as the playbook says]")
    ] = None,
    experiment: Annotated[
        int | None, typer.Option(min=1, help="Of a page with several experiments, only this one.")
    ] = None,
    simulated: Annotated[
        bool | None,
        typer.Option(
            "--simulated/--measured", help="Only those that the page simulates, or measures. [both]"
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(help="Begin no experiment after this time, e.g. 9m; with --out, a later call goes on."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for one JSON file per experiment; experiments found there are not run again."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of prompts and arrivals.")] = 0,
    fail_on_inconclusive: Annotated[
        bool, typer.Option("--fail-on-inconclusive", help="Exit with 4 if an experiment shows nothing.")
    ] = False,
    format: Annotated[str, typer.Option(help="text or json: what is printed.")] = "text",
) -> None:
    """Prove a cure: bring the symptom about, let the doctor find it, do what it says, measure both in pairs.

    Servers are started and stopped on this machine; a simulated device takes seconds, and is an estimate.

    Examples:

      vtune playbook run seq-cap

      vtune playbook run seq-cap --target simulated:two-cores

      vtune playbook run --all --simulated --out runs/playbooks

    Exit codes: 0 verified (or folklore refuted, or inconclusive), 1 refuted, 2 bad usage or no server, 3 the
    symptom did not show, 4 inconclusive with --fail-on-inconclusive, 130 interrupted.
    """
    from doctor.metrics.period import window_seconds as read_seconds
    from doctor.proof.experiment_runner import Order, carry_out
    from doctor.proof.verify import Interrupted, Terms
    from loadgen.output.terminal import check_writable, interruptible
    from loadgen.target import TargetFailed

    if bool(identities) == all_of_them:
        raise OptionError("name playbooks, or give --all")
    if format not in ("text", "json"):
        raise OptionError(f"--format {format}: write text or json")
    books = list(_playbooks()) if all_of_them else [_named(identity) for identity in identities or ()]
    for book in books if identities else ():
        count = len(book.reproduction.experiments)
        if experiment is not None and 0 < count < experiment:
            raise OptionError(f"--experiment {experiment}: {book.id} has {count}")
    check_writable(out)
    order = Order(
        target=target,
        model=model,
        terms=Terms(pairs, seconds, seed),
        experiment=None if experiment is None else experiment - 1,
        simulated=simulated,
        limit=None,
        out=out,
    )
    proofs: list[Proof] = []
    failures: list[str] = []
    try:
        if limit is not None:
            order = order.limited(read_seconds(limit, "--limit"))
        with interruptible() as stop:
            for proof in carry_out(books, order, _tell, stop):
                if isinstance(proof, TargetFailed):
                    failures.append(f"{proof}\n{proof.log_tail}".rstrip())
                    typer.echo(f"vtune playbook: {failures[-1]}", err=True)
                    continue
                proofs.append(proof)
                if format == "text":
                    typer.echo(proof.text() + "\n")
    except Interrupted:
        interrupted()
    if format == "json":
        typer.echo(json.dumps([proof.to_json() for proof in proofs], indent=2))
    for book in books:
        if book.reproduction.why_none and not all_of_them:
            typer.echo(f"{book.id}: no experiment, because {book.reproduction.why_none}")
    raise typer.Exit(UNUSABLE if failures else _exit_code(proofs, fail_on_inconclusive))


def _exit_code(proofs: Sequence[Proof], fail_on_inconclusive: bool) -> int:
    verdicts = {proof.verdict for proof in proofs if proof.verdict != "refuted"}
    if any(proof.verification == "refuted" for proof in proofs):
        return REFUTED
    if "not reproduced" in verdicts:
        return NOT_REPRODUCED
    return INCONCLUSIVE if fail_on_inconclusive and "inconclusive" in verdicts else 0


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K{text}", nl=False, err=True)
    else:
        typer.echo(text, err=True)


def _named(identity: str) -> Playbook:
    import difflib

    books: dict[str, Playbook] = {book.id: book for book in _playbooks()}
    if identity not in books:
        near = difflib.get_close_matches(identity, books, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see vtune playbook list"
        raise UserError(f"no playbook {identity!r}; {hint}")
    return books[identity]


def _playbooks() -> Any:
    from doctor.diagnosis.playbook import load_all

    return load_all()
