"""Is the doctor right? Its findings, and two peers' verdicts, on recordings whose cause is known.

    python -m benchmarks.doctor.matrix [--recordings FOLDER] [--every N] [--quick] [--all]

``--recordings`` is a folder of recordings of a real server: each in a folder of its own with
``series.prom.gz`` and a ``meta.json`` that has its command (``server_cmd``). Beside them stand the loads of
``benchmarks/doctor/loads.py``, which run in virtual time. A cause counts as found where it is the first or
the second finding, a healthy server as left alone where there is no finding of severity warning or above and
the doctor calls it healthy, if it holds its objectives.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.doctor.loads import CASES, HEALTHY, recorded
from benchmarks.peers.peer_rules import PEERS, Figures, Peer
from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.playbook import load_all
from doctor.metrics.sources import Scrapes
from servers.command import parse_command
from servers.metrics.exposition import read_series_text, record, split_scrapes

TRUTH: Mapping[str, str] = {
    "healthy-steady": HEALTHY,
    "spec-none": HEALTHY,
    "kv-starved": "kv-pressure",
    "seq-cap": "seq-cap",
    "overload": "overload",
    "long-prefill-itl-spikes": "itl-spikes-long-prefill",
    "long-prefill-small-chunks": "itl-spikes-long-prefill",
    "small-budget-ttft": "prefill-slow",
    "prefix-unshared": "prefix-misses",
    "spec-ngram-bad": "speculation-loses",
}
"""What is wrong in the recordings of a real server, by their folders' names."""
ASSUME = {"prefix-unshared": {"shared_prefix": 1000.0}}


@dataclass(frozen=True)
class Exhibit:
    """Scrapes with what is known of them."""

    group: str
    name: str
    truth: str
    scrapes: Sequence[tuple[int, str]]
    flags: Mapping[str, Any]
    assume: Mapping[str, float] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    slo: str | None = None

    def diagnosis(self, flags_known: bool) -> Diagnosis:
        flags = self.flags if flags_known else None
        return diagnose(Scrapes(self.scrapes), flags, self.slo, assume=self.assume)


@dataclass(frozen=True)
class Verdict:
    """What was said of an exhibit: ``first`` as a word for the matrix, and whether it was right."""

    first: str
    right: bool


def of_doctor(exhibit: Exhibit, flags_known: bool) -> Verdict:
    return judged(exhibit, exhibit.diagnosis(flags_known))


def judged(exhibit: Exhibit, found: Diagnosis) -> Verdict:
    serious = [finding.id for finding in found.findings if finding.severity != "info"]
    if exhibit.truth == HEALTHY:  # and yet it may miss an objective, which is said
        missed = any(judged.held is False for judged in found.objectives)
        alarms = [name for name in serious if not (missed and name in _symptoms())]
        well = found.healthy or not all(judged.held or judged.excused for judged in found.objectives)
        return Verdict(alarms[0] if alarms else HEALTHY, well and not alarms)
    top = [finding.id for finding in found.findings[:2]]
    right = bool({exhibit.truth, *exhibit.also} & set(top))
    return Verdict(exhibit.truth if right else serious[0] if serious else HEALTHY, right)


@cache
def _symptoms() -> frozenset[str]:
    """Findings that say no cause."""
    return frozenset(book.id for book in load_all() if book.explained_by)


def of_peer(exhibit: Exhibit, peer: Peer) -> Verdict:
    said = peer.judge(Figures(record(exhibit.scrapes)))
    causes = frozenset() if said is None else peer.causes[said]
    right = said is None if exhibit.truth == HEALTHY else bool({exhibit.truth, *exhibit.also} & causes)
    return Verdict(said or HEALTHY, right)


def recordings(folder: Path, every: int) -> Iterator[Exhibit]:
    for path in sorted(folder.iterdir()):
        if path.name in TRUTH:
            text, _ = read_series_text(path / "series.prom.gz")
            command = json.loads((path / "meta.json").read_text())["server_cmd"]
            yield Exhibit(
                "recorded",
                path.name,
                TRUTH[path.name],
                split_scrapes(text)[::every],
                parse_command(command).flags,
                ASSUME.get(path.name, {}),
            )


def virtual_loads(every: int) -> Iterator[Exhibit]:
    for case in CASES.values():
        scrapes, flags = recorded(case)
        group = "virtual, further" if case.further else "virtual, seen"
        thinned = scrapes[::every]
        if len(thinned) >= 3:
            yield Exhibit(group, case.name, case.truth, thinned, flags, case.assume, case.also, case.slo)


def judges(quick: bool) -> dict[str, Any]:
    """Every column of the table, by its name."""
    own = {"vtune doctor": lambda exhibit: of_doctor(exhibit, True)}
    if not quick:
        own["... flags unknown"] = lambda exhibit: of_doctor(exhibit, False)
    return own | {peer.name: lambda exhibit, peer=peer: of_peer(exhibit, peer) for peer in PEERS}


def table(exhibits: Sequence[Exhibit], said: Mapping[str, Sequence[Verdict]]) -> Iterator[str]:
    """Recall a kind, then false alarms and what was found in all, a group of exhibits and judge a column."""
    kinds = sorted({exhibit.truth for exhibit in exhibits} - {HEALTHY})
    yield "| truth | exhibits | " + " | ".join(said) + " |"
    yield "|---|---|" + "---|" * len(said)
    for kind in kinds:
        yield _row(kind, [e.truth == kind for e in exhibits], said)
    yield _row("every cause", [e.truth != HEALTHY for e in exhibits], said)
    yield _row("healthy, left alone", [e.truth == HEALTHY for e in exhibits], said)


def _row(label: str, chosen: Sequence[bool], said: Mapping[str, Sequence[Verdict]]) -> str:
    cells = [
        f"{sum(verdict.right for verdict, mine in zip(verdicts, chosen, strict=True) if mine)}"
        for verdicts in said.values()
    ]
    return f"| {label} | {sum(chosen)} | " + " | ".join(cells) + " |"


def confusion(exhibits: Iterable[Exhibit], verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Truth against what was said first; the rows' sums are the exhibits."""
    counts = Counter((e.truth, v.first) for e, v in zip(exhibits, verdicts, strict=True))
    truths = sorted({truth for truth, _ in counts})
    words = sorted({word for _, word in counts})
    yield "| truth \\ said | " + " | ".join(words) + " |"
    yield "|---|" + "---|" * len(words)
    for truth in truths:
        yield f"| {truth} | " + " | ".join(str(counts[truth, word] or "") for word in words) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recordings", type=Path, help="folder of recordings of a real server")
    parser.add_argument("--every", type=int, default=1, help="keep every n-th scrape (they are 2 s apart)")
    parser.add_argument("--quick", action="store_true", help="only with known flags")
    parser.add_argument("--all", action="store_true", help="also print the confusion matrix of every judge")
    options = parser.parse_args()
    exhibits = [] if options.recordings is None else list(recordings(options.recordings, options.every))
    exhibits += virtual_loads(options.every)
    said = {name: [judge(e) for e in exhibits] for name, judge in judges(options.quick).items()}
    for group in dict.fromkeys(exhibit.group for exhibit in exhibits):
        chosen = [exhibit.group == group for exhibit in exhibits]
        some = {
            name: [verdict for verdict, mine in zip(verdicts, chosen, strict=True) if mine]
            for name, verdicts in said.items()
        }
        print(f"\n{group}\n")
        print("\n".join(table([e for e in exhibits if e.group == group], some)))
    for name, verdicts in said.items() if options.all else ():
        print(f"\n{name}\n")
        print("\n".join(confusion(exhibits, verdicts)))
    for name, verdicts in said.items():
        wrong = [
            f"{e.name} ({e.truth}): {v.first}" for e, v in zip(exhibits, verdicts, strict=True) if not v.right
        ]
        if "vtune" in name or "flags" in name:
            print(f"\n{name}, wrong: {'; '.join(wrong) or 'nothing'}")


if __name__ == "__main__":
    main()
