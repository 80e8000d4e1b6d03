"""``vtune bench compare``: two servers, or folders of saved runs, and a gate on them. Light to import."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.commands.connection_options import ConnectionOptions
from loadgen.commands.options import Load, with_options
from loadgen.commands.stated import is_stated
from loadgen.output.terminal import (
    FAILED,
    INCONCLUSIVE,
    INTERRUPTED,
    INVALID,
    check_writable,
    interruptible,
)
from servers.errors import UserError

if TYPE_CHECKING:
    from loadgen.compare import Comparison, Pair
    from loadgen.plan.workload import Schedule
    from loadgen.targets.either import EitherTarget

DEFAULT_METRICS = "ttft_p50,ttft_p95,tpot_p50,itl_p99,throughput,failed"
_DEFAULT_CONTEXT = 4096


class CompareFormat(StrEnum):
    """What goes to stdout."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    CSV = "csv"
    JUNIT = "junit"
    GITHUB = "github-action-benchmark"
    BENCHER = "bencher"


def mount(bench: typer.Typer) -> None:
    """Add the command to ``bench``."""
    bench.command("compare")(compare_command)


@with_options
def compare_command(
    a: Annotated[
        str,
        typer.Argument(
            help="The reference: a command that starts a server, the URL of one, or a folder of saved runs."
        ),
    ],
    b: Annotated[str, typer.Argument(help="What is compared with it, of the same kind.")],
    load: Load,
    reached: ConnectionOptions,
    pairs: Annotated[
        int, typer.Option(min=1, help="Pairs of runs, in the order AB BA AB …; a gate needs 8.")
    ] = 8,
    metrics: Annotated[
        str, typer.Option(help="What is compared, by comma; ttft_p95{class=short} for one class.")
    ] = DEFAULT_METRICS,
    gate: Annotated[bool, typer.Option("--gate", help="Exit with 1 on a regression.")] = False,
    fail_on_inconclusive: Annotated[
        bool, typer.Option("--fail-on-inconclusive", help="With --gate: exit with 4 if nothing is shown.")
    ] = False,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context of the workload. Default: as server A says.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the first pair; each pair has its own.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the comparison in every format, and every run's records.")
    ] = None,
    format: Annotated[CompareFormat, typer.Option(help="What is printed.")] = CompareFormat.TEXT,
) -> None:
    """Compare two servers by paired, interleaved runs; the run is the unit, not the request.

    A difference counts if an interval over the pairs excludes "none" and the effect exceeds 5 % (medians,
    throughput) or 15 % (tails); several metrics are adjusted after Holm.

    Examples:

      vtune bench compare "vtune serve bundled" "vtune serve bundled --max-num-seqs 8" --rate 2 --duration 30s

      vtune bench compare http://old:8000 http://new:8000 --concurrency 8 --num-requests 64 --gate

      vtune bench compare runs/main runs/branch --gate --format junit

      vtune bench compare vllm-main/ vllm-branch/ --gate

    Exit codes: 0 compared (with --gate: no regression), 1 regression, 2 bad usage or no server, 3 invalid,
    4 inconclusive with --fail-on-inconclusive, 130 interrupted.
    """
    from loadgen.compare import compare as run_pairs
    from loadgen.compare import compare_runs
    from loadgen.foreign.comparison import compare_stated
    from loadgen.foreign.read import read_results
    from loadgen.target import TargetFailed
    from loadgen.targets.either import EitherTarget
    from servers.connection import masked

    check_writable(out)
    try:
        with interruptible() as stop:
            if Path(a).exists() and Path(b).exists() and is_stated(Path(a)) and is_stated(Path(b)):
                asked = None if metrics == DEFAULT_METRICS else split_metrics(metrics)
                found = compare_stated(read_results(Path(a)), read_results(Path(b)), asked)
            elif Path(a).exists() and Path(b).exists():
                found = compare_runs(saved_pairs(Path(a), Path(b)), split_metrics(metrics))
            else:
                load.check()
                if a == b and a.startswith(("http://", "https://")):
                    raise UserError(
                        f"A and B are one server, {a}: each would find the other's prompts in its cache"
                    )
                target = EitherTarget(
                    (a, b), connection=reached.connection, log_dir=out / "logs" if out else None
                )
                found = run_pairs(
                    target,
                    {"server": masked(a)},
                    {"server": masked(b)},
                    _lazily(load, target, max_model_len),
                    seeds=range(seed, seed + pairs),
                    metrics=split_metrics(metrics),
                    progress=_told,
                    stop=stop,
                )
    except TargetFailed as failure:
        side = f"server {failure.side.upper()}: " if failure.side else ""
        raise UserError(f"{side}{failure}\n{failure.log_tail}".rstrip()) from None
    if out:
        _write(found, out)
    typer.echo(RENDERERS[format](found))
    raise typer.Exit(INTERRUPTED if stop.is_set() else exit_code(found, gate, fail_on_inconclusive))


def _lazily(load: Load, target: EitherTarget, max_model_len: int | None) -> Callable[[int], Schedule]:
    """Schedules for the context that the servers report once they are up."""

    @cache
    def source() -> Callable[[int], Schedule]:
        return load.source(max_model_len or target.max_model_len or _DEFAULT_CONTEXT)

    return lambda seed: source()(seed)


def _told(done: int, planned: int, what: str) -> None:
    typer.echo(f"{what} (run {done + 1} of {planned})", err=True)


def exit_code(found: Comparison, gate: bool, fail_on_inconclusive: bool) -> int:
    """0, or what the gate says; an invalid comparison is never passed over."""
    if found.verdict == "invalid":
        return INVALID
    if not gate:
        return 0
    if found.verdict == "regress":
        return FAILED
    return INCONCLUSIVE if fail_on_inconclusive and found.verdict == "inconclusive" else 0


def split_metrics(metrics: str) -> list[str]:
    """At commas outside braces."""
    return [name.strip() for name in re.split(r",(?![^{]*})", metrics)]


def saved_pairs(a: Path, b: Path) -> list[Pair]:
    """Runs in both folders (or files) that sent the same schedule, in the order of their start.

    Raises Incomparable where there is none.
    """
    from loadgen.compare import Incomparable, Pair

    sides = {side: _saved(path) for side, path in (("a", a), ("b", b))}
    pairs = []
    for schedule, runs in sides["a"].items():
        for run_a, run_b in zip(runs, sides["b"].get(schedule, []), strict=False):
            pairs.append(Pair(run_a.seed or 0, run_a, run_b))
    if not pairs:
        raise Incomparable(
            f"no run of {a} sent the same schedule as one of {b}: measure both with one workload and seed"
        )
    return pairs


def _saved(path: Path) -> dict[str, list[Any]]:
    """By schedule. Raises SavedFileError."""
    from loadgen.measure.record import Records

    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if path.is_dir():
        files = [file for file in files if file.name.startswith(("records", "run-", "pair-"))]
    found: dict[str, list[Records]] = {}
    for run in sorted((Records.load(file) for file in files), key=lambda run: run.start_unix_ms):
        found.setdefault(run.schedule_sha256, []).append(run)
    return found


def _write(found: Comparison, out: Path) -> None:
    """The comparison in every format, and the runs, so that they can be compared again."""
    from servers.files import write_atomically

    files = {
        "comparison.json": CompareFormat.JSON,
        "comparison.md": CompareFormat.MARKDOWN,
        "comparison.csv": CompareFormat.CSV,
        "comparison.xml": CompareFormat.JUNIT,
        "github-action-benchmark.json": CompareFormat.GITHUB,
        "bencher.json": CompareFormat.BENCHER,
    }
    from loadgen.output.comparison_page import comparison_page

    try:
        for name, format in files.items():
            write_atomically(out / name, [RENDERERS[format](found), "\n"])
        write_atomically(out / "comparison.html", [comparison_page(found)])
        for number, pair in enumerate(found.pairs):
            pair.a.save(out / "a" / f"pair-{number:03d}.json")
            pair.b.save(out / "b" / f"pair-{number:03d}.json")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None


def _text(found: Comparison) -> str:
    from loadgen.output.comparison import comparison_text

    return comparison_text(found)


def _markdown(found: Comparison) -> str:
    from loadgen.output.comparison import comparison_markdown

    return comparison_markdown(found).rstrip("\n")


def _junit(found: Comparison) -> str:
    from loadgen.output.exports import comparison_cases
    from loadgen.output.junit import junit

    return junit(comparison_cases(found), "vtune bench compare").rstrip("\n")


def _csv(found: Comparison) -> str:
    from loadgen.output.exports import comparison_csv

    return comparison_csv(found).rstrip("\n")


def _github(found: Comparison) -> str:
    from loadgen.output.exports import github_benchmark

    return json.dumps(github_benchmark(found), indent=2)


def _bencher(found: Comparison) -> str:
    from loadgen.output.exports import bencher

    return json.dumps(bencher(found, "vtune bench compare"), indent=2)


RENDERERS: Mapping[CompareFormat, Callable[[Comparison], str]] = {
    CompareFormat.TEXT: _text,
    CompareFormat.JSON: lambda found: json.dumps(found.to_json(), indent=2),
    CompareFormat.MARKDOWN: _markdown,
    CompareFormat.CSV: _csv,
    CompareFormat.JUNIT: _junit,
    CompareFormat.GITHUB: _github,
    CompareFormat.BENCHER: _bencher,
}
