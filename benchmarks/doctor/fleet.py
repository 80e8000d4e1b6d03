"""How long a diagnosis of a whole fleet takes, from a live Prometheus.

    python -m benchmarks.doctor.fleet [--engines 100] [--every 15] [--rounds 5]

The scrapes of servers that run in virtual time, most of them healthy and some with a sequence cap, are given
out to as many instances as asked for, and loaded into a Prometheus with ``promtool``. Printed are the queries
of one diagnosis, its wall-clock time, and the CPU time of the doctor and of Prometheus, which a busy machine
does not change much.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.doctor.loads import each
from benchmarks.doctor.prometheus import load_recordings, prometheus
from benchmarks.loadgen.virtual_server import VirtualServer
from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.live import Ask
from doctor.metrics.sources import PrometheusSource
from servers.metrics.exposition import Recording, record

WINDOW_S = 300.0


class Counted(PrometheusSource):
    """A source that knows how often it has asked."""

    queries = 0

    def _asker(self, at: float) -> Ask:
        ask = super()._asker(at)

        def counting(query: str) -> list[Any]:
            self.queries += 1
            return ask(query)

        return counting


def fleet(engines: int, every: float) -> Iterator[tuple[Recording, dict[str, str]]]:
    """One instance in ten has a sequence cap of 2."""
    well, capped = (recording(every, flags) for flags in ({}, {"max_num_seqs": 2}))
    for number in range(engines):
        yield (capped if number % 10 == 0 else well), {"instance": f"host{number}:8000", "job": "vllm"}


def recording(every: float, flags: dict[str, Any]) -> Recording:
    server = VirtualServer(seed=1, scrape_every=every, **flags)
    server.poisson(1.1, each(200, 64), WINDOW_S)
    return record(server.run(WINDOW_S))


@dataclass(frozen=True)
class Look:
    """One diagnosis. Seconds: of the wall clock, and of CPU in the doctor and in Prometheus."""

    found: Diagnosis
    queries: int
    wall: float
    own: float
    prometheus: float


def look(url: str, at: float) -> Look:
    source = Counted(url, 'job="vllm"', at=at)
    (server,) = (child for child in psutil.Process().children() if "prometheus" in child.name())
    wall, own, theirs = time.perf_counter(), time.process_time(), _cpu(server)
    found = diagnose(source, {"max_num_seqs": 2}, window=WINDOW_S)
    return Look(
        found,
        source.queries,
        time.perf_counter() - wall,
        time.process_time() - own,
        _cpu(server) - theirs,
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def table(rounds: int, look_once: Callable[[], Look]) -> Iterator[str]:
    yield "round  engines  capped found  queries  wall clock  CPU, doctor  CPU, Prometheus"
    for number in range(1, rounds + 1):
        seen = look_once()
        capped = sum(finding.id == "seq-cap" for finding in seen.found.findings)
        yield (
            f"{number:5d}  {len(seen.found.engines):7d}  {capped:12d}  {seen.queries:7d}  "
            f"{seen.wall:8.2f} s  {seen.own:9.2f} s  {seen.prometheus:13.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between scrapes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        loaded = list(fleet(options.engines, options.every))
        load_recordings(loaded, directory)
        at = float(loaded[0][0].times[-1]) / 1000
        with prometheus(directory) as url:
            for line in table(options.rounds, lambda: look(url, at)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
