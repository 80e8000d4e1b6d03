"""What `vtune --help` costs beyond an empty interpreter, and how soon `vtune serve` is ready.

    python -m benchmarks.engine.startup [--runs 5]

Bars: help within 0.3 s of the empty interpreter; the bundled model (already in the cache) served within 5 s.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from engine.models.bundled import fetch_bundled
from loadgen.targets.server import ServerTarget

VTUNE = Path(sys.executable).with_name("vtune")


def best(command: list[str], runs: int) -> float:
    """Shortest wall time of a command, seconds."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return min(times)


def ready() -> float:
    """Seconds from the launch of the bundled server to the answer of its first request."""
    with ServerTarget.bundled().open({}) as server:
        return server.start_seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="the best of so many (default 5)")
    runs = parser.parse_args().runs
    fetch_bundled()
    empty = best([sys.executable, "-c", "pass"], runs)
    shown = best([str(VTUNE), "--help"], runs)
    print(f"empty interpreter {empty:.3f} s, vtune --help {shown:.3f} s: {shown - empty:.3f} s more")
    print(f"vtune serve: first answer after {min(ready() for _ in range(runs)):.2f} s")


if __name__ == "__main__":
    main()
