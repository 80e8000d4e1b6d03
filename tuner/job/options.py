"""Groups of options of ``vtune optimize`` that belong together. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from loadgen.commands.options import Dequantize, OptionError, Oversized, Recorded


@dataclass(frozen=True)
class Replay(Recorded):
    """Recorded traffic in place of a workload; the options are those of ``vtune bench run --trace``."""

    replay: Annotated[
        Path | None,
        typer.Option(
            help="Tune on recorded traffic in place of a workload: a file of `vtune bench record`, of "
            "Azure's, Mooncake's or BurstGPT's kind, or any table with --trace-columns. Each trial is a "
            "window of it; the confirmation has others."
        ),
    ] = None

    def to_json(self) -> dict[str, Any] | None:
        """For the job; None where nothing is replayed. Raises OptionError."""
        if self.replay is None:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise OptionError(f"--{field.name.replace('_', '-')} needs --replay TRACE")
            return None
        plain = {
            "replay": str(self.replay.resolve()),
            "trace_window": None if self.trace_window is None else list(self.trace_window),
            "dequantize": self.dequantize.value,
            "oversized": self.oversized.value,
        }
        return {**asdict(self), **plain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Replay:
        """What :meth:`to_json` gave; a digest of the file beside it is not an option."""
        window = data["trace_window"]
        kinds = {
            "replay": Path(data["replay"]),
            "trace_window": None if window is None else tuple(window),
            "dequantize": Dequantize(data["dequantize"]),
            "oversized": Oversized(data["oversized"]),
        }
        given = {name: value for name, value in data.items() if name != "sha256"}
        return cls(**{**given, **kinds})
