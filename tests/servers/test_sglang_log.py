"""SGLang's log, alone or beside its metrics: lines of several versions, and what they let the doctor see."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.log_source import LogSource
from doctor.metrics.sources import Scrapes
from servers.errors import SourceError
from servers.kinds import SGLANG
from servers.server_log import parse_log

Moment = datetime
START = datetime(2025, 11, 20, 23, 59, 30)
"""Soon after the start of the load it is another day."""


def of_2024(at: Moment, text: str, ranks: str = " TP0") -> str:
    return f"[{at:%H:%M:%S}{ranks}] {text}"


def of_2025(at: Moment, text: str, ranks: str = "") -> str:
    return f"[{at:%Y-%m-%d %H:%M:%S}{ranks}] {text}"


def decode_2024(running: int, queue: int, usage: float, speed: float) -> str:
    """Version 0.3 to 0.4.3."""
    return (
        f"Decode batch. #running-req: {running}, #token: {int(9e4 * usage)}, token usage: {usage:.2f}, "
        f"gen throughput (token/s): {speed:.2f}, #queue-req: {queue}"
    )


def decode_2025(running: int, queue: int, usage: float, speed: float, accepted: float = 0) -> str:
    """Version 0.5."""
    drafts = f"accept len: {accepted:.2f}, accept rate: {accepted / 6:.2f}, " if accepted else ""
    return (
        f"Decode batch, #running-req: {running}, #token: {int(9e4 * usage)}, token usage: {usage:.2f}, "
        f"{drafts}cuda graph: True, gen throughput (token/s): {speed:.2f}, #queue-req: {queue}, "
    )


def log(of: Callable[..., str], lines: Mapping[int, str] | Mapping[float, str]) -> str:
    return "\n".join(of(START + timedelta(seconds=at), text) for at, text in lines.items()) + "\n"


def arguments(**given: Any) -> str:
    """The line in which SGLang prints its arguments, with the fields around them."""
    known = {
        "model_path": "m",
        "context_length": None,
        "kv_cache_dtype": "auto",
        "mem_fraction_static": 0.85,
        "max_running_requests": None,
        "chunked_prefill_size": 8192,
        "page_size": 1,
        "tp_size": 1,
        "disable_radix_cache": False,
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        **given,
    }
    listed = ", ".join(f"{name}={value!r}" for name, value in known.items())
    return of_2025(START, f"server_args=ServerArgs({listed}, cuda_graph_bs=[1, 2, 4], lora_paths=None)\n")


def samples(page: str) -> dict[str, float]:
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines()}


def judged(text: str, tmp_path: Path, slo: str | None = None) -> Diagnosis:
    path = tmp_path / "sglang.log"
    path.write_text(text)
    source = LogSource(path)
    return diagnose(source, None, slo, log=parse_log(text))


@pytest.mark.parametrize(
    ("of", "decode", "prefill"),
    [
        pytest.param(
            of_2024,
            decode_2024,
            "Prefill batch. #new-seq: 2, #new-token: 300, #cached-token: 100, cache hit rate: 25.00%, "
            "token usage: 0.30, #running-req: 8, #queue-req: 3",
            id="0.3",
        ),
        pytest.param(
            of_2025,
            decode_2025,
            "Prefill batch, #new-seq: 2, #new-token: 300, #cached-token: 100, token usage: 0.30, "
            "#running-req: 8, #queue-req: 3, #pending-token: 70, cuda graph: False, "
            "input throughput (token/s): 310.5",
            id="0.5",
        ),
        pytest.param(
            lambda at, text: f"{at:%FT%T}.123Z stdout F " + of_2025(at, text, " DP0 TP0 EP0"),
            decode_2025,
            "Prefill batch [41], #new-seq: 2, #new-token: 300, #cached-token: 100, full token usage: 0.30, "
            "swa token usage: 0.10, #running-req: 8, #queue-req: 3, ",
            id="0.5, sliding window, in a container",
        ),
    ],
)
def test_lines_of_every_version_say_the_same(
    of: Callable[..., str], decode: Callable[..., str], prefill: str
) -> None:
    lines = {0: decode(8, 5, 0.3, 900.0), 10: prefill, 20: decode(10, 4, 0.32, 800.0)}
    lines[45] = decode(10, 2, 0.35, 1000.0)
    scrapes = parse_log(log(of, lines)).scrapes
    pages = {(at - scrapes[0][0]) // 1000: samples(page) for at, page in scrapes}
    assert pages.keys() == set(range(46))
    assert (pages[0]["sglang:num_running_reqs"], pages[0]["sglang:num_queue_reqs"]) == (8, 5)
    # A prefill line counts those who decode; its own come on top.
    assert (pages[10]["sglang:num_running_reqs"], pages[10]["sglang:token_usage"]) == (10, 0.3)
    assert (pages[10]["sglang:prompt_tokens_total"], pages[10]["sglang:cached_tokens_total"]) == (400, 100)
    # Tokens since the decode line before, at the speed since then; past midnight too.
    assert pages[20]["sglang:generation_tokens_total"] == 20 * 800
    assert pages[45]["sglang:generation_tokens_total"] == 20 * 800 + 25 * 1000
    assert pages[45]["sglang:num_retracted_requests_total"] == 0


def test_what_it_made_of_its_arguments_counts_and_how_long_it_took() -> None:
    text = arguments(tp_size=2, disable_radix_cache=True)
    for rank in (" TP1", " TP0"):
        text += of_2025(START, "max_total_num_tokens=87552, chunked_prefill_size=4096, ", rank)
        text += "max_prefill_tokens=16384, max_running_requests=48, context_len=32768\n"
    text += of_2025(START, "Load weight end. elapsed=97.50 s, type=LlamaForCausalLM, avail mem=60.0 GB\n")
    text += of_2025(START + timedelta(seconds=130), "The server is fired up and ready to roll!\n")
    facts = parse_log(text)
    wanted = {
        "max_num_seqs": 48,
        "max_num_batched_tokens": 4096,
        "max_model_len": 32768,
        "gpu_memory_utilization": 0.85,
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
    }
    assert {name: facts.flags[name] for name in wanted} == wanted
    assert (facts.complete, facts.kv_cache_tokens) == (True, 87552)
    assert facts.durations == {"load_seconds": 97.5, "startup_seconds": 32.5}


def test_arguments_alone_leave_the_rest_to_what_is_typical() -> None:
    facts = parse_log(arguments(chunked_prefill_size=-1, max_running_requests=16))
    assert facts.flags["enable_chunked_prefill"] is False
    assert facts.flags["max_num_seqs"] == 16
    assert "max_num_batched_tokens" not in facts.flags


def test_requests_taken_back_are_counted_once_a_group_of_ranks() -> None:
    full = "KV cache pool is full. Retract requests. #retracted_reqs: {}, #new_token_ratio: 0.1 -> 0.35"
    early = "Decode out of memory happened. #retracted_reqs: {}, #new_token_ratio: 0.1 -> 0.35"
    lines = []
    for second, (text, requests) in enumerate([(full, 2), (early, 1), (full, 4)]):
        at = START + timedelta(seconds=second)
        lines += [of_2025(at, text.format(requests), rank) for rank in (" TP1", " TP0")]
        lines.append(of_2025(at, decode_2025(9, 1, 0.99, 300.0), " TP0"))
    (_, last) = parse_log("\n".join(lines)).scrapes[-1]
    assert samples(last)["sglang:num_retracted_requests_total"] == 7


def test_the_ranks_of_a_data_parallel_server_are_engines() -> None:
    lines = [
        of_2025(
            START + timedelta(seconds=n), decode_2025(10 * (1 + dp), dp, 0.5, 100.0), f" DP{dp} TP{4 * dp}"
        )
        for n in range(3)
        for dp in (0, 1)
    ]
    _, last = parse_log("\n".join(lines)).scrapes[-1]
    assert 'sglang:num_running_reqs{engine="0"} 10.0' in last
    assert 'sglang:num_running_reqs{engine="1"} 20.0' in last


def test_a_silence_that_ends_with_no_request_running_was_idle() -> None:
    arriving = (
        "Prefill batch, #new-seq: 1, #new-token: 50, #cached-token: 0, token usage: 0.0, "
        "#running-req: {}, #queue-req: 0, "
    )
    pages = {}
    for running in (0, 3):
        lines = {0: decode_2025(4, 1, 0.1, 200.0), 60: arriving.format(running)}
        scrapes = parse_log(log(of_2025, lines)).scrapes
        pages[running] = [samples(page)["sglang:num_running_reqs"] for _, page in scrapes]
    assert pages[0] == [4] + [0] * 59 + [1]
    assert pages[3] == [4] * 60 + [4]


def steady(of: Callable[..., str], line: Callable[[int], str], seconds: int = 90) -> str:
    """A decode line a second; every ten seconds a prompt of 600 tokens."""
    lines = {float(n): line(n) for n in range(seconds)}
    for n in range(0, seconds, 10):
        running, queue = (re.search(rf"#{name}-req: (\d+)", line(n)) for name in ("running", "queue"))
        assert running
        assert queue
        lines[n + 0.5] = (
            f"Prefill batch. #new-seq: 0, #new-token: 400, #cached-token: 200, token usage: 0.1, "
            f"#running-req: {running[1]}, #queue-req: {queue[1]}"
        )
    return log(of, dict(sorted(lines.items())))


def test_a_full_pool_is_found(tmp_path: Path) -> None:
    full = "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 646, "
    text = arguments() + steady(of_2025, lambda n: decode_2025(66 - n // 10, 5 + n, 0.98, 2600.0))
    text += log(of_2025, dict.fromkeys(range(0, 90, 5), full))
    found = judged(text, tmp_path)
    first = found.findings[0]
    assert (found.family, first.id) == ("SGLang", "kv-pressure")
    assert {item.signal: item.value for item in first.evidence}["preemptions"] == pytest.approx(17, rel=0.1)
    typed = [item.args for item in first.prescriptions]
    assert typed[0] == "--mem-fraction-static 0.87"  # in small steps: activations need the rest
    assert "--kv-cache-dtype fp8_e4m3" in typed


@pytest.mark.parametrize("of", [of_2024, of_2025])
def test_a_cap_of_sequences_is_found(of: Callable[..., str], tmp_path: Path) -> None:
    decode = decode_2024 if of is of_2024 else decode_2025
    text = arguments(max_running_requests=8) + steady(of, lambda n: decode(8, 12, 0.1, 320.0))
    (finding,) = (f for f in judged(text, tmp_path).findings if f.id == "seq-cap")
    assert finding.prescriptions[0].args == "--max-running-requests 24"


def test_overload_is_found(tmp_path: Path) -> None:
    text = arguments(max_running_requests=64)
    text += steady(of_2025, lambda n: decode_2025(64, n, 0.5, 64 / 0.4))
    assert judged(text, tmp_path, "itl_p99<100ms").findings[0].id == "overload"


def test_drafts_that_lose_are_found_and_how_to_end_them(tmp_path: Path) -> None:
    tree = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 32, "speculative_eagle_topk": 8}
    text = arguments(**tree) + steady(of_2025, lambda n: decode_2025(40, 0, 0.5, 2000.0, accepted=2.0))
    (finding,) = (f for f in judged(text, tmp_path).findings if f.id == "speculation-loses")
    figures = {item.signal: (item.value, item.query) for item in finding.evidence}
    acceptance, query = figures["acceptance"]
    assert acceptance == pytest.approx(1 / 31)
    assert query.endswith("- 1) / 31")
    assert figures["draft_tokens"][0] == pytest.approx(31 / 2 * 89 * 2000, rel=0.05)
    assert finding.prescriptions[0].args == "drop --speculative-algorithm"


def test_a_shorter_draft_is_written_as_sglang_counts_it(tmp_path: Path) -> None:
    tree = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 7, "speculative_eagle_topk": 4}
    text = arguments(**tree) + steady(of_2025, lambda n: decode_2025(90, 0, 0.5, 2000.0, accepted=2.2))
    (finding,) = (f for f in judged(text, tmp_path).findings if f.id == "speculation-loses")
    assert [item.args for item in finding.prescriptions if item.changes] == [
        "drop --speculative-algorithm",
        "--speculative-num-draft-tokens 4",
    ]


def test_a_cache_that_is_off_is_turned_on_by_dropping_a_flag() -> None:
    typed = SGLANG.spelling.arguments
    assert typed({"enable_prefix_caching": True}) == "drop --disable-radix-cache"
    assert typed({"enable_prefix_caching": False}) == "--disable-radix-cache"
    assert typed({"max_num_batched_tokens": 4096}) == "--chunked-prefill-size 4096"


def test_nothing_is_found_where_nothing_is_wrong_and_what_a_log_lacks_is_named(tmp_path: Path) -> None:
    found = judged(arguments() + steady(of_2025, lambda n: decode_2025(20, 0, 0.4, 900.0)), tmp_path)
    assert found.findings == ()
    assert not found.healthy
    why = {m.why for item in found.cannot_tell for m in item.missing}
    assert "sglang:time_to_first_token_seconds is missing" in why
    assert not {item.id for item in found.cannot_tell} & {"overload", "seq-cap", "speculation-loses"}


def test_the_log_gives_the_flags_beside_metrics() -> None:
    labels = '{model_name="m"}'
    pages = [
        (1000 * n, f"sglang:num_running_reqs{labels} 8\nsglang:num_queue_reqs{labels} 9\n") for n in range(30)
    ]
    facts = parse_log(arguments(max_running_requests=8))
    (capped,) = (item for item in diagnose(Scrapes(pages), log=facts).cannot_tell if item.id == "seq-cap")
    assert "max_num_seqs" not in {missing.name for missing in capped.missing}


def test_a_vllm_log_is_still_vllms() -> None:
    line = (
        "INFO 11-29 11:45:{:02} [loggers.py:335] Engine 00{}: Avg prompt throughput: 551.9 tokens/s, "
        "Avg generation throughput: 110.2 tokens/s, Running: {} reqs, Waiting: 3 reqs, "
        "GPU KV cache usage: 1.7%, Prefix cache hit rate: 0.0%"
    )
    text = "\n".join(line.format(second, rank, 10 + rank) for second in (0, 10, 20) for rank in (0, 1))
    scrapes = parse_log("\x1b[0;36m(EngineCore pid=1)\x1b[0;0m " + text).scrapes
    assert len(scrapes) == 3
    for _, page in scrapes[1:]:  # both engines, though both wrote in the same second
        assert 'vllm:num_requests_running{engine="0"} 10.0' in page
        assert 'vllm:num_requests_running{engine="1"} 11.0' in page


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**16), cuts=st.integers(1, 10))
def test_damage_gives_no_traceback_and_nothing_that_is_not_there(
    seed: int, cuts: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    text = arguments() + steady(of_2025, lambda n: decode_2025(20, 0, 0.4, 900.0), seconds=40)
    raw = bytearray(text.encode())
    for _ in range(cuts):
        at = chance.randrange(len(raw))
        if chance.random() < 0.5:
            del raw[at : at + chance.randrange(200)]
        else:
            raw[at:at] = chance.randbytes(chance.randrange(9))
    path = tmp_path / "damaged.log"
    path.write_bytes(bytes(raw))
    try:
        found = diagnose(LogSource(path))
    except SourceError:
        return
    assert found.findings == ()
    assert json.dumps(found.to_json(), allow_nan=False)
