"""The options of ``vtune optimize``, declared once. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from loadgen.commands.connection_options import ConnectionOptions
from loadgen.commands.options import Dequantize, Oversized, Recorded
from servers.errors import OptionError
from servers.kinds import KINDS

MAX_SEED = (1 << 31) - 1
"""The sampler adds to it, and numpy takes 32 bits."""
_NAMES = {"run_seconds": "run_time"}
"""Fields of a job whose options have other names."""


def _option(text: str, **options: Any) -> Any:
    return typer.Option(help=text, **options)


@dataclass(frozen=True)
class Replay(Recorded):
    """Recorded traffic in place of a workload; the options are those of ``vtune bench run --trace``."""

    replay: Annotated[
        Path | None,
        _option(
            "Tune on recorded traffic in place of a workload: a file of `vtune bench record`, of "
            "Azure's, Mooncake's, Bailian's or BurstGPT's kind, or any with --trace-columns. Each trial is a "
            "window of it; the confirmation has others."
        ),
    ] = None

    def to_json(self) -> dict[str, Any] | None:
        """For the job; None where nothing is replayed. Raises OptionError."""
        if self.replay is None:
            for option in fields(self):
                if getattr(self, option.name) != option.default:
                    raise OptionError(f"--{option.name.replace('_', '-')} needs --replay TRACE")
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


@dataclass(frozen=True)
class Place:
    """Which study, where it is kept, and how this process takes part in it."""

    study: Annotated[
        str | None,
        _option(
            "The study's name. Given alone, or with the --out or --storage it was begun with, it goes "
            "on. [made from the time]"
        ),
    ] = None
    storage: Annotated[
        str | None,
        _option(
            "Database that workers on any machines share, e.g. postgresql+psycopg://USER@HOST/DB; each "
            "of them is this same command with the same --study. [sqlite:///OUT/study.db, for this process]",
            envvar="VTUNE_STORAGE",
        ),
    ] = None
    workers: Annotated[
        int | None,
        _option("Number of workers on this machine, each with its share of its GPUs. [1]", min=1),
    ] = None
    out: Annotated[Path | None, _option("Directory for report, records and logs. [vtune-runs/STUDY]")] = None
    start_timeout: Annotated[str, _option("How long a server may take until it is healthy.")] = "10m"
    json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON on stdout.")] = False
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Send a server that runs already (a URL as --target) more than the small load of 2 requests "
            "at a time for 20 s, without asking.",
        ),
    ] = False


@dataclass(frozen=True)
class Options:
    """The command line as given: None where an option was left out."""

    slo: Annotated[
        str | None,
        _option("itl, stall, ttft, throughput, or bounds: 'itl_p99<50ms,ttft_p95{class=short}<300ms'. [itl]"),
    ] = None
    model: Annotated[str | None, _option("bundled, a directory, a .gguf file or a hub id. [bundled]")] = None
    target: Annotated[
        str | None,
        _option(
            f"{', '.join(KINDS)}, or a command with {{flags}} (and {{port}}) in it; the URL of a server "
            "that runs, to measure and diagnose it as it is with a small load: at most 103 requests, 2 at a "
            "time, for 20 s (more is asked about, see --yes); simulated:h100 or another device. [bundled]"
        ),
    ] = None
    flags: Annotated[
        str | None,
        _option(
            "Your current command or flags: the baseline, e.g. 'VAR=x vllm serve M --max-num-seqs 64'. "
            "Of a command of the target's kind the program and its environment are used, too."
        ),
    ] = None
    workload: Annotated[
        str | None,
        _option("chat, rag, batch, mixed, random or shared-prefix, or a JSON file of classes. [mixed]"),
    ] = None
    scale: Annotated[
        float | None,
        _option("Factor on prompt lengths. [so that the longest fits the context and prefills in 2 s]"),
    ] = None
    rate: Annotated[
        float | None,
        _option("Offered requests/s (Poisson). [70 % of the capacity, found first]", min=0.001),
    ] = None
    concurrency: Annotated[
        int | None, _option("A closed loop with this many requests in flight, instead of a rate.", min=1)
    ] = None
    replay: Replay = Replay()
    loads: Annotated[
        str | None,
        _option(
            "Compare configs at these levels of load too, and say where the best one changes: 2,8,16 "
            "(requests/s; with --concurrency requests in flight), auto: a replayed trace's, none. [auto]"
        ),
    ] = None
    budget: Annotated[
        str | None,
        _option(
            "Time for everything, confirmation included, e.g. 10m; simulated time with a simulated "
            "target. [10m; simulated: 30m]"
        ),
    ] = None
    trials: Annotated[
        int | None,
        _option(
            "Number of trials in addition to the baseline; may be combined with --budget, and replaces its "
            "default.",
            min=1,
        ),
    ] = None
    run_time: Annotated[
        str | None,
        _option("Length of one load, e.g. 20s or 2m. [20s, or as long as the server takes to start]"),
    ] = None
    pairs: Annotated[
        int | None, _option("Pairs of runs of the confirmation. [3 to 16, by budget]", min=2)
    ] = None
    fix: Annotated[
        list[str] | None, _option("Leave this flag as it is; 'all' leaves all but --vary. Repeatable.")
    ] = None
    vary: Annotated[
        list[str] | None, _option("Search this flag too: FLAG, or FLAG=A,B with its values. Repeatable.")
    ] = None
    space: Annotated[
        Path | None,
        _option("YAML or JSON: the flags to search with their values, and constraints on them."),
    ] = None
    seed: Annotated[
        int | None, _option("Random seed of the load and of the search. [0]", min=0, max=MAX_SEED)
    ] = None
    strategy: Annotated[
        str | None,
        _option("Search strategy: gp (auto), tpe, random, or staircase, one knob at a time. [auto]"),
    ] = None
    prior: Annotated[
        str | None,
        _option(
            "What simulates configs before they are measured, to say which to try first: auto (sketch), "
            "sketch (step times that explain what your config measured), none, simulated:h100 or another "
            "device, or a JSON file of step times. [auto]"
        ),
    ] = None
    baseline: Annotated[
        str | None,
        _option(
            "Start from what an earlier study recommended, and say whether the optimum moved (then the "
            "exit code is 1): its --out directory, its report.json, its name, or STORAGE-URL#STUDY."
        ),
    ] = None
    from_doctor: Annotated[
        Path | None,
        _option(
            "A diagnosis ('vtune doctor … --format json') whose prescriptions are tried first. [that of "
            "your config's own trial]"
        ),
    ] = None
    reached: ConnectionOptions = field(default_factory=ConnectionOptions)
    place: Place = Place()

    @property
    def resumes_only(self) -> bool:
        """Whether a study is named, and nothing is said of what it should be."""
        return self.place.study is not None and (
            replace(self, place=Place(), reached=ConnectionOptions()) == Options()
        )


def option_of(name: str) -> str:
    """The option that states a field of a job: ``--run-time``."""
    return f"--{_NAMES.get(name, name).replace('_', '-')}"
