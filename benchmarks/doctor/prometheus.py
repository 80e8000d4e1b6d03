"""A real Prometheus on a loopback port, with recordings loaded or targets to scrape."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from servers.metrics.exposition import Recording

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
_PATIENCE_SECONDS = 120.0
"""Of a machine that is busy with other things."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(
    directory: Path, targets: Iterable[str] = (), interval: str = "1s", web: Path | None = None
) -> Iterator[str]:
    """Run Prometheus over ``directory``; yields its URL. Ends the process on leaving.

    ``web`` is a web configuration (TLS, basic authentication); the URL is then not asked whether it is ready.
    """
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
        *([f"--web.config.file={web}"] if web else []),
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _await_ready(url, web is not None, process, directory / "prometheus.log")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=_PATIENCE_SECONDS)


def load_recording(recording: Recording, directory: Path, labels: Mapping[str, str]) -> None:
    """Make TSDB blocks of a recording under ``directory``/data; ``labels`` are laid over its own."""
    load_recordings([(recording, labels)], directory)


def load_recordings(recordings: Iterable[tuple[Recording, Mapping[str, str]]], directory: Path) -> None:
    """Write the samples as OpenMetrics text, a name's series together, and make blocks of it."""
    assert PROMTOOL is not None
    lines: dict[str, list[str]] = {}
    for recording, labels in recordings:
        for name, columns in recording.series.items():
            own = lines.setdefault(name, [f"# TYPE {name} unknown"])
            for series in columns:
                inside = ",".join(f'{k}="{v}"' for k, v in {**series.labels, **labels}.items())
                own += [
                    f"{name}{{{inside}}} {float(value)!r} {int(unix_ms) / 1000:.3f}"
                    for unix_ms, value in zip(series.times, series.values, strict=True)
                ]
    text = directory / "recording.om"
    text.write_text("\n".join(["\n".join(own) for _, own in sorted(lines.items())] + ["# EOF", ""]))
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
        timeout=300,
    )


def await_first_scrape(url: str, target: str) -> None:
    """Return when ``target`` has been scraped: a new Prometheus takes seconds to look at its targets."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/api/v1/query?query=up", timeout=_PATIENCE_SECONDS) as answer:
            results = json.load(answer)["data"]["result"]
        if any(found["metric"]["instance"] == target and found["value"][1] == "1" for found in results):
            return
        time.sleep(0.1)
    raise AssertionError(f"prometheus did not scrape {target}")


def _await_ready(url: str, guarded: bool, process: subprocess.Popen[bytes], log: Path) -> None:
    """``guarded``: it wants TLS or a password, so that it takes connections must do."""
    port = int(url.rsplit(":", 1)[1])
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"prometheus ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            if guarded:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                return
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError("prometheus did not become ready")
