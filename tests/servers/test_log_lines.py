"""Logs as people paste them: what runtimes and collectors put around a line changes nothing that is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from servers.errors import SourceError
from servers.server_log import parse_log, read_log

V1 = [
    "INFO 04-29 11:30:00 [api_utils.py:286] non-default args: {'model': 'm', 'max_num_seqs': 64}",
    "INFO 04-29 11:30:01 [core.py:133] Initializing a V1 LLM engine (v0.19.0) with config: model='m'",
    *(
        f"INFO 04-29 11:30:{second} [loggers.py:271] Engine 000: Avg prompt throughput: 777.8 tokens/s, "
        f"Avg generation throughput: 64.0 tokens/s, Running: {running} reqs, Waiting: 8 reqs, "
        "GPU KV cache usage: 0.4%, Prefix cache hit rate: 0.0%"
        for second, running in ((43, 1), (53, 29))
    ),
]
V0 = [
    f"INFO 09-10 06:05:{second} metrics.py:351] Avg prompt throughput: 4.8 tokens/s, "
    "Avg generation throughput: 6.3 tokens/s, Running: 5 reqs, Swapped: 0 reqs, Pending: 2 reqs, "
    "GPU KV cache usage: 40.5%, CPU KV cache usage: 0.0%."
    for second in (33, 43)
]
SGLANG = [
    f"[2025-09-10 06:05:{second} DP0 TP{rank}] Decode batch. #running-req: 40, #token: 1000, "
    f"token usage: 0.76, gen throughput (token/s): 1200.00, #queue-req: {second}"
    for second in (33, 43, 53)
    for rank in (0, 1)
]
LMDEPLOY = [
    f"[2026-09-10 06:05:{second} DP0] Avg thr (in/out): 500.0 / 100.0 tokens/s, "
    "Engine (running/waiting): 6 / 3, KV cache: 40.1%, Prefix cache hit rate: 1.0%"
    for second in (33, 43)
]
FORMATS = {"V1": V1, "V0": V0, "SGLang": SGLANG, "LMDeploy": LMDEPLOY}


def cri(line: str) -> str:
    """Split as the runtime splits long lines."""
    stamp = "2026-04-30T09:00:00.123456789Z stdout"
    return f"{stamp} P {line[:60]}\n{stamp} P {line[60:90]}\n{stamp} F {line[90:]}"


PUT_AROUND: dict[str, Callable[[str], str]] = {
    "compose": lambda line: f"vllm-1  | {line}",
    "compose in colour, with times": lambda line: f"\x1b[36mvllm-1  | \x1b[0m2026-04-30T09:00:00.123Z {line}",
    "colour of the server": lambda line: f"\x1b[1;36m(APIServer pid=1)\x1b[0;0m {line}",
    "escapes lost": lambda line: f"[1;36m(APIServer pid=1)[0;0m {line}",
    "escapes spelt": lambda line: f"^[[36m(EngineCore_DP0 pid=9)^[[0m {line}",
    "kubectl": lambda line: f"[pod/llm-5d/vllm] 2026-04-30T09:00:00.123456789Z {line}",
    "stern": lambda line: f"llm-5d vllm {line}",
    "runtime": cri,
    "journal": lambda line: f"Apr 30 09:00:00 host vllm[4711]: {line}",
    "journal, iso": lambda line: f"2026-04-30T09:00:00+0200 host vllm[4711]: {line}",
    "logger": lambda line: f"2026-04-30 09:00:00,123 - stdout - {line}",
    "bracketed": lambda line: f"[2026-04-30 09:00:00] {line}",
    "json-file": lambda line: json.dumps(
        {"log": line + "\n", "stream": "stdout", "time": "2026-04-30T09:00:00Z"}
    ),
    "collector": lambda line: json.dumps({"@timestamp": 1777539600123, "message": line, "kubernetes": {}}),
    "journal as JSON": lambda line: json.dumps({"__REALTIME_TIMESTAMP": "1777539600123456", "MESSAGE": line}),
    "quoted in an issue": lambda line: f"> {line}",
    "progress before it": lambda line: f"Loading: 100%|###| 4/4\r{line}",
}


@pytest.mark.parametrize("around", PUT_AROUND)
@pytest.mark.parametrize("name", FORMATS)
def test_what_stands_around_a_line_changes_nothing(name: str, around: str) -> None:
    lines = FORMATS[name]
    plain = parse_log("\n".join(lines))
    assert len(plain.scrapes) >= 2
    assert parse_log("\n".join(map(PUT_AROUND[around], lines))) == plain


UNDATED = "Engine 000: Avg prompt throughput: 7.8 tokens/s, Avg generation throughput: 64.0 tokens/s, "
UNDATED += "Running: 1 reqs, Waiting: 8 reqs, GPU KV cache usage: 0.4%, Prefix cache hit rate: 0.0%"


@pytest.mark.parametrize(
    "written",
    [
        json.dumps({"asctime": "2026-04-29 11:30:{}", "levelname": "INFO", "message": UNDATED}),
        json.dumps({"ts": "2026-04-29T11:30:{}Z", "msg": UNDATED}),
        "2026-04-29T11:30:{}.123Z stdout F " + UNDATED,
        "Apr 29 11:30:{} host vllm[4711]: " + UNDATED,
        "vllm-1  | 2026-04-29T11:30:{}.123456789Z " + UNDATED,
    ],
)
def test_a_line_without_a_time_has_the_one_around_it(written: str) -> None:
    (first, _), (second, _) = parse_log("\n".join(written.replace("{}", s) for s in ("43", "53"))).scrapes
    assert second - first == 10_000


def test_lines_of_several_servers_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "compose.log"
    path.write_text("\n".join(f"{name}  | {line}" for line in V1 for name in ("vllm-1", "vllm-2", "proxy-1")))
    with pytest.raises(SourceError, match=r"several servers write in it \(vllm-1, vllm-2, proxy-1\)"):
        read_log(path)
    path.write_text("\n".join([*(f"vllm-1  | {line}" for line in V1), "proxy-1  | GET /v1/models 200"]))
    assert len(read_log(path).scrapes) == 2
