"""Real measurements behind the tuner's benchmark: the noise of repeats, and one small exhaustive table.

    python -m benchmarks.tuner.noise repeats [--repeats 10] [--seconds 8]
    python -m benchmarks.tuner.noise table [--seconds 8]

Both need an idle machine and write a file to ``benchmarks/baselines``. Each run is a trial's: the two rungs
of ``tuner.runs.load.Load``, judged by ``tuner.runs.measure``, with the intervals that the search sees.
``repeats`` measures two settings of the bundled engine in turn, every time with new prompts and new
arrivals; :class:`Noise` draws from how far the figures of a repeat are from the medians of its setting.
``table`` measures every config of a small space once, a server started for each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadgen.measure.stats import Summary
from loadgen.plan.workload import DEFAULT_VOCAB_SIZE, preset
from loadgen.target import OpenTarget
from loadgen.targets.server import ServerTarget
from servers.files import write_atomically
from servers.slo.bounds import COUNTS
from servers.slo.objective import Slo, parse_slo
from tuner.runs.load import GeneratedLoad, load_seconds
from tuner.runs.measure import Run, measure
from tuner.runs.result import Measurement, Reading, without_nan

BASELINES = Path(__file__).parents[1] / "baselines"
REPEATS, TABLE = BASELINES / "tuner_noise.json", BASELINES / "tuner_real.json"
SCALE = 0.05
"""Of prompt lengths, so that a second holds more than one request on two cores."""


@dataclass(frozen=True)
class Setting:
    """What is measured again and again."""

    workload: str
    flags: Mapping[str, Any]
    rate: float | None = None
    concurrency: int | None = None

    def load(self, server: OpenTarget, seed: int, seconds: float) -> GeneratedLoad:
        context = server.max_model_len
        assert context is not None, "the bundled engine says how long its context is"
        workload = preset(self.workload, max_model_len=context, vocab_size=DEFAULT_VOCAB_SIZE, scale=SCALE)
        return GeneratedLoad(workload, seed, seconds, self.rate, self.concurrency)


SETTINGS = {
    "open loop, small budget": Setting("mixed", {"max_num_batched_tokens": 256}, rate=2.5),
    "closed loop": Setting("random", {"max_num_seqs": 16}, concurrency=8),
}
TABLE_AXES: Mapping[str, tuple[int, ...]] = {
    "max_num_batched_tokens": (128, 256, 512, 1024, 2048),
    "max_num_seqs": (4, 8, 16, 64),
    "long_prefill_token_threshold": (0, 128),
}
TABLE_SETTING = Setting("mixed", {}, rate=2.5)


@dataclass(frozen=True)
class Offset:
    """A figure of one run as logarithms: against its median, and its interval's ends against itself."""

    value: float
    low: float
    high: float
    n: int

    def of(self, value: float, shrink: float) -> Reading:
        """``value`` with this noise, in a run that scatters ``shrink`` times as much as the repeat did."""
        measured = value * math.exp(shrink * self.value)
        low, high = (measured * math.exp(shrink * end) for end in (self.low, self.high))
        return Reading(measured, round(self.n / shrink**2), low, high)


Offsets = Mapping[str, Offset]


@dataclass(frozen=True)
class NoiseSample:
    """One repeat, its figures together as they were measured."""

    short: Offsets
    whole: Offsets
    requests: float
    """Of the repeat."""

    def shrink(self, requests: float) -> float:
        """By how much a run of so many requests scatters less: the error of a percentile falls with the root
        of its samples."""
        return min(1.0, math.sqrt(self.requests / requests)) if requests else 1.0


class Noise:
    """Repeats to draw from, those of open and of closed loops apart."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._samples: dict[bool, list[NoiseSample]] = {False: [], True: []}
        for name in dict.fromkeys(row["setting"] for row in rows):
            own = [row for row in rows if row["setting"] == name]
            medians = {
                metric: statistics.median(values)
                for metric in own[0]["whole"]
                if all(values := [row["whole"][metric][0] for row in own])
            }
            self._samples["closed" in name] += [
                NoiseSample(
                    _offsets(row["short"], medians),
                    _offsets(row["whole"], medians),
                    row["whole"]["completed"][0],
                )
                for row in own
            ]

    @classmethod
    def read(cls, path: Path = REPEATS) -> Noise:
        return cls(json.loads(path.read_text())["rows"])

    def sample(self, rng: random.Random, closed: bool) -> NoiseSample:
        return rng.choice(self._samples[closed])


def _offsets(readings: Mapping[str, Sequence[Any]], medians: Mapping[str, float]) -> dict[str, Offset]:
    """Counts have none, nor what was 0 in some repeat."""
    return {
        metric: Offset(math.log(value / medians[metric]), _log(low, value), _log(high, value), n)
        for metric, (value, n, low, high) in readings.items()
        if metric in medians and metric not in COUNTS and value
    }


def _log(end: float | None, value: float) -> float:
    """``end`` of an interval against the value; None: there is none."""
    if end is None:
        return math.nan
    return math.log(end / value) if end > 0 else -math.inf


def rungs(server: OpenTarget, load: GeneratedLoad, slo: Slo) -> tuple[Measurement, Measurement, float]:
    """The short rung, both together, and the seconds that they took."""
    begun, runs = time.monotonic(), []
    for schedule in load.rungs():
        runs.append(Run(server.run(schedule), load_seconds(schedule)))
    return measure(runs[:1], slo), measure(runs, slo), time.monotonic() - begun


def with_goodput(load: GeneratedLoad, server: OpenTarget) -> Slo:
    """Bounds that about one request in ten misses, so that goodput has something to tell."""
    summary = Summary(Run(server.run(load.confirmation(99)), load.run_seconds).whole)
    ttft, itl = (1e3 * summary.distribution(name, None).rank(0.9) for name in ("ttft", "itl"))
    return parse_slo(f"ttft_p95<{ttft:.0f}ms,itl_p99<{itl:.0f}ms,max_stall_mean<60s")


def figures(measurement: Measurement) -> dict[str, list[float]]:
    """Metric -> value, n, low, high."""
    return {name: [*asdict(reading).values()] for name, reading in measurement.readings.items()}


def measure_repeats(repeats: int, seconds: float, out: Path) -> None:
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(ServerTarget.bundled().open(dict(setting.flags)))
            for name, setting in SETTINGS.items()
        }
        slos = {
            name: with_goodput(setting.load(servers[name], 0, seconds), servers[name])
            for name, setting in SETTINGS.items()
        }
        data: dict[str, Any] = {
            "how": f"benchmarks.tuner.noise repeats --repeats {repeats} --seconds {seconds:g}",
            "settings": {name: slo.text for name, slo in slos.items()},
            "rows": [],
        }
        for repeat, (name, setting) in itertools.product(range(repeats), SETTINGS.items()):
            load = setting.load(servers[name], repeat, seconds)
            short, whole, took = rungs(servers[name], load, slos[name])
            row = {"setting": name, "short": figures(short), "whole": figures(whole), "took": took}
            data["rows"].append(row)
            save(out, data)
            print(f"{repeat:3} {name:24} {took:5.1f} s  {whole.value('itl_p99'):.4f}", flush=True)


def table_configs() -> Iterator[dict[str, int]]:
    """Those that no rule refuses."""
    for values in itertools.product(*TABLE_AXES.values()):
        config = dict(zip(TABLE_AXES, values, strict=True))
        if config["long_prefill_token_threshold"] < config["max_num_batched_tokens"]:
            yield config


def measure_table(seconds: float, out: Path) -> None:
    slo = parse_slo("itl")
    target = ServerTarget.bundled()
    data: dict[str, Any] = {
        "how": f"benchmarks.tuner.noise table --seconds {seconds:g}",
        "load": f"mixed, prompts x{SCALE:g}, {TABLE_SETTING.rate:g} requests/s",
        "rows": [],
    }
    for config in table_configs():
        begun = time.monotonic()
        with target.open(config) as server:
            load = TABLE_SETTING.load(server, 0, seconds)
            _, whole, _ = rungs(server, load, slo)
            start = server.start_seconds
        took = time.monotonic() - begun
        data["rows"].append({"config": config, "whole": figures(whole), "start": start, "took": took})
        save(out, data)
        print(f"{took:5.1f} s  {config}  {whole.value('itl_p99'):.4f}", flush=True)


def rounded(item: Any) -> Any:
    """Four digits are more than a run is good for."""
    if isinstance(item, Mapping):
        return {key: rounded(value) for key, value in item.items()}
    if isinstance(item, list):
        return [rounded(value) for value in item]
    return float(f"{item:.4g}") if isinstance(item, float) and math.isfinite(item) else item


def save(path: Path, data: Mapping[str, Any]) -> None:
    rows = [json.dumps(without_nan(rounded(row)), separators=(",", ":")) for row in data["rows"]]
    head = {key: value for key, value in data.items() if key != "rows"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + ",\n".join(rows) + "\n]}\n"
    write_atomically(path, [text])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("repeats", "table"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=None, help="length of a run")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args(words)
    if given.what == "repeats":
        measure_repeats(given.repeats, given.seconds or 8.0, given.out or REPEATS)
    else:
        measure_table(given.seconds or 8.0, given.out or TABLE)


if __name__ == "__main__":
    main()
