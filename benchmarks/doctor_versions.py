"""Is the doctor right on every release? Recordings whose cause is known, as each release would show them.

    python -m benchmarks.doctor_versions [--recordings FOLDER] [--every N] [--only WORDS]

The recordings of a real vLLM 0.32 in ``--recordings`` (default ``../shared/scrapes``; left out where it is
not there) and the loads of ``benchmarks/doctor/loads.py`` are translated by the facts of the wheels into
releases of vLLM and SGLang (:mod:`benchmarks.servers.translation`). A cause counts as found where it is the
first or the second finding, a healthy server as left alone where nothing is found and it is called healthy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.doctor.matrix import Exhibit, Verdict, judged, recordings, virtual_loads
from benchmarks.servers.translation import exposed, translated
from doctor.diagnosis.diagnose import diagnose
from doctor.metrics.sources import Observation, Source, observe_recording
from servers.facts import releases_of, version_of
from servers.kind import ServerKind
from servers.kinds import SGLANG, VLLM
from servers.metrics.exposition import Recording, record

RECORDINGS = Path("../shared/scrapes")


@dataclass(frozen=True)
class Release:
    kind: ServerKind
    version: str

    def __str__(self) -> str:
        return f"{self.kind.label} {self.version}"


class OfRelease(Source):
    """A recording of a server that tells its version."""

    def __init__(self, recording: Recording, release: Release) -> None:
        self.name, self._recording, self._release = str(release), recording, release

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        seen = observe_recording(self._recording, self.name, window, slo)
        return replace(seen, version=self._release.version)


def releases(kind: ServerKind) -> list[Release]:
    """The last of each minor release, and the last before each change of what is exposed."""
    told = releases_of(kind.name)
    assert told is not None, "only kinds that have wheels"
    chosen = []
    for version, following in zip(told.releases, [*told.releases[1:], None], strict=True):
        same_minor = following is not None and version_of(version)[:2] == version_of(following)[:2]
        if not same_minor or exposed(kind, version) != exposed(kind, str(following)):
            chosen.append(Release(kind, version))
    return chosen


def taken(flags: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """Those that the release has; the drafts by the flag of their own that it had before the JSON."""
    kept = {n: v for n, v in flags.items() if not release.kind.unavailable(n, release.version)}
    speculation = flags.get("speculative_config")
    if speculation and "speculative_config" not in kept:
        kept["num_speculative_tokens"] = speculation["num_speculative_tokens"]
    elif "num_speculative_tokens" in flags:  # of a virtual load
        kept["num_speculative_tokens"] = flags["num_speculative_tokens"]
    return kept


def verdict(exhibit: Exhibit, recording: Recording, release: Release) -> Verdict:
    source = OfRelease(translated(recording, release.kind, release.version), release)
    flags = taken(exhibit.flags, release)
    found = diagnose(source, flags, exhibit.slo, assume=exhibit.assume)
    return judged(exhibit, found)


def lines(exhibits: Sequence[Exhibit], chosen: Iterable[Release]) -> Iterator[str]:
    """A line a release as it is done, then the sum."""
    read = [(exhibit, record(exhibit.scrapes)) for exhibit in exhibits]
    right = total = 0
    for release in chosen:
        said = [(exhibit, verdict(exhibit, recording, release)) for exhibit, recording in read]
        wrong = [f"{e.name} ({e.truth}): {v.first}" for e, v in said if not v.right]
        right, total = right + len(said) - len(wrong), total + len(said)
        yield f"{release}: {len(said) - len(wrong)} of {len(said)}" + "".join(f"\n    {w}" for w in wrong)
    yield f"right: {right} of {total}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    parser.add_argument("--every", type=int, default=1, help="keep every n-th scrape (they are 2 s apart)")
    parser.add_argument("--only", default="", help="releases whose name contains this")
    options = parser.parse_args()
    begun = time.monotonic()
    exhibits = list(virtual_loads(options.every))
    if options.recordings.is_dir():
        exhibits = [*recordings(options.recordings, options.every), *exhibits]
    else:
        print(f"{options.recordings} is not there: no recordings of a real server")
    chosen = [
        release for kind in (VLLM, SGLANG) for release in releases(kind) if options.only in str(release)
    ]
    for line in lines(exhibits, chosen):
        print(line, flush=True)
    print(f"{len(chosen)} releases, {len(exhibits)} recordings, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
