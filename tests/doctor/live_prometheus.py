"""Test helper: a real Prometheus on a loopback port, with a recording loaded or a target to scrape."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from doctor.exposition import Recording

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="the prometheus and promtool binaries are not installed"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(directory: Path, targets: Iterable[str] = (), interval: str = "1s") -> Iterator[str]:
    """Run Prometheus over ``directory``; yields its URL. Ends the process on leaving."""
    assert PROMETHEUS is not None
    config = directory / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": interval, "scrape_timeout": interval},
                "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": list(targets)}]}],
            }
        )
    )
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--log.level=error",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _await_ready(f"{url}/-/ready", process, directory / "prometheus.log")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


def load_recording(recording: Recording, directory: Path, labels: dict[str, str]) -> None:
    """Write a recording's samples as OpenMetrics text and make TSDB blocks of it under ``directory``/data."""
    assert PROMTOOL is not None
    lines = []
    for name, columns in sorted(recording.series.items()):
        lines.append(f"# TYPE {name} unknown")
        for series in columns:
            inside = ",".join(f'{k}="{v}"' for k, v in {**series.labels, **labels}.items())
            lines += [
                f"{name}{{{inside}}} {float(value)!r} {int(unix_ms) / 1000:.3f}"
                for unix_ms, value in zip(series.times, series.values, strict=True)
            ]
    text = directory / "recording.om"
    text.write_text("\n".join([*lines, "# EOF", ""]))
    subprocess.run(
        [
            PROMTOOL,
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "--quiet",
            str(text),
            str(directory / "data"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )


def await_first_scrape(url: str, target: str) -> None:
    """Return when ``target`` has been scraped: a new Prometheus takes seconds to look at its targets."""
    for _ in range(300):
        with urllib.request.urlopen(f"{url}/api/v1/query?query=up", timeout=5) as answer:
            results = json.load(answer)["data"]["result"]
        if any(found["metric"]["instance"] == target and found["value"][1] == "1" for found in results):
            return
        time.sleep(0.1)
    raise AssertionError(f"prometheus did not scrape {target}")


def _await_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        if process.poll() is not None:
            raise AssertionError(f"prometheus ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError("prometheus did not become ready")
