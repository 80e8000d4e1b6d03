"""What a study came to, kept in it, so that every worker can say it and one that comes later too."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import optuna
from rich.console import Console

ATTRIBUTE = "verdict"


@dataclass(frozen=True)
class Verdict:
    exit_code: int
    lines: tuple[str, ...]
    """For people: the sentence, and how to launch it and go back."""
    report: str
    """The whole report, as JSON."""
    files: tuple[str, ...]
    """Where the report lies, on ``host``; "" for this one."""
    launched: int
    """Trials that the study had then: with more, another verdict is due."""
    host: str = ""

    def show(self, console: Console, as_json: bool) -> None:
        """On stdout; where the report lies on ``console``."""
        sys.stdout.write((self.report.rstrip() if as_json else "\n".join(self.lines)) + "\n")
        sys.stdout.flush()
        where = f" on {self.host}" if self.host else ""
        for file in self.files:
            console.print(f"report{where}: {file}", markup=False, highlight=False, soft_wrap=True)

    def save(self, record: optuna.Study) -> None:
        record.set_user_attr(ATTRIBUTE, asdict(self))

    @classmethod
    def of(cls, record: optuna.Study, launched: int) -> Self | None:
        """The study's verdict on its ``launched`` trials, by whichever worker; None: there is none yet."""
        saved: Mapping[str, Any] | None = record.user_attrs.get(ATTRIBUTE)
        if saved is None or saved["launched"] != launched:
            return None
        return cls(**{**saved, "lines": tuple(saved["lines"]), "files": tuple(saved["files"])})


def report_text(files: Sequence[Path], kind: str, sentence: str) -> str:
    """The report that was written, as JSON; what there is to say where none was."""
    written = next((file for file in files if file.suffix == ".json"), None)
    return written.read_text() if written else json.dumps({"verdict": kind, "sentence": sentence})
