"""Many experiments, one after another: each is kept in a file of its own, so that a series can be cut."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from doctor.diagnosis.experiment import Experiment, ExperimentError
from doctor.diagnosis.playbook import Playbook
from doctor.diagnosis.verification_status import fingerprint
from doctor.proof.experiment_target import stage_of
from doctor.proof.proof_metrics import judged, verdict_of
from doctor.proof.result import SCHEMA, Proof
from doctor.proof.verify import Terms, engine_version, promised, prove
from loadgen.target import TargetFailed
from servers.files import write_atomically


@dataclass(frozen=True)
class Order:
    """What is to be run, where, and how much of it. ``limit``: a time of ``time.monotonic``."""

    target: str | None
    model: str | None
    terms: Terms
    experiment: int | None
    simulated: bool | None
    limit: float | None
    out: Path | None

    def limited(self, seconds: float) -> Order:
        """From now on."""
        return replace(self, limit=time.monotonic() + seconds)

    def wants(self, number: int, experiment: Experiment) -> bool:
        return self.experiment in (None, number) and self.simulated in (None, experiment.simulated)


def carry_out(
    books: Sequence[Playbook], order: Order, tell: Callable[[str], None], stop: threading.Event
) -> Iterator[Proof | TargetFailed]:
    """Every experiment that ``order`` wants; those whose file is there come from it.

    One whose server does not start, or dies, gives its failure, and the next one has its turn.
    Raises ExperimentError, Interrupted.
    """
    for book in books:
        for number, experiment in enumerate(book.reproduction.experiments):
            if not order.wants(number, experiment):
                continue
            file = None if order.out is None else order.out / f"{book.id}-{number + 1}.json"
            key = _key(experiment, order)
            if file is not None and (kept := _kept(file, key, book)) is not None:
                _save(file, key, kept)
                yield kept
                continue
            if order.limit is not None and time.monotonic() > order.limit:
                tell(f"{book.id}: out of time, run again to go on")
                return
            tell(f"{book.id}, experiment {number + 1}")
            stage = stage_of(
                experiment, order.target, order.model, None if file is None else file.parent / "logs"
            )
            telling = partial(_tell_of, book.id, tell)
            try:
                proof = prove(book, number, stage, order.terms, tell=telling, stop=stop)
            except TargetFailed as failure:
                yield failure
                continue
            if file is not None:
                _save(file, key, proof)
            yield proof


def _save(file: Path, key: str, proof: Proof) -> None:
    write_atomically(file, [json.dumps({"key": key, **proof.to_json()}, indent=2), "\n"])


def _tell_of(identity: str, tell: Callable[[str], None], text: str) -> None:
    tell(f"{identity}: {text}")


def _key(experiment: Experiment, order: Order) -> str:
    """What decides the measurement: the experiment, how it is run, and the engine's version."""
    measured = replace(experiment, claims={}, folklore={})
    text = repr(
        (measured, bool(experiment.folklore), order.target, order.model, order.terms, engine_version())
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kept(file: Path, key: str, book: Playbook) -> Proof | None:
    """A proof that was saved under the same key, judged by what the page promises now.

    None where it has to be measured: there is none, of another cure, or without a figure that is promised
    now. Raises ExperimentError for a file that is something else.
    """
    if not file.is_file():
        return None
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema is {data.get('schema')!r}")
        if data.pop("key", None) != key:
            return None
        proof = read_proof(data)
    except (OSError, ValueError, AttributeError) as error:
        raise ExperimentError(
            f"{file}: no saved proof ({error}); move it away, or choose another --out"
        ) from None
    experiment = book.reproduction.experiments[proof.experiment]
    rows = judged(proof.rows, promised(book, experiment))
    reworded = proof.remedy is not None and proof.remedy_print != fingerprint(book, proof.remedy)
    if rows is None or reworded or proof.verdict == "not reproduced":
        return None
    return replace(proof, rows=rows, verdict=verdict_of(rows, proof.pairs, proof.invalid))


def read_proof(data: dict[str, Any]) -> Proof:
    """From :meth:`Proof.to_json`. Raises ValueError."""
    plain = {name: value for name, value in data.items() if name not in ("schema", "standing", "headline")}
    rows = [{**row, "change": _with_nan(row["change"])} for row in plain["rows"]]
    return msgspec.convert({**plain, "rows": rows}, Proof)


def _with_nan(change: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in change.items()}
