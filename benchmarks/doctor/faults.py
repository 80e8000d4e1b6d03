"""Fault injection: does the doctor find what was done to a server, with a real Prometheus in between?

    python -m benchmarks.doctor.faults live --out DIR [--seconds 80] [--budget 600]
    python -m benchmarks.doctor.faults simulated --out DIR [--quick]
    python -m benchmarks.doctor.faults report --out DIR

``live`` starts the bundled engine with every fault, and healthy controls, under load while a Prometheus
scrapes it every 15 s; it keeps one file a case in DIR, leaves out cases that have theirs, and stops before
``--budget`` seconds are over, so that it can be called again. ``simulated`` runs three further set-ups of
every fault on a simulated device, loads their scrapes into a Prometheus and diagnoses from there. ``report``
prints the table.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.doctor.fault_catalog import CONTROLS, FAULTS, HEALTHY, Fault, Setup
from benchmarks.doctor.prometheus import await_first_scrape, load_recordings, prometheus
from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.experiment import BUNDLED_MODEL, ExperimentSide
from doctor.diagnosis.finding import Finding
from doctor.metrics.sources import PrometheusSource, Scrapes
from doctor.proof.experiment_load import schedule
from doctor.proof.experiment_target import Stage, opened
from loadgen.measure.record import Records
from servers.kinds import KINDS
from servers.metrics.exposition import record

EVERY_S = 15
CASES = (*FAULTS, *CONTROLS)
DEVICE, MODEL = "simulated:h100", "8b"
SIMULATED_S = 150.0


@dataclass(frozen=True)
class Outcome:
    """What was found. ``prescribed``: whether the first cure is the right one; None for a healthy server."""

    case: str
    truth: str
    found: tuple[str, ...]
    hit: bool
    prescribed: bool | None
    cure: str

    @classmethod
    def of(cls, fault: Fault, diagnosis: Diagnosis) -> Outcome:
        serious = [f for f in diagnosis.findings if f.severity != "info"]
        found = tuple(
            f.id + ("" if f.suppressed_by is None else f" (by {f.suppressed_by})") for f in diagnosis.findings
        )
        if fault.truth == HEALTHY:
            return cls(fault.name, fault.truth, found, diagnosis.healthy and not serious, None, "")
        top = diagnosis.findings[:2]
        named = [f for f in top if f.id == fault.truth] or [f for f in top if f.id in fault.also]
        cure = named[0].prescriptions[0] if named and named[0].prescriptions else None
        return cls(
            fault.name,
            fault.truth,
            found,
            bool(named),
            bool(named) and is_right(fault, named[0]),
            "" if cure is None else cure.args or cure.text,
        )


def is_right(fault: Fault, finding: Finding) -> bool:
    """Whether the first cure does what the fault calls for."""
    if not finding.prescriptions:
        return False
    cure = finding.prescriptions[0]
    if "do" in fault.right:
        return fault.right["do"] in cure.text
    return any(
        name in cure.changes and _goes(wanted, _level(cure.was.get(name)), _level(cure.changes[name]))
        for name, wanted in fault.right.items()
    )


def _goes(wanted: Any, was: Any, now: Any) -> bool:
    match wanted:
        case "drop":
            return now is None
        case "up":
            return now is not None and (was is None or now > was)
        case "down":
            return now is None or (was is not None and now < was)
    return bool(now == wanted)


def _level(value: Any) -> Any:
    """What of a flag's value goes up or down."""
    return value.get("num_speculative_tokens") if isinstance(value, Mapping) else value


def injected(fault: Fault, seconds: float, directory: Path) -> Diagnosis:
    """Run a fault's live set-up and diagnose it through a Prometheus."""
    setup, stage = fault.live, Stage(BUNDLED_MODEL, BUNDLED_MODEL, log_dir=directory)
    baseline = None
    if setup.earlier is not None:
        with opened(stage, setup.earlier) as server:
            plan = schedule(setup.earlier.load, seed=2, seconds=seconds / 2)
            baseline = Scrapes(server.run(plan, drain=1.0).scrapes)
    with ExitStack() as stack:
        servers = [stack.enter_context(opened(stage, side)) for side in setup.sides]
        hosts = [server.url.removeprefix("http://").rstrip("/") for server in servers]
        url = stack.enter_context(prometheus(directory, hosts, interval=f"{EVERY_S}s"))
        for host in hosts:
            await_first_scrape(url, host)
        begun = time.time()
        loads = [
            threading.Thread(target=_send, args=(server, side, seconds))
            for server, side in zip(servers, setup.sides, strict=True)
        ]
        for load in loads:
            load.start()
        time.sleep(max(0.0, begun + seconds - time.time()))
        # What the last scrape before the end of the load saw; the window leaves out the idle time before.
        source = PrometheusSource(url, at=begun + seconds)
        found = diagnose(
            source,
            setup.sides[0].engine,
            setup.slo,
            window=seconds,
            assume=setup.assume,
            baseline=baseline,
            baseline_flags=None if setup.earlier is None else setup.earlier.engine,
            kind=KINDS[BUNDLED_MODEL],
        )
        for load in loads:
            load.join()
    return found


def _send(server: Any, side: ExperimentSide, seconds: float) -> None:
    server.run(schedule(side.load, seed=1, seconds=seconds), drain=1.0)


def run_live(out: Path, seconds: float, budget: float, only: str) -> None:
    begun, longest = time.monotonic(), 1.3 * seconds
    for fault in CASES:
        path = out / f"live-{_slug(fault.name)}.json"
        if path.exists() or only not in fault.name:
            continue
        if time.monotonic() - begun + longest > budget:
            print("time is up; call again for the rest")
            return
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            found = injected(fault, seconds, Path(directory))
        longest = max(longest, time.monotonic() - started)
        outcome = Outcome.of(fault, found)
        path.with_suffix(".diagnosis").write_text(json.dumps(found.to_json()))
        path.write_text(json.dumps([vars(outcome)], indent=1))
        print(_line(outcome), flush=True)


def simulated_records(setup: Setup, side: ExperimentSide, seconds: float, seed: int) -> Records:
    stage = Stage(DEVICE, MODEL, acceptance=setup.acceptance)
    with opened(stage, side) as server:
        return server.run(schedule(side.load, seed=seed, seconds=seconds), drain=0.0)


def run_simulated(out: Path, seconds: float, only: str, quick: bool) -> None:
    """Every fault's simulated set-ups, a Prometheus a fault; those that have their file are left out."""
    for fault in CASES:
        path = out / f"simulated-{_slug(fault.name)}.json"
        if path.exists() or only not in fault.name:
            continue
        setups = fault.simulated[:1] if quick else fault.simulated
        with tempfile.TemporaryDirectory() as directory:
            found = simulated(setups, seconds, Path(directory))
        outcomes = [Outcome.of(fault, diagnosis) for diagnosis in found]
        path.with_suffix(".diagnosis").write_text(json.dumps([diagnosis.to_json() for diagnosis in found]))
        path.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1))
        for outcome in outcomes:
            print(_line(outcome), flush=True)


def simulated(setups: Sequence[Setup], seconds: float, directory: Path) -> list[Diagnosis]:
    """Run them in virtual time, load what a Prometheus would have scraped, and diagnose from there."""
    loaded, ends, baselines = [], [], []
    for case, setup in enumerate(setups):
        before = setup.earlier and thinned(simulated_records(setup, setup.earlier, seconds, 2), seconds)
        baselines.append(Scrapes(before) if before else None)
        for number, side in enumerate(setup.sides):
            scrapes = thinned(simulated_records(setup, side, seconds, 1), seconds)
            labels = {"case": f"case-{case}", "instance": f"host{number}:8000"}
            loaded.append((record(scrapes), labels))
        ends.append(scrapes[-1][0] / 1000)
    load_recordings(loaded, directory)
    with prometheus(directory) as url:
        return [
            diagnose(
                PrometheusSource(url, f'case="case-{case}"', at=ends[case]),
                setup.sides[0].engine,
                setup.slo,
                window=seconds,
                assume=setup.assume,
                baseline=baselines[case],
                baseline_flags=None if setup.earlier is None else setup.earlier.engine,
            )
            for case, setup in enumerate(setups)
        ]


def thinned(records: Records, seconds: float) -> list[tuple[int, str]]:
    """The scrapes of a Prometheus that looks every 15 s, while the load lasts."""
    start = records.scrapes[0][0]
    return [scrape for scrape in records.scrapes if (scrape[0] - start) % (EVERY_S * 1000) == 0][
        : int(seconds // EVERY_S) + 1
    ]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _line(outcome: Outcome) -> str:
    right = {None: "", True: "right cure", False: "WRONG CURE"}[outcome.prescribed]
    state = "ok  " if outcome.hit else "MISS"
    found = ", ".join(outcome.found) or "nothing"
    return f"{state} {outcome.case} ({outcome.truth}): {found}; {right} {outcome.cure}"


def outcomes_of(out: Path, kind: str) -> dict[str, list[Outcome]]:
    """Saved outcomes by case."""
    read = {}
    for fault in CASES:
        path = out / f"{kind}-{_slug(fault.name)}.json"
        if path.exists():
            saved = json.loads(path.read_text())
            read[fault.name] = [Outcome(**{**item, "found": tuple(item["found"])}) for item in saved]
    return read


def report(
    live: Mapping[str, Sequence[Outcome]], simulated: Mapping[str, Sequence[Outcome]]
) -> Iterator[str]:
    yield "| injected | truth | live | simulated | right cure, live | simulated |"
    yield "|---|---|---|---|---|---|"
    for fault in CASES:
        cells = [
            _share(kind.get(fault.name, ()), what)
            for what in ("hit", "prescribed")
            for kind in (live, simulated)
        ]
        if fault.truth == HEALTHY:
            cells[2:] = ["", ""]
        yield f"| {fault.name} | {fault.truth} | {' | '.join(cells)} |"
    both = [outcome for kind in (live, simulated) for own in kind.values() for outcome in own]
    sick = [outcome for outcome in both if outcome.truth != HEALTHY]
    well = [outcome for outcome in both if outcome.truth == HEALTHY]
    yield ""
    yield (
        f"recall {_share(sick, 'hit')}; right cure {_share(sick, 'prescribed')}; "
        f"healthy servers with a false alarm {sum(not o.hit for o in well)} of {len(well)}"
    )


def _share(outcomes: Iterable[Outcome], what: str) -> str:
    answers = [bool(getattr(outcome, what)) for outcome in outcomes]
    return f"{sum(answers)} of {len(answers)}" if answers else "not run"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("live", "simulated", "report"))
    parser.add_argument("--out", type=Path, required=True, help="where the outcomes are kept")
    parser.add_argument("--seconds", type=float, help="of load (live: 80, simulated: 150)")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which live begins no case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="simulated: one set-up a fault")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    match options.what:
        case "live":
            run_live(options.out, options.seconds or 80.0, options.budget, options.only)
        case "simulated":
            run_simulated(options.out, options.seconds or SIMULATED_S, options.only, options.quick)
        case _:
            print("\n".join(report(outcomes_of(options.out, "live"), outcomes_of(options.out, "simulated"))))


if __name__ == "__main__":
    main()
