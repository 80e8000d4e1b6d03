"""A prescription tried on the user's own server command, beside the command as it is, under their load."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from doctor.diagnosis.expectation import ExpectationError, parse_expectation
from doctor.diagnosis.judged_objectives import judged_objectives
from doctor.diagnosis.playbook import load_all
from doctor.proof.proof_metrics import is_invalid, notes_of, rows_of, verdict_of
from doctor.proof.result import ProofMetric, ProofVerdict, finite, headline, proof_table
from loadgen.compare import compare
from loadgen.output.escape import printable
from loadgen.plan.workload import Schedule
from loadgen.target import Target
from loadgen.targets.either import EitherTarget
from loadgen.targets.server import ServerTarget
from loadgen.targets.simulated import PREFIX, SimulatedTarget
from servers.command import ServerCommand, parse_command
from servers.connection import NO_LOGIN, Connection, masked
from servers.errors import UserError
from servers.input_file import read_input

SCHEMA = "vtune.canary/1"
_DEFAULT_CONTEXT = 4096


class CanaryError(UserError):
    """Nothing can be tried. The message says what is missing, and what to write."""


@dataclass(frozen=True)
class Cure:
    """What is tried: flags (None drops one), and what they are expected to do."""

    finding: str
    changes: Mapping[str, Any]
    expect: Mapping[str, str]


@dataclass(frozen=True)
class Canary:
    """Both commands, measured side by side."""

    finding: str
    verdict: ProofVerdict
    before: str
    after: str
    pairs: int
    together: bool
    simulated: bool
    invalid: bool
    rows: tuple[ProofMetric, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        how = "both servers up, loaded in turn" if self.together else "servers restarted in turn"
        lines = [
            f"{self.finding}: the prescription, tried as a canary",
            f"  before: {self.before}",
            f"  after:  {self.after}",
        ]
        lines += [
            f"  {self.pairs} interleaved pairs, {how}:",
            *(f"    {line}" for line in proof_table(self.rows)),
        ]
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(headline(self.verdict, self.rows, self.simulated))
        return "\n".join(map(printable, lines))

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = finite(
            {
                "schema": SCHEMA,
                **asdict(self),
                "headline": headline(self.verdict, self.rows, self.simulated),
            }
        )
        return found


def read_cure(finding: str, cure: str | None, number: int | None) -> Cure:
    """What is to be tried.

    ``finding``: a file that ``vtune doctor --format json`` wrote (``FILE`` or ``FILE#ID``), or an id, for
    which ``cure`` names the flags. ``number``: which prescription of the file, from 1.
    Raises CanaryError, FlagError.
    """
    name, _, identity = finding.partition("#")
    if Path(name).is_file():
        found = _finding(Path(name), identity or None)
        changes = parse_command(cure).flags if cure else _prescribed(found, number)
        return Cure(str(found["id"]), changes, _judgeable(found.get("expect", {})))
    books = {book.id: book for book in load_all()}
    if finding not in books:
        raise CanaryError(f"{finding!r} is neither a file nor a playbook; see vtune playbook list")
    if not cure:
        raise CanaryError(f"{finding}: say which flags to try, e.g. --cure '--max-num-seqs 64'")
    return Cure(finding, parse_command(cure).flags, books[finding].expect)


def try_cure(
    cure: Cure,
    target: str,
    flags: str,
    model: str,
    source: Callable[[int], Callable[[int], Schedule]],
    *,
    pairs: int,
    seed: int = 0,
    slo: str | None = None,
    connection: Connection = NO_LOGIN,
    log_dir: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    stop: threading.Event | None = None,
) -> Canary:
    """Run both configs in pairs. ``source``: from a context length to what makes the schedule of a seed.

    Raises CanaryError, FlagError, SimulatedTargetError, SloError, TargetFailed.
    """
    sides = _sides(cure, target, flags, model, connection, log_dir)
    found = compare(
        sides.target,
        sides.a,
        sides.b,
        _lazily(source, sides),
        seeds=range(seed, seed + pairs),
        metrics=("failed",),
        progress=progress,
        stop=stop,
    )
    simulated = target.startswith(PREFIX)
    rows = rows_of(found.pairs, cure.expect, judged_objectives(slo).values)
    invalid = is_invalid(found, simulated)
    return Canary(
        cure.finding,
        verdict_of(rows, len(found.pairs), invalid),
        sides.target.launch_command(sides.a),
        sides.target.launch_command(sides.b),
        len(found.pairs),
        found.together,
        simulated,
        invalid,
        rows,
        notes_of(found, simulated),
    )


@dataclass(frozen=True)
class _Sides:
    target: Target
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    context: Callable[[], int]


def _sides(
    cure: Cure, target: str, flags: str, model: str, connection: Connection, log_dir: Path | None
) -> _Sides:
    if target.startswith(("http://", "https://")):
        raise CanaryError(
            f"--target {target}: a canary starts servers of its own and leaves running ones alone; give the "
            "command that starts yours"
        )
    if target.startswith(PREFIX):
        device = SimulatedTarget(target, model)
        before = parse_command(flags) if flags.strip() else ServerCommand("")
        a, b = dict(before.flags), dict(before.with_flags(cure.changes).flags)
        with device.open(a) as opened:
            length = opened.max_model_len or _DEFAULT_CONTEXT
        sides = _Sides(device, a, b, lambda: length)
    elif "{flags}" in target:
        server = ServerTarget(target, connection=connection, log_dir=log_dir)
        before = parse_command(flags) if flags.strip() else ServerCommand("")
        a, b = dict(before.flags), dict(before.with_flags(cure.changes).flags)
        sides = _Sides(server, a, b, lambda: _DEFAULT_CONTEXT)
    else:
        before = parse_command(target)
        if not before.program:
            raise CanaryError(
                f"--target {masked(target)!r}: names no server; write e.g. 'vllm serve MODEL …'"
            )
        commands = [str(before), str(before.with_flags(cure.changes))]
        either = EitherTarget(commands, connection=connection, log_dir=log_dir)
        a, b = ({"server": command} for command in commands)
        sides = _Sides(either, a, b, lambda: either.max_model_len or _DEFAULT_CONTEXT)
    if sides.a == sides.b:
        raise CanaryError(f"{cure.finding}: the command has these flags already, so nothing would change")
    return sides


def _lazily(source: Callable[[int], Callable[[int], Schedule]], sides: _Sides) -> Callable[[int], Schedule]:
    """Schedules for the context that the servers report once they are up."""

    @cache
    def made() -> Callable[[int], Schedule]:
        return source(sides.context())

    return lambda seed: made()(seed)


def _finding(file: Path, identity: str | None) -> Mapping[str, Any]:
    try:
        data = json.loads(read_input(file))
        findings = data["findings"]
        known = [str(finding["id"]) for finding in findings]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CanaryError(f"{file}: not what vtune doctor --format json writes ({error})") from None
    if not known:
        raise CanaryError(f"{file}: holds no finding, so there is nothing to try")
    if identity is not None and identity not in known:
        raise CanaryError(f"{file}: no finding {identity!r}; it has {', '.join(known)}")
    roots = [f for f in findings if f.get("suppressed_by") is None] or findings
    return dict(roots[0] if identity is None else findings[known.index(identity)])


def _prescribed(finding: Mapping[str, Any], number: int | None) -> Mapping[str, Any]:
    given: Sequence[Mapping[str, Any]] = finding.get("prescriptions", [])
    if number is not None:
        if not 1 <= number <= len(given):
            raise CanaryError(f"{finding['id']}: has {len(given)} prescriptions, not {number}")
        given = [given[number - 1]]
    with_flags = [item["set"] for item in given if item.get("set")]
    if not with_flags:
        words = "; ".join(str(item.get("text", "")) for item in given)
        raise CanaryError(f"{finding['id']}: its cure is no flag ({words}); say one with --cure")
    return dict(with_flags[0])


def _judgeable(expect: Mapping[str, Any]) -> dict[str, str]:
    """Of a file of another version, what this one can judge."""
    kept = {}
    for name, text in expect.items():
        try:
            parse_expectation(str(text))
        except ExpectationError:
            continue
        kept[str(name)] = str(text)
    return kept
