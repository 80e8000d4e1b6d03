"""The options that say what load is sent: the same for every command that sends one. Light to import."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from servers.errors import OptionError

if TYPE_CHECKING:
    from loadgen.plan.arrivals import Arrival
    from loadgen.plan.datasets import Dataset
    from loadgen.plan.traces import Trace
    from loadgen.plan.workload import Schedule, Workload


class ArrivalKind(StrEnum):
    """Names on the command line."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"


class Oversized(StrEnum):
    """What becomes of a recorded request that is longer than the server's context."""

    ERROR = "error"
    CLIP = "clip"
    DROP = "drop"


class Dequantize(StrEnum):
    """How arrivals are spread that a trace rounded."""

    NONE = "none"
    UNIFORM = "uniform"


def seconds(text: str | float) -> float:
    """``60``, ``60s``, ``1.5m``, ``500ms``, ``1h``. Raises typer.BadParameter."""
    if isinstance(text, float):
        return text
    for suffix, factor in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("", 1.0)):
        if text.endswith(suffix):
            try:
                value = float(text.removesuffix(suffix)) * factor
            except ValueError:
                break
            if 0 < value < float("inf"):
                return value
            break
    raise typer.BadParameter(f"{text!r} is no length of time: write e.g. 60s, 500ms or 2m")


def positive(value: float | None) -> float | None:
    """Raises typer.BadParameter."""
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter("it must be a positive number")
    return value


def span(text: str) -> tuple[float, float]:
    """``0s,10m``. Raises typer.BadParameter."""
    first, comma, last = text.partition(",")
    start = 0.0 if first.strip() in ("", "0", "0s") else seconds(first.strip())
    if not comma or seconds(last.strip()) <= start:
        raise typer.BadParameter(f"{text!r} is no window: write e.g. 0s,10m")
    return start, seconds(last.strip())


def _option(text: str, **options: Any) -> Any:
    return typer.Option(help=text, **options)


def _time(text: str) -> Any:
    return typer.Option(help=text, parser=seconds, metavar="TIME")


def _number(text: str) -> Any:
    return typer.Option(help=text, callback=positive)


@dataclass(frozen=True)
class Recorded:
    """How recorded traffic is replayed; which file it is in is another option's affair."""

    trace_columns: Annotated[
        str | None,
        _option("E.g. time=ts:ms,prompt=in,output=out[,class=kind][,blocks=ids,block_tokens=512]."),
    ] = None
    trace_window: Annotated[
        Any, typer.Option(parser=span, metavar="FROM,TO", help="The part of the trace to replay: 0s,10m.")
    ] = None
    rate_scale: Annotated[float, _number("Speed-up of the replayed arrivals.")] = 1.0
    length_scale: Annotated[float, _number("Factor on recorded prompts and outputs.")] = 1.0
    dequantize: Annotated[
        Dequantize, _option("Spread arrivals that a trace rounded to a tick (Mooncake: 3 s).")
    ] = Dequantize.NONE
    oversized: Annotated[
        Oversized, _option("Recorded requests that exceed the context: an error, clipped, or dropped.")
    ] = Oversized.ERROR

    def read(self, path: Path) -> Trace:
        """The part of the trace that is asked for. Raises TraceError."""
        from loadgen.plan.trace_formats import Columns, read_trace

        columns = Columns.parse(self.trace_columns) if self.trace_columns else None
        trace = read_trace(path, columns)
        return trace if self.trace_window is None else trace.window(*self.trace_window)

    def ready(self, trace: Trace, seed: int) -> Trace:
        """Spread over its ticks by ``seed`` and scaled, as asked. Raises TraceError."""
        spread = trace.dequantized(seed) if self.dequantize is Dequantize.UNIFORM else trace
        return spread.scaled(rate=self.rate_scale, length=self.length_scale)


@dataclass(frozen=True)
class Load(Recorded):
    """What is sent, as asked for. Times in seconds."""

    rate: Annotated[float | None, _number("Open loop: requests per second.")] = None
    concurrency: Annotated[
        int | None, _option("Closed loop: requests in flight; with --rate, a cap on them.", min=1)
    ] = None
    duration: Annotated[float | None, _time("How long to send: 60s, 2m.")] = None
    num_requests: Annotated[int | None, _option("How many requests to send.", min=1)] = None
    arrival: Annotated[ArrivalKind, _option("How open-loop requests arrive.")] = ArrivalKind.POISSON
    burstiness: Annotated[
        float | None, _number("Shape of gamma arrivals: below 1 bursts, 1 Poisson, above 1 even.")
    ] = None
    workload: Annotated[
        str, _option("chat, rag, batch, mixed, random or shared-prefix; or a JSON file of classes.")
    ] = "chat"
    input_len: Annotated[int | None, _option("Prompt tokens of a one-class workload.", min=1)] = None
    output_len: Annotated[
        int | None, _option("Output tokens of a one-class workload, or of a dataset's answers.", min=1)
    ] = None
    scale: Annotated[
        float | None, _number("Factor on a workload's prompt lengths; default: context / 32768, at most 1.")
    ] = None
    priorities: Annotated[
        bool | None,
        typer.Option(
            "--priorities/--no-priorities",
            help="Send each class's priority (the server needs --scheduling-policy priority). Default: those "
            "of a workload file.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        _option(
            "Replay recorded traffic, in place of a workload: a file of Azure's, Mooncake's, Bailian's or "
            "BurstGPT's kind, of `vtune bench record`, or any CSV or JSON lines with --trace-columns."
        ),
    ] = None
    dataset: Annotated[
        Path | None,
        _option(
            "Prompts or conversations in place of a workload: ShareGPT-format JSON, an OpenAI batch file, or "
            "JSON lines with prompt or messages."
        ),
    ] = None
    think_time: Annotated[
        float | None, _time("Mean pause before a further turn of a conversation. Default: none.")
    ] = None
    natural_stop: Annotated[
        bool,
        typer.Option(
            "--natural-stop",
            help="Let the model end answers before their length: for a dataset's, and for servers "
            "that refuse ignore_eos.",
        ),
    ] = False

    def check(self) -> None:
        """Raise OptionError for options that do not go together."""
        if self.trace and self.dataset:
            raise OptionError("--trace and --dataset are two sources of requests: give one")
        if self.trace and (self.rate is not None or self.arrival is not ArrivalKind.POISSON):
            raise OptionError("a trace brings its own arrivals: use --rate-scale in place of --rate")
        if self.burstiness is not None and self.arrival is not ArrivalKind.GAMMA:
            raise OptionError("--burstiness needs --arrival gamma")
        for name in ("trace_columns", "trace_window"):
            if getattr(self, name) is not None and not self.trace:
                raise OptionError(f"--{name.replace('_', '-')} needs --trace")
        if self.trace:
            return
        if self.rate is None:
            if self.concurrency is None:
                raise OptionError("give --rate (requests per second) or --concurrency (requests in flight)")
            if self.arrival is not ArrivalKind.POISSON:
                raise OptionError(
                    "--arrival and --burstiness need --rate: a closed loop has no arrival process"
                )
        if self.duration is None and self.num_requests is None and not self.dataset:
            raise OptionError("give --duration (e.g. 60s) or --num-requests (e.g. 200)")

    def at_level(self, over: str, level: float) -> Load:
        """The same load at another ``rate``, or another ``concurrency`` in a closed loop."""
        if over == "rate":
            return replace(self, rate=level)
        return replace(self, rate=None, concurrency=round(level))

    def source(
        self, max_model_len: int, vocab_size: int | None = None, warmup: int | None = None
    ) -> Callable[[int], Schedule]:
        """What makes the schedule of a seed; files are read once. Raises WorkloadError, OptionError."""
        self.check()
        if self.trace:
            return self._trace_source(self.read(self.trace), max_model_len, vocab_size, warmup)
        if self.dataset:
            from loadgen.plan.dataset_formats import read_dataset

            return self._dataset_source(read_dataset(self.dataset))
        return self._workload_source(self._preset(max_model_len, vocab_size), warmup)

    def _trace_source(
        self, trace: Trace, max_model_len: int, vocab_size: int | None, warmup: int | None
    ) -> Callable[[int], Schedule]:
        from loadgen.plan.workload import DEFAULT_VOCAB_SIZE

        def schedule(seed: int) -> Schedule:
            ready = self.ready(trace, seed)
            if self.duration is not None:
                ready = ready.window(0.0, self.duration)
            if self.num_requests is not None:
                ready = ready.head(self.num_requests)
            return ready.schedule(
                seed=seed,
                max_model_len=max_model_len,
                vocab_size=vocab_size or DEFAULT_VOCAB_SIZE,
                max_concurrency=self.concurrency,
                oversized=self.oversized.value,
                warmup=1 if warmup is None else warmup,
            )

        return schedule

    def _dataset_source(self, dataset: Dataset) -> Callable[[int], Schedule]:
        return lambda seed: dataset.schedule(
            seed=seed,
            arrival=self._arrival(),
            num_requests=self.num_requests,
            duration=self.duration,
            max_concurrency=self._cap,
            output_len=self.output_len,
            think=self.think_time or 0.0,
            natural_stop=self.natural_stop,
        )

    def _preset(self, max_model_len: int, vocab_size: int | None) -> Workload:
        from loadgen.plan.workload import DEFAULT_VOCAB_SIZE
        from loadgen.plan.workload_file import workload_of

        return workload_of(
            self.workload,
            max_model_len=max_model_len,
            vocab_size=vocab_size or DEFAULT_VOCAB_SIZE,
            input_len=self.input_len,
            output_len=self.output_len,
            scale=self.scale,
        )

    def _workload_source(self, workload: Workload, warmup: int | None) -> Callable[[int], Schedule]:
        return lambda seed: workload.schedule(
            seed=seed,
            arrival=self._arrival(),
            num_requests=self.num_requests,
            duration=self.duration,
            max_concurrency=self._cap,
            warmup=warmup,
        )

    @property
    def sends_priorities(self) -> bool:
        """To a server that runs already; a simulation has them, and heeds them where its policy does."""
        from loadgen.plan.workload_file import is_file

        return is_file(self.workload) if self.priorities is None else self.priorities

    @property
    def _cap(self) -> int | None:
        return self.concurrency if self.rate is not None else None

    def _arrival(self) -> Arrival:
        from loadgen.plan.arrivals import ClosedLoop, Constant, Gamma, Poisson

        if self.rate is None:
            assert self.concurrency is not None
            return ClosedLoop(self.concurrency)
        if self.arrival is ArrivalKind.CONSTANT:
            return Constant(self.rate)
        if self.arrival is ArrivalKind.GAMMA:
            return Gamma(self.rate, self.burstiness or 1.0)
        return Poisson(self.rate)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of ``command`` that is a dataclass, such as :class:`Load`, by its fields, each
    an option; a field that is a dataclass itself stands for its own fields."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for own in inspect.signature(command, eval_str=True).parameters.values():
        if _is_group(own.annotation):
            groups[own.name] = own.annotation
            parameters += _options_of(own.annotation)
        else:
            parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_fields(**given: Any) -> None:
        made = {name: _taken(kind, given) for name, kind in groups.items()}
        command(**made, **given)

    with_fields.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_fields


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _options_of(kind: type) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    own = inspect.get_annotations(kind)  # those of a base class come after them
    found: list[inspect.Parameter] = []
    for field in sorted(fields(kind), key=lambda field: field.name not in own):
        annotation = hints[field.name]
        if _is_group(annotation):
            found += _options_of(annotation)
            continue
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        found.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )
    return found


def _taken(kind: type, given: dict[str, Any]) -> Any:
    """The dataclass, of its options among ``given``, which are removed there."""
    hints = get_type_hints(kind)
    return kind(
        **{
            field.name: _taken(hint, given) if _is_group(hint := hints[field.name]) else given.pop(field.name)
            for field in fields(kind)
        }
    )
