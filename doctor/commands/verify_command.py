"""``vtune doctor verify``: does a prescription help on your own server? Light: heavy imports sit inside."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.commands.connection_options import ConnectionOptions
from loadgen.commands.options import Load, with_options
from loadgen.output.terminal import FAILED, INCONCLUSIVE, INTERRUPTED, INVALID, check_writable, interruptible
from servers.errors import UserError

if TYPE_CHECKING:
    from doctor.proof.canary import Canary


class VerifyFormat(StrEnum):
    text = "text"
    json = "json"


@with_options
def verify_command(
    finding: Annotated[
        str,
        typer.Argument(
            help="A file that vtune doctor --format json wrote (FILE, or FILE#ID of several), or an id."
        ),
    ],
    load: Load,
    reached: ConnectionOptions,
    target: Annotated[
        str,
        typer.Option(
            help="The command that starts your server (vllm serve …, vtune serve …, or any with {flags} in "
            "it), or simulated:h100 and the like."
        ),
    ],
    cure: Annotated[
        str | None, typer.Option(help="Flags to try: '--max-num-seqs 64'. [the file's prescription]")
    ] = None,
    prescription: Annotated[
        int | None, typer.Option(min=1, help="Which of the finding's prescriptions. [the first with flags]")
    ] = None,
    flags: Annotated[str, typer.Option(help="The flags as they are, where the target does not say.")] = "",
    model: Annotated[str, typer.Option(help="Of a simulated target: config.json or checkpoint.")] = "bundled",
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of runs, in the order AB BA AB …")] = 4,
    slo: Annotated[str | None, typer.Option(help="Your objectives: itl_p99<50ms,ttft_p95<300ms.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the first pair; each pair has its own.")
    ] = 0,
    fail_on_inconclusive: Annotated[
        bool, typer.Option("--fail-on-inconclusive", help="Exit with 4 if nothing is shown.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for canary.json and the servers' logs.")] = None,
    format: Annotated[VerifyFormat, typer.Option(help="What is printed.")] = VerifyFormat.text,
) -> None:
    """Try a prescription as a canary: your command as it is and with the prescribed flags, measured in pairs.

    Both servers are started by this command and ended with it; one that runs already is never touched.

    Examples:

      vtune doctor verify findings.json --target "vllm serve my-model --max-num-seqs 8" --trace prod.csv

      vtune doctor verify seq-cap --cure='--max-num-seqs 64' --target "vtune serve bundled --max-num-seqs 2"
      --workload chat --concurrency 8 --duration 20s

    Exit codes: 0 verified, or inconclusive; 1 refuted; 2 bad usage or a server that does not start; 3 invalid
    measurement; 4 inconclusive with --fail-on-inconclusive; 130 interrupted.
    """
    from doctor.proof.canary import read_cure, try_cure
    from loadgen.target import TargetFailed

    check_writable(out)
    try:
        load.check()
        wanted = read_cure(finding, cure, prescription)
        with interruptible() as stop:
            canary = try_cure(
                wanted,
                target,
                flags,
                model,
                load.source,
                pairs=pairs,
                seed=seed,
                slo=slo,
                connection=reached.connection,
                log_dir=None if out is None else out / "logs",
                progress=lambda done, planned, what: typer.echo(
                    f"{what} (run {done + 1} of {planned})", err=True
                ),
                stop=stop,
            )
    except TargetFailed as failure:
        side = {"a": "your command: ", "b": "with the cure: "}.get(failure.side, "")
        raise UserError(f"{side}{failure}\n{failure.log_tail}".rstrip()) from None
    if out is not None:
        _write(canary, out)
    typer.echo(json.dumps(canary.to_json(), indent=2) if format is VerifyFormat.json else canary.text())
    raise typer.Exit(INTERRUPTED if stop.is_set() else _exit_code(canary, fail_on_inconclusive))


def _write(canary: Canary, out: Path) -> None:
    from servers.files import write_atomically

    try:
        write_atomically(out / "canary.json", [json.dumps(canary.to_json(), indent=2), "\n"])
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None


def _exit_code(canary: Canary, fail_on_inconclusive: bool) -> int:
    if canary.invalid or not canary.pairs:
        return INVALID
    if canary.verdict == "refuted":
        return FAILED
    return INCONCLUSIVE if fail_on_inconclusive and canary.verdict == "inconclusive" else 0
