"""What ``vtune bench report`` and ``compare`` do with results of other tools. Light to import."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from loadgen.foreign.result import StatedResult
    from servers.slo.bounds import Bound


def is_stated(path: Path) -> bool:
    """Whether a file or folder holds what another tool states, not our records."""
    from loadgen.measure.saved import is_ours

    if not path.is_dir():
        return not is_ours(path)
    files = [file for file in path.rglob("*.json*") if file.is_file()]
    return bool(files) and not any(map(is_ours, files))


def report_stated(path: Path, bounds: Sequence[Bound], format: str) -> bool:
    """Print it; whether a bound is missed. Raises ForeignError."""
    from loadgen.foreign.read import read_results
    from loadgen.output.stated_report import print_stated, stated_cases

    results = read_results(path)
    cases = list(stated_cases(results, bounds))
    if format == "text":
        print_stated(results, sys.stdout)
        for case in cases if bounds else ():
            if said := case.failure or case.skipped or case.text:
                typer.echo(f"SLO      {said}")
    else:
        typer.echo(_formatted(results, bounds, format))
    return bool(bounds) and any(case.failure for case in cases)


def _formatted(results: Sequence[StatedResult], bounds: Sequence[Bound], format: str) -> str:
    from loadgen.output import junit, stated_report

    match format:
        case "markdown":
            return stated_report.stated_markdown(results)
        case "csv":
            return stated_report.stated_csv(results)
        case "junit":
            cases = stated_report.stated_cases(results, bounds)
            return junit.junit(cases, "vtune bench report").rstrip("\n")
        case "bencher":
            return json.dumps(stated_report.stated_bencher(results), indent=2)
        case _:
            return json.dumps(stated_report.stated_json(results), indent=2)
