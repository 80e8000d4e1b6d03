"""Servers behind a key, a header or TLS: every command gets in by the same options, and shows no secret."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from doctor.metrics.sources import MetricsUrl
from loadgen.targets.http import Http, NoAnswer
from loadgen.targets.server import free_port
from servers.connection import Connection, Tls
from vtune_cli import app

FAKE = Path(__file__).parents[2] / "fake_server.py"
KEY, TEAM = "k3y-of-this-test", "t3am-of-this-test"
LOAD = ("--concurrency", "2", "--num-requests", "4", "--workload", "random", "--input-len", "8",
        "--output-len", "4", "--warmup", "0")  # fmt: skip
TUNE = ("--slo", "ttft_p95<60s", "--rate", "50", "--workload", "random", "--run-time", "0.5s",
        "--trials", "1", "--pairs", "2", "--prior", "none")  # fmt: skip
RUNS = 4
"""Of a comparison, until one is valid: its loads last 12 ms each, in which a busy machine may hold the client
up for the 2 ms that make a run invalid."""
COMMANDS = {
    "bench run": ("bench", "run", "--url", "{url}", *LOAD, "--out", "out"),
    "bench sweep": ("bench", "sweep", "--url", "{url}", *LOAD, "--over", "concurrency", "--at", "1,2",
                    "--repeats", "1", "--out", "out"),
    "bench compare": ("bench", "compare", "{url}", "{url}/v1", *LOAD[:-2], "--pairs", "1", "--out", "out"),
    "optimize": ("optimize", "--target", "{url}", *TUNE, "--yes", "--out", "out"),
    "doctor": ("doctor", "--metrics", "{url}", "--window", "1s"),
    "doctor export": ("doctor", "export", "alerts", "--metrics", "{url}"),
}  # fmt: skip


@contextlib.contextmanager
def serving(*flags: str, connection: Connection, scheme: str = "http") -> Iterator[str]:
    """The URL of a fake server with these flags, once it lets ``connection`` in."""
    port = free_port()
    command = [sys.executable, "-S", str(FAKE), "m", "--port", str(port), "--time-scale", "0.1", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]})
    try:
        url = f"{scheme}://127.0.0.1:{port}"
        for _ in range(200):
            with contextlib.suppress(NoAnswer):
                assert Http(url, connection).get("/health", 2.0).status == 200
                break
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    connection = Connection(api_key=KEY, headers=(("X-Team", TEAM),))
    with serving("--api-key", KEY, "--need-header", f"X-Team: {TEAM}", connection=connection) as url:
        yield url


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MetricsUrl, "DEFAULT_WINDOW_S", 0.5)
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path / "cache"))
    for name in ("VTUNE_API_KEY", "VTUNE_TOKEN", "VTUNE_HEADERS", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def vtune(name: str, url: str, *more: str, **environment: str) -> Result:
    words = [word.format(url=url) for word in COMMANDS[name]]
    return CliRunner().invoke(app, [*words, *more], env=environment)


def check_that_nothing_tells(place: Path, result: Result, *secrets: str) -> None:
    """Neither what was said nor any file, such as records, reports, logs and the study's database."""
    files = [file for file in place.rglob("*") if file.is_file() and not file.name.startswith("secret-")]
    for secret in secrets:
        assert secret not in result.output + result.stderr
        assert [file for file in files if secret.encode() in file.read_bytes()] == []


@pytest.mark.parametrize("way", ["option", "environment", "file"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_gets_in(guarded: str, place: Path, name: str, way: str) -> None:
    (place / "secret-key").write_text(f"{KEY}\n")
    header = ("--header", f"x-team: {TEAM}")
    match way:
        case "option":
            result = vtune(name, guarded, "--api-key", KEY, *header)
        case "file":
            result = vtune(name, guarded, "--api-key-file", "secret-key", *header)
        case _:
            result = vtune(name, guarded, VTUNE_API_KEY=KEY, VTUNE_HEADERS=f"X-Team: {TEAM}")
    assert result.exit_code in (0, 3), result.stderr + repr(result.exception)  # 3: a busy machine's client
    assert "HTTP 401" not in result.output + result.stderr
    check_that_nothing_tells(place, result, KEY, TEAM)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_server_that_asks_for_a_key_is_one_clear_message(guarded: str, place: Path, name: str) -> None:
    refused = {"without": vtune(name, guarded), "wrong": vtune(name, guarded, VTUNE_API_KEY="wr0ng-key")}
    for why, result in refused.items():
        assert result.exit_code == 2
        assert "HTTP 401" in result.stderr
        asks = "wants to know who asks" if why == "without" else "refuses who asks"
        assert (
            f"it {asks}; give its key with --api-key-file FILE, --api-key or VTUNE_API_KEY" in result.stderr
        )
        check_that_nothing_tells(place, result, "wr0ng-key")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed, for 127.0.0.1, with its key in it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(file)]
    command = ["openssl", "req", "-x509", *made, "-out", f"{file}.cert", *subject]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    file.write_text(file.read_text() + Path(f"{file}.cert").read_text())
    return file


@pytest.mark.parametrize("name", ["bench run", "optimize", "doctor"])
def test_tls_with_a_ca_of_ones_own(certificate: Path, name: str) -> None:
    connection = Connection(tls=Tls(verify=False))
    with serving("--tls-cert", str(certificate), connection=connection, scheme="https") as url:
        refused = vtune(name, url)
        assert refused.exit_code == 2
        assert "--ca-file" in refused.stderr
        result = vtune(name, url, "--ca-file", str(certificate))
        assert result.exit_code in (0, 3), result.stderr


VLLM = f"""#!{sys.executable} -S
import os, sys
if sys.argv[1:] == ["--version"]:
    print("0.32.0+cpu")
elif "--help=all" in sys.argv:
    print("options:\\n  --max-num-seqs N\\n  --max-num-batched-tokens N\\n  --gpu-memory-utilization N")
else:
    with open("started", "a") as file:
        print(*sys.argv, "VLLM_API_KEY" in os.environ, file=file)
    at = sys.argv.index("--host")
    words = sys.argv[2:at] + sys.argv[at + 2:]
    os.execv(sys.executable, [sys.executable, "-S", {str(FAKE)!r}, *words, "--time-scale", "0.1"])
"""


def test_a_study_of_a_server_that_is_started_with_a_key(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = place / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(VLLM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    words = ("optimize", "--target", "vllm", "--study", "s", *TUNE)
    result = CliRunner().invoke(app, [*words, "--flags", f"vllm serve M --max-num-seqs 8 --api-key {KEY}"])
    assert result.exit_code == 0, result.stderr
    starts = (place / "started").read_text().splitlines()
    assert len(starts) >= 2
    assert all(start.endswith(" True") and KEY not in start for start in starts), "by its environment"
    check_that_nothing_tells(place, result, KEY)
    again = ("optimize", "--study", "s", "--trials", "2")
    refused = CliRunner().invoke(app, again)
    assert refused.exit_code == 2
    assert (
        "begun with a key or another login, which no study keeps. Give it again: --api-key-file"
        in refused.stderr
    )
    (place / "secret-key").write_text(KEY)
    result = CliRunner().invoke(app, [*again, "--api-key-file", "secret-key"])
    assert result.exit_code == 0, result.stderr
    assert len((place / "started").read_text().splitlines()) > len(starts)
    check_that_nothing_tells(place, result, KEY)


def test_workers_get_the_key_by_their_environment(place: Path) -> None:
    command = f"{sys.executable} -S {FAKE} m {{flags}}"
    words = ("optimize", "--target", command, "--flags", f"--max-num-seqs 8 --api-key {KEY}", *TUNE)
    result = CliRunner().invoke(
        app, [*words, "--workers", "2", "--header", f"X-Team: {TEAM}", "--out", "out"]
    )
    assert result.exit_code == 0, result.stderr
    check_that_nothing_tells(place, result, KEY, TEAM)


def test_a_target_that_holds_a_key_is_not_stored(place: Path) -> None:
    result = CliRunner().invoke(app, ["optimize", "--target", f"my-server --api-key {KEY} {{flags}}"])
    assert result.exit_code == 2
    assert (
        "a study stores its target, and no key. Give the server's key as --api-key in --flags"
        in result.stderr
    )
    check_that_nothing_tells(place, result, KEY)


@pytest.mark.parametrize("command", ["bench compare", "doctor verify"])
def test_servers_of_a_comparison_are_started_with_their_key(place: Path, command: str) -> None:
    server = f"{sys.executable} -S {FAKE} m --time-scale 0.1 --api-key {KEY}"
    load = (*LOAD[:-2], "--pairs", "2", "--out", "out", "--format", "json")
    if command == "bench compare":
        words = [server, f"{server} --max-num-seqs 2"]
    else:
        words = ["seq-cap", "--cure", "--max-num-seqs 16", "--target", f"{server} {{flags}}"]
    for _ in range(RUNS):
        result = CliRunner().invoke(app, [*command.split(), *words, *load])
        assert result.exit_code in (0, 1, 3), result.stderr  # 1: so few requests may refute a cure by chance
        if json.loads(result.stdout)["verdict"] != "invalid":
            break
    assert json.loads(result.stdout)["verdict"] != "invalid", result.stderr
    assert "--api-key ***" in result.stdout
    check_that_nothing_tells(place, result, KEY)
