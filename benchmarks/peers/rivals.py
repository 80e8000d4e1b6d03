"""Our load generator beside others, against one mock server that writes its own clock into every token.

    python -m benchmarks.peers.rivals [--tools vtune,vllm,guidellm,aiperf] \
        [--parts cpu,stamps,rate,arrivals,stall]

Each tool runs from an environment of its own: ``--vllm``, ``--guidellm`` and ``--aiperf`` name the folders;
what is missing is left out. ``--tokenizer`` is a folder that the others need to make prompts of a length.
Lateness and arrivals are judged by when requests reached the server, so that nobody is taken at its word.

cpu       CPU time of the whole command for another chunk: a long run less a short one; we parse and report
          after the load, so that what ours spends while it runs stands beside it
stamps    |a tool's time of a token - the server's|, 100 streams x 50 tokens/s
rate      the highest rate of one process at which 99 % of requests come within 2 ms of their time
arrivals  the gaps that were asked for, and those that came
stall     the server is silent for 2 s at 50 requests/s: the P99 TTFT that is reported
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.loadgen.mock_llm import Mock, mock
from benchmarks.peers.rival_tools import TOOLS, Load, Tool

ROOT = Path(__file__).parents[2]
PARTS = ("cpu", "stamps", "rate", "arrivals", "stall")
STREAMS, TOKEN_RATE = 100, 50
RATES = (250, 500, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 8000)


@dataclass(frozen=True)
class Ran:
    """One run of a tool."""

    cpu: float
    """Seconds, with every process it started."""
    arrivals: np.ndarray
    """Seconds, as the server saw the requests."""
    folder: Path
    output: str


def run(tool: Tool, server: Mock, load: Load, *, stamps: bool = False, seconds: float = 120.0) -> Ran:
    """Run ``tool`` to its end. Raises ToolFailed. ``stamps``: so that it tells its time of each token."""
    folder = Path(tempfile.mkdtemp(prefix=f"rivals-{tool.name}-"))
    server.reset()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            (tool.stamps_command if stamps else tool.command)(server.url, load, folder),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT) if stamps else "", **tool.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")  # bytes, for all that the call says text
        raise ToolFailed(f"{tool.name} had not ended after {seconds:.0f} s: {printed}") from None
    if done.returncode not in tool.fine:
        raise ToolFailed(f"{tool.name} ended with {done.returncode}:\n{done.stdout[-1500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    arrivals = np.array(server.arrivals()[-load.requests :], dtype=float) / 1e9
    if len(arrivals) < load.requests:
        raise ToolFailed(
            f"{tool.name} sent {len(arrivals)} of {load.requests} requests:\n{done.stdout[-1500:]}"
        )
    return Ran(cpu, arrivals, folder, done.stdout)


class ToolFailed(RuntimeError):
    """A tool did not do what it was asked to; the message has the end of its output."""


def streams(seconds: float) -> Load:
    return Load(requests=STREAMS, tokens=round(TOKEN_RATE * seconds), concurrency=STREAMS)


def cpu_a_chunk(tool: Tool, server: Mock, seconds: float) -> str:
    """The difference of two lengths, so that starting up is not counted."""
    short, long = streams(1), streams(1 + seconds)
    ran = run(tool, server, long)
    spent = ran.cpu - run(tool, server, short).cpu
    text = f"{1e6 * spent / (long.tokens - short.tokens) / STREAMS:.1f} µs"
    loop = tool.loop_cpu(ran.folder)
    return (
        text if loop is None else f"{text}, while the load runs {1e6 * loop / long.tokens / STREAMS:.1f} µs"
    )


def stamp_errors(tool: Tool, server: Mock, seconds: float) -> str:
    found = np.abs(np.array(tool.stamp_errors(run(tool, server, streams(seconds), stamps=True).folder))) * 1e3
    p50, p99 = np.quantile(found, (0.5, 0.99))
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms ({len(found)} {tool.stamps})"


def lateness(arrivals: np.ndarray, rate: float) -> float:
    """P99 of how late requests came against an even spacing, the earliest taken for punctual. Seconds."""
    late = np.sort(arrivals) - np.arange(len(arrivals)) / rate
    return float(np.quantile(late - late.min(), 0.99))


def highest_rate(tool: Tool, server: Mock, seconds: float) -> str:
    highest, first_missed = 0, ""
    for rate in RATES:
        load = Load(requests=round(rate * seconds), tokens=2, rate=rate, arrival="constant")
        late = lateness(run(tool, server, load).arrivals, rate)
        if late > 0.002:  # once more: the machine may have been busy
            late = min(late, lateness(run(tool, server, load).arrivals, rate))
        if late > 0.002:
            first_missed = f" ({rate} req/s: {1e3 * late:.1f} ms late)"
            break
        highest = rate
    return f"{highest} req/s{first_missed}"


def arrivals(tool: Tool, server: Mock, seconds: float) -> Iterator[tuple[str, str]]:
    """What came, of each process that the tool has."""
    for kind, burstiness in (("constant", 1.0), ("poisson", 1.0), ("gamma", 0.25)):
        if kind not in tool.arrivals:
            yield kind, "has none"
            continue
        rate = 200
        load = Load(round(rate * seconds), 2, rate=rate, arrival=kind, burstiness=burstiness)
        yield kind, judged(run(tool, server, load).arrivals, kind, rate, burstiness)


def judged(times: np.ndarray, kind: str, rate: float, burstiness: float) -> str:
    """The rows of arrival correctness, with a live server's jitter allowed for."""
    times = np.sort(times)
    gaps = np.diff(times)
    cv = float(gaps.std() / gaps.mean())
    offered = len(gaps) / (times[-1] - times[0])
    said = f"{offered:.1f} req/s, CV {cv:.3f}"
    right = abs(offered / rate - 1) < 0.1
    if kind == "constant":
        return f"{said}: {_mark(right and cv < 0.2)}"
    if kind == "gamma":
        return f"{said} (for {burstiness**-0.5:g}): {_mark(right and abs(cv * burstiness**0.5 - 1) < 0.1)}"
    p = float(stats.kstest(gaps, "expon", args=(0, gaps.mean())).pvalue)
    lag = float(np.corrcoef(gaps[:-1], gaps[1:])[0, 1])
    counts = np.histogram(times, np.arange(times[0], times[-1], (times[-1] - times[0]) / 200))[0]
    dispersion = float(counts.var(ddof=1) / counts.mean())
    fine = right and p > 0.01 and abs(lag) < 0.08 and 0.7 < dispersion < 1.3
    return f"{said}, KS p {p:.2f}, lag-1 {lag:+.2f}, dispersion {dispersion:.2f}: {_mark(fine)}"


def _mark(fine: bool) -> str:
    return "right" if fine else "WRONG"


def stalled(tool: Tool, seconds: float) -> str:
    """P99 TTFT that the tool reports, and what a request at its time would have seen."""
    rate = 50
    with mock("--stall-after", "120", "--stall-s", "2") as server:
        load = Load(round(rate * seconds), 2, rate=rate, arrival="constant")
        ran = run(tool, server, load)
    return f"{tool.p99_ttft(ran.folder):.2f} s"


def rows(tool: Tool, parts: Sequence[str], seconds: float) -> Iterator[tuple[str, str]]:
    with mock("--gap-ms", str(1000 / TOKEN_RATE)) as server:
        if "cpu" in parts:
            yield "CPU a chunk, 5,000 chunks/s", cpu_a_chunk(tool, server, seconds)
        if "stamps" in parts:
            yield "timestamp error, 100 x 50/s", stamp_errors(tool, server, seconds)
    with mock() as server:
        if "rate" in parts:
            yield "highest rate, <= 2 ms late at p99", highest_rate(tool, server, min(seconds, 3))
        if "arrivals" in parts:
            for kind, text in arrivals(tool, server, seconds):
                yield f"{kind} arrivals", text
    if "stall" in parts:
        yield "P99 TTFT, silent for 2 s", stalled(tool, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a run (default 8)")
    parser.add_argument("--tokenizer", type=Path, default=Path(), help="folder of a Hugging Face tokenizer")
    for name in TOOLS:
        if name != "vtune":
            parser.add_argument(f"--{name}", type=Path, metavar="VENV", help="its environment")
    options = parser.parse_args()
    parts = re.split(r",\s*", options.parts)
    for name in re.split(r",\s*", options.tools):
        venv = Path(sys.prefix) if name == "vtune" else getattr(options, name)
        if venv is None:
            print(f"{name:<9} left out: give --{name} VENV")
            continue
        try:
            for label, text in rows(TOOLS[name](venv, options.tokenizer), parts, options.seconds):
                print(f"{name:<9} {label:<36} {text}", flush=True)
        except ToolFailed as failure:
            print(f"{name:<9} FAILED: {failure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
