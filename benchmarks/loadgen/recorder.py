"""What the recording proxy adds to the first token and to each further one.

    python -m benchmarks.loadgen.recorder [--streams 20] [--seconds 4] [--rounds 5]

A mock server writes its own ``monotonic_ns`` into every token. The same load goes to it directly and through
``vtune bench record``, in turn; what a token takes from the server's clock to the client's stamp is compared.
Each is the median of the rounds.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.loadgen.mock_llm import mock
from benchmarks.peers.rival_tools import Streams, stamped

GAP_MS = 20


@contextmanager
def recorded(url: str) -> Iterator[str]:
    """The URL of a recorder in front of ``url``."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(sys.executable).with_name("vtune")), "bench", "record", "--url", url]
        process = subprocess.Popen(
            [*words, "--port", "0", "--out", str(Path(folder) / "trace.jsonl")],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.search(r"recording: (http://\S+)", line)
            if found is None:
                raise SystemExit(f"the recorder did not start: {line}{process.stderr.read()}")
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
            process.stderr.close()


def delays_ms(url: str, load: Streams) -> tuple[np.ndarray, np.ndarray]:
    """Of first tokens: from the request's time to the stamp, less the server's gap; of further ones: from
    the server's clock to the stamp."""
    tokens = stamped(url, load)
    first = [1e3 * (stream[0].at - stream[0].intended) - GAP_MS for stream in tokens]
    further = [1e3 * (token.at - token.written) for stream in tokens for token in stream[1:]]
    return np.array(first), np.array(further)


def measure(direct: str, through: str, load: Streams, rounds: int) -> np.ndarray:
    """(round, way, first or further, p50 or p99), ms."""
    figures = []
    for number in range(rounds):
        ways = (direct, through) if number % 2 == 0 else (through, direct)
        found = {way: [np.quantile(delays, (0.5, 0.99)) for delays in delays_ms(way, load)] for way in ways}
        figures.append([found[direct], found[through]])
    return np.array(figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=20, help="at once (default 20)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each load (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="direct and through it, in turn (default 5)")
    options = parser.parse_args()
    load = Streams(options.streams, round(1000 * options.seconds / GAP_MS), 5_000_000)
    with mock("--gap-ms", str(GAP_MS)) as server, recorded(server.url) as through:
        middle = np.median(measure(server.url, through, load, options.rounds), axis=0)
    print(
        f"{options.streams} streams of {1000 / GAP_MS:.0f} tokens/s; ms, medians of {options.rounds} rounds"
    )
    print(f"{'':<16}{'direct p50':>12}{'p99':>8}{'recorded p50':>14}{'p99':>8}{'added p50':>12}{'p99':>8}")
    for name, direct, proxied in zip(("first token", "further tokens"), middle[0], middle[1], strict=True):
        added = proxied - direct
        print(
            f"{name:<16}{direct[0]:>12.2f}{direct[1]:>8.2f}{proxied[0]:>14.2f}{proxied[1]:>8.2f}"
            f"{added[0]:>12.2f}{added[1]:>8.2f}"
        )


if __name__ == "__main__":
    main()
