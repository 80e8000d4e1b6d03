"""What another tool's file states of one run: figures without the requests behind them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from servers.errors import UserError

METRICS = ("ttft", "tpot", "itl", "inter_chunk", "e2e", "e2e_per_token", "lateness")
"""As in :mod:`loadgen.measure.stats`, and ``e2e_per_token``: E2E / output tokens, the first's wait with it.
Each tool's names are translated by what they mean: three tools call three different things ITL."""
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
RATES = ("throughput", "request_rate", "goodput")
_ALIASES = {"avg": "mean", "median": "p50"}
_STATISTIC = re.compile(r"mean|p(?:50|75|90|95|99|999)")

T = TypeVar("T")


class ForeignError(UserError):
    """A file is no result of a tool that is known, or a damaged one; the message says which."""


@dataclass(frozen=True)
class AskedLoad:
    """What a tool was told to send, as far as its file says."""

    rate: float | None = None
    """Requests per second; infinity: all at once. None: not stated, or a closed loop."""
    concurrency: float | None = None
    requests: float | None = None
    workload: str = ""

    def matches(self, other: AskedLoad) -> bool:
        """Whether nothing that both state differs."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return all(mine == theirs or mine in (None, "") or theirs in (None, "") for mine, theirs in pairs)

    def __str__(self) -> str:
        parts = [self.workload] * bool(self.workload)
        if self.rate is not None:
            parts.append("all at once" if math.isinf(self.rate) else f"{self.rate:g} req/s")
        if self.concurrency is not None:
            parts.append(f"at most {self.concurrency:g} in flight")
        if self.requests is not None:
            parts.append(f"{self.requests:g} requests")
        return ", ".join(parts) or "a load that is not stated"


@dataclass(frozen=True)
class StatedResult:
    """One run. ``figures``: ``ttft_p99`` and the like in seconds, rates per second."""

    tool: str
    origin: str
    """File, and the place in one with several results."""
    figures: Mapping[str, float]
    asked: AskedLoad = AskedLoad()
    model: str = ""
    server: str = ""
    """vllm or sglang, where the tool names the server's kind."""
    seconds: float | None = None
    completed: float | None = None
    failed: float | None = None
    prompt_tokens: float | None = None
    """Mean of the prompts; so is ``output_tokens`` of the answers."""
    output_tokens: float | None = None
    notes: tuple[str, ...] = field(default=())
    """What its figures mean, and what is wrong with them."""

    def __post_init__(self) -> None:
        """Latencies of 0 are left out: a stream that came in one piece has none."""
        zero = sorted(
            {name.rpartition("_")[0] for name, value in self.figures.items() if value <= 0}
            & {*METRICS} - {"lateness"}
        )
        if zero:
            kept = {
                name: value
                for name, value in self.figures.items()
                if value > 0 or name.rpartition("_")[0] not in zero
            }
            said = f"{', '.join(zero)} of 0 left out: its answers came in one piece, not streamed"
            object.__setattr__(self, "figures", kept)
            object.__setattr__(self, "notes", (*self.notes, said))

    def value(self, figure: str) -> float:
        """NaN for what is not stated."""
        return self.figures.get(figure, math.nan)

    @property
    def rate_share(self) -> float:
        """Completed requests per second over those asked for; 1 where no rate was asked for."""
        rate, reached = self.asked.rate, self.value("request_rate")
        return reached / rate if rate and math.isfinite(rate) and math.isfinite(reached) else 1.0

    @property
    def limits(self) -> tuple[str, ...]:
        """What the file cannot say, for every report of it."""
        lacking = [name for name in ("seconds", "completed", "failed") if getattr(self, name) is None]
        lacking += [name for name in RATES[:2] if name not in self.figures]
        names = {"seconds": "its duration", "completed": "the requests that succeeded", "failed": "failures"}
        names |= {"throughput": "output tokens per second", "request_rate": "requests per second"}
        said = [f"{self.tool} does not state {', '.join(names[name] for name in lacking)}"] * bool(lacking)
        if not any(name.startswith("lateness") for name in self.figures):
            said.append(
                "nothing tells whether its client kept up: TTFT and E2E count from the sending, "
                "not from the time at which a request was due"
            )
        if self.failed:
            said.append(f"its {self.failed:g} failed requests are in no percentile")
        return (*said, *self.notes)

    @property
    def faults(self) -> tuple[str, ...]:
        """Why its figures are no measurement of the server."""
        late = self.value("lateness_p99")
        said = ["no request succeeded"] * (self.completed == 0)
        if late > 1:
            said.append(f"its client sent requests up to {late:.3g} s (P99) after they were due")
        return tuple(said)


@dataclass(frozen=True)
class Reader:
    """Of one tool's files. ``fits`` looks at the top level only; ``read`` raises ForeignError."""

    tool: str
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], str], Sequence[StatedResult]]


def converted(value: Any, kind: type[T], tool: str, origin: str) -> T:
    """``value`` as ``kind``, each field checked. Raises ForeignError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ForeignError(f"{origin}: a result of {tool}, but damaged ({error})") from None


def statistics(metric: str, stated: Mapping[str, Any] | None, seconds: float = 1.0) -> dict[str, float]:
    """The mean and the percentiles among ``stated``, of values in ``seconds``, by our names."""
    found = {}
    for name, value in (stated or {}).items():
        statistic = _ALIASES.get(name, name.replace(".", ""))
        if _STATISTIC.fullmatch(statistic) and is_number(value):
            found[f"{metric}_{statistic}"] = value * seconds
    return found


def only_numbers(**values: Any) -> dict[str, float]:
    """Those that are finite numbers."""
    return {name: float(value) for name, value in values.items() if is_number(value)}


def is_number(value: Any) -> bool:
    """A finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def ratio(whole: float | None, parts: float | None) -> float | None:
    """``whole`` / ``parts``, None where either is not stated."""
    return None if whole is None or not parts else whole / parts


def numbered(results: Sequence[StatedResult], origin: str) -> Iterator[StatedResult]:
    """Each with its place among them."""
    for number, result in enumerate(results, 1):
        yield replace(result, origin=f"{origin}, result {number}") if len(results) > 1 else result
