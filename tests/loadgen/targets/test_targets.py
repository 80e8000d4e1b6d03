"""Starting servers with flags: what comes up is usable, what does not says why, and nothing stays."""

from __future__ import annotations

import http.server
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.workload import Schedule, preset
from loadgen.target import AtOnce, RunFailed, StartFailed
from loadgen.targets import server as server_module
from loadgen.targets.endpoint import EndpointTarget
from loadgen.targets.server import ServerTarget, free_port
from loadgen.wire.probe import UrlError
from servers.failures import classify
from servers.flags.words import FlagError
from servers.kinds import VLLM

FAKE = Path(__file__).parents[2] / "fake_server.py"


def fake(tmp_path: Path, *extra: str, **options: Any) -> ServerTarget:
    command = shlex.join([sys.executable, "-S", str(FAKE), "m", *extra])
    return ServerTarget(f"{command} {{flags}}", name="fake", log_dir=tmp_path, **options)


def schedule(requests: int = 12) -> Schedule:
    workload = preset("random", max_model_len=512, vocab_size=1000)
    return workload.schedule(seed=1, arrival=ClosedLoop(4), num_requests=requests)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_server_is_started_measured_and_ended(tmp_path: Path) -> None:
    target = fake(tmp_path)
    with target.open({"max_num_seqs": 3, "max_model_len": 512}) as server:
        assert (server.model, server.max_model_len) == ("m", 512)
        assert server.start_seconds > 0
        assert "vllm:num_requests_running" in server.scrape()
        assert "'max_num_seqs': 3" in server.log_tail()
        records = server.run(schedule())
        assert server.log_path == tmp_path / "fake-001.log"
    assert len(records.requests) == 12
    assert all(record.ok for record in records.requests)
    assert (
        'vllm:request_success_total{engine="0",model_name="m",finished_reason="length"} '
        in (records.scrapes[-1][1])
    )
    stamps = [stamp for stamp, _ in records.scrapes]
    assert len(stamps) >= 2
    assert stamps == sorted(stamps)
    assert server.scrape() == ""
    with target.open({}) as server:
        assert server.log_path == tmp_path / "fake-002.log"


@pytest.mark.parametrize("flags", [{}, {"scheduling_policy": "fcfs"}, {"scheduling_policy": "priority"}])
def test_priorities_are_sent_to_a_server_that_schedules_by_them(tmp_path: Path, flags: Any) -> None:
    """Any other refuses them."""
    ranked = preset("mixed", max_model_len=2048, vocab_size=1000, scale=0.02)
    load = ranked.schedule(seed=1, arrival=ClosedLoop(4), num_requests=12)
    assert any(request.priority == 1 for request in load.requests)
    with fake(tmp_path, "--time-scale", "0.1").open(flags) as server:
        records = server.run(load)
        assert ("priority 1\n" in server.log_tail(1000)) == (flags == {"scheduling_policy": "priority"})
    assert all(record.ok for record in records.requests)
    assert records.schedule_sha256 == load.sha256


@pytest.mark.parametrize(
    ("extra", "reason", "says"),
    [
        (["--fault", "exit:7"], "exited", "status 7; its last line: the fake server was told to exit"),
        (["--fault", "oom"], "out_of_memory", "CUDA out of memory"),
        (["--fault", "oom-above:100"], "out_of_memory", "CUDA out of memory"),
        (["--max-num-batched-tokens", "90000"], "kv_cache_too_small", "No available memory"),
        (["--bogus"], "bad_flag", "unrecognized arguments: --bogus"),
        (["--fault", "hang-start"], "timeout", "not healthy after 0.5 s"),
        (["--fault", "health-then-hang"], "hangs", "no answer in 0.5 s"),
        (["--fault", "error-500"], "unhealthy", "HTTP 500"),
        (["--fault", "die-mid-run:1"], "out_of_memory", "CUDA out of memory"),
        (["--fault", "killed-mid-run:1"], "killed", "SIGKILL"),
    ],
)
def test_a_start_that_fails_says_why(tmp_path: Path, extra: list[str], reason: str, says: str) -> None:
    start_timeout = 0.5 if reason == "timeout" else 240.0
    probe_timeout = 0.5 if reason == "hangs" else 240.0
    target = fake(tmp_path, *extra, probe_timeout=probe_timeout, start_timeout=start_timeout)
    with pytest.raises(StartFailed, match=says) as caught, target.open({}):
        pass
    assert caught.value.reason == reason
    assert not caught.value.environmental
    assert caught.value.log_path == tmp_path / "fake-001.log"
    assert caught.value.log_tail in (tmp_path / "fake-001.log").read_text()


def test_one_that_says_it_is_ill_is_quoted(tmp_path: Path) -> None:
    """A busy machine may need more than a second until it says anything."""
    for seconds in (1.0, 10.0, 100.0):
        target = fake(tmp_path, "--fault", "unhealthy", start_timeout=seconds)
        with pytest.raises(StartFailed) as caught, target.open({}):
            pass
        if "503" in caught.value.detail:
            break
    assert caught.value.reason == "timeout"
    assert caught.value.detail.startswith(f"not healthy after {seconds:g} s: ")
    assert caught.value.detail.endswith("HTTP 503")


def test_what_is_not_the_configs_fault_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(StartFailed, match="there is no program 'nosuch'") as caught,
        ServerTarget("nosuch").open({}),
    ):
        pass
    assert caught.value.environmental
    (tmp_path / "file").touch()
    with pytest.raises(StartFailed, match="File exists") as caught, fake(tmp_path / "file").open({}):
        pass
    assert caught.value.environmental
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(server_module, "free_port", lambda: taken.getsockname()[1])
        with pytest.raises(StartFailed, match="in use") as caught, fake(tmp_path).open({}):
            pass
    assert (caught.value.reason, caught.value.environmental) == ("port_taken", True)


def test_a_port_that_is_taken_meanwhile_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(server_module, "free_port", lambda: next(ports))
        with fake(tmp_path).open({}) as server:
            assert server.log_path == tmp_path / "fake-002.log"


def test_somebody_elses_answer_on_our_port_is_not_our_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake(tmp_path).open({}) as other:
        monkeypatch.setattr(server_module, "free_port", lambda: int(other.url.rpartition(":")[2]))
        with pytest.raises(StartFailed) as caught, fake(tmp_path).open({}):
            pass
    assert caught.value.reason == "port_taken"
    assert "another server answers on port" in caught.value.detail


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("die-mid-run:8", "out_of_memory"), ("killed-mid-run:8", "killed"), ("ill-mid-run:8", "unhealthy")],
)
def test_a_server_that_dies_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    if reason == "unhealthy":  # it does not end, however long one waits for that
        monkeypatch.setattr("loadgen.targets.endpoint._EXIT_SECONDS", 0.1)
    with pytest.raises(RunFailed) as caught, fake(tmp_path, "--fault", fault).open({}) as server:
        server.run(schedule(100))
    assert caught.value.reason == reason
    records = caught.value.records
    assert records is not None
    assert sum(record.ok for record in records.requests) in range(1, 8)
    assert any(not record.ok for record in records.requests)


def test_a_server_that_errs_is_not_dead(tmp_path: Path) -> None:
    with fake(tmp_path, "--fault", "error-in-stream", "--fault", "no-metrics").open({}) as server:
        records = server.run(schedule())
    assert {record.failure for record in records.requests} == {"error in the stream"}
    assert records.scrapes == ()


def test_a_load_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()

    def progress(report: Any) -> None:
        if report.finished >= 1:
            stop.set()

    with fake(tmp_path, "--time-scale", "5").open({}) as server:
        records = server.run(schedule(2000), progress=progress, stop=stop)
    assert records.partial
    assert 0 < sum(record.ok for record in records.requests) < 2000


def test_a_second_interrupt_waits_for_no_grace(tmp_path: Path) -> None:
    """This server would not end for ten minutes."""
    stubborn = fake(tmp_path, "--fault", "ignore-term", grace=600.0)
    with pytest.raises(AtOnce), stubborn.open({}):
        raise AtOnce


def test_an_endpoint_is_measured_and_not_restarted(tmp_path: Path) -> None:
    with fake(tmp_path).open({}) as server:
        target = EndpointTarget(server.url + "/v1", flags={"max_num_seqs": 8})
        assert not target.restartable
        with target.open({"max_num_seqs": 8}) as endpoint:
            assert (endpoint.model, endpoint.start_seconds, endpoint.log_tail()) == ("m", 0.0, "")
            assert len(endpoint.run(schedule()).scrapes) >= 2
        with pytest.raises(StartFailed, match="cannot be given other flags \\(max_num_seqs\\)"):
            target.open({"max_num_seqs": 4}).__enter__()
        assert target.launch_command({}) == "--max-num-seqs 8"
    with pytest.raises(StartFailed, match="refused") as caught:
        target.open({}).__enter__()
    assert (caught.value.reason, caught.value.environmental) == ("unreachable", True)
    with pytest.raises(UrlError, match="no server URL"):
        EndpointTarget("ftp://x")


class _Garbage(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.wfile.write(b"\x00\xff not HTTP at all\r\n\r\n")

    def log_message(self, *_: object) -> None:
        return


def test_an_endpoint_that_does_not_speak_http() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Garbage) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        with pytest.raises(StartFailed) as caught:
            EndpointTarget(f"http://127.0.0.1:{httpd.server_port}").open({}).__enter__()
        httpd.shutdown()
        thread.join()
    assert caught.value.reason == "unreachable"


@pytest.mark.parametrize(
    ("template", "command"),
    [
        ("my-server", "my-server --max-num-seqs 4 --port 8000"),
        ("my-server {flags} --port={port} --end", "my-server --max-num-seqs 4 --port=8000 --end"),
        ("my-server --port 80 {flags}", "my-server --max-num-seqs 4 --port 8000"),
        (
            "docker run -p {port}:8000 image --model M {flags} --port 8000",
            "docker run -p 8000:8000 image --model M --max-num-seqs 4 --port 8000",
        ),
        ("my-server --port=80", "my-server --max-num-seqs 4 --port 8000"),
        ("A=1 B='x y' run me -p {port}", "A=1 B='x y' run me -p 8000 --max-num-seqs 4"),
        ("serve '{\"port\": 1}' {flags}", "serve '{\"port\": 1}' --max-num-seqs 4 --port 8000"),
    ],
)
def test_templates(template: str, command: str) -> None:
    assert ServerTarget(template).launch_command({"max_num_seqs": 4}) == command


def test_known_servers() -> None:
    assert ServerTarget.bundled().launch_command({"seed": 1}) == "vtune serve bundled --seed 1 --port 8000"
    vllm = ServerTarget.of(VLLM, "org/model")
    assert vllm.launch_command({}) == "vllm serve org/model --port 8000"
    assert vllm.exclusive
    assert ServerTarget("python -m vllm.entrypoints.openai.api_server --model M {flags}").exclusive
    assert not ServerTarget.of(VLLM, "M", exclusive=False).exclusive
    assert not ServerTarget.bundled().exclusive
    with pytest.raises(FlagError, match="names no program"):
        ServerTarget("A=1")


def test_no_shell_is_involved(tmp_path: Path) -> None:
    marker = tmp_path / "made"
    target = fake(tmp_path, f"--fault=$(touch {marker})", f"--fault=`touch {marker}`")
    with target.open({}) as server:
        assert "$(touch" in server.log_tail()
    assert not marker.exists()


def test_the_detail_is_the_line_that_explains() -> None:
    log = """
        pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig
          Value error, max_num_batched_tokens (4) must be greater than or equal to max_num_seqs (8).
            For further information visit https://errors.pydantic.dev/2.12/v/value_error
    """
    failure = classify(log, 1)
    assert failure.reason == "bad_flag"
    assert failure.detail.startswith("Value error, max_num_batched_tokens (4) must be")


def test_pydantics_headline_is_shown_with_what_it_is_about() -> None:
    log = """
        pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig
        gpu_memory_utilization
          Input should be less than or equal to 1 [type=less_than_equal, input_value=1.7, input_type=float]
            For further information visit https://errors.pydantic.dev/2.14/v/less_than_equal
    """
    failure = classify(log, 1)
    assert failure.reason == "bad_flag"
    assert "CacheConfig gpu_memory_utilization Input should be less than or equal to 1" in failure.detail


def test_an_unknown_end_is_told_by_its_last_error_not_by_what_follows() -> None:
    log = """
        ValueError: invalid literal for int() with base 10: ''
        RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
          warnings.warn('resource_tracker: There appear to be %d '
    """
    detail = classify(log, 1).detail
    assert detail.startswith("the server exited with status 1; its last error: ValueError: invalid literal")


@pytest.mark.parametrize(
    ("log", "status", "reason"),
    [
        ("", 1, "exited"),
        ("", 128 + 11, "killed"),
        ("cannot start x: Permission denied", 127, "not_found"),
        ("sh: 1: y: not found", 127, "exited"),
        (
            "python: Error while finding module specification for 'sglang.launch_server' "
            "(ModuleNotFoundError: No module named 'sglang')",
            1,
            "not_found",
        ),
        ("RuntimeError: CUDA out of memory\nINFO shutting down\n", 1, "out_of_memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", 1, "out_of_memory"),
        (
            "ValueError: Free memory on device (1/80 GiB) is less than desired GPU memory utilization",
            1,
            "out_of_memory",
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (8192), 1.0 GiB KV "
            "cache is needed, which is larger than the available KV cache memory (0.5 GiB)",
            1,
            "kv_cache_too_small",
        ),
        (
            "ERROR: [Errno 98] error while attempting to bind: address already in use",
            1,
            "port_taken",
        ),
        ("OSError: [Errno 28] No space left on device", 1, "disk_full"),
        ("vllm: error: argument --max-num-seqs: invalid int value: 'x'", 2, "bad_flag"),
        ("error: --max-num-batched-tokens 4: must be at least 8. Fix: raise it to 8.", 2, "bad_flag"),
        ("╭─ Error ──╮\n│ No such option: --bogus  │\n╰──────────╯", 2, "bad_flag"),
        (
            "error: --gpu-memory-utilization 0.3: one request of max_model_len (8192) needs 513 KV blocks, "
            "but there are 0. Fix: 296 MiB are missing: raise --gpu-memory-utilization",
            2,
            "kv_cache_too_small",
        ),
        ("error: model '/x': no such file or directory, and not a hub id", 2, "model_not_found"),
        ("OSError: x is not a local folder and is not a valid model identifier", 1, "model_not_found"),
        # The rest is what vLLM 0.32 on a CPU really said.
        (
            "RuntimeError: Worker failed with error 'Available memory on node 0 (21.08/23.54 GiB) on kv "
            "cache allocation is less than requested memory for kv (300.0 GiB). Decrease "
            "--kv-cache-memory-bytes, "
            "VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes.', please check the stack "
            "trace above for the root cause\nRuntimeError: Engine core initialization failed. See root cause "
            "above. Failed core proc(s): {}\n  warnings.warn('resource_tracker: There appear to be %d '",
            1,
            "out_of_memory",
        ),
        (
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/no/such/model'. Use `repo_type` argument if needed.",
            1,
            "model_not_found",
        ),
        (
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot "
            "folder for the specified revision on the local disk and outgoing traffic has been disabled.",
            1,
            "model_not_found",
        ),
        (
            "WARNING 11-29 [system_utils.py:255] This can cause fd limit errors like `OSError: [Errno 24] "
            "Too many open files`\nWARNING [core_client.py:817] [shutdown] MPClient: engine core exited "
            "unexpectedly; starting cleanup\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore "
            "encountered an issue. See stack trace (above) for the root cause.\nINFO: Shutting down",
            0,
            "killed",
        ),
        ("ValueError: No common block size for 24 (CPU_ATTN: [MultipleOf(32)]).", 1, "bad_flag"),
        ("vllm: error: unrecognized arguments: --bogus-flag 1", 2, "bad_flag"),
    ],
)
def test_causes_are_read_from_logs(log: str, status: int, reason: str) -> None:
    assert classify(log, status).reason == reason
