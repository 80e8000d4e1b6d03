"""Files of seven benchmark tools: each told by what it holds, its figures by the names of what they mean."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from stated_files import (
    AIPERF,
    GENAI_BENCH,
    GUIDELLM,
    INFERENCE_PERF,
    LLMPERF,
    SGLANG,
    SGLANG_TABLE,
    VLLM,
    VLLM_TABLE,
)

from loadgen.foreign.read import read_results
from loadgen.foreign.result import AskedLoad, ForeignError, StatedResult


def read(tmp_path: Path, *documents: Any) -> tuple[StatedResult, ...]:
    """Of one file, in which one JSON document follows another."""
    path = tmp_path / "result.json"
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return read_results(path)


def printed(tmp_path: Path, text: str) -> tuple[StatedResult, ...]:
    path = tmp_path / "result.txt"
    path.write_text(text)
    return read_results(path)


@pytest.mark.parametrize(
    ("document", "tool", "figures", "facts"),
    [
        (
            VLLM,
            "vllm bench serve",
            {"ttft_p99": 356.43102, "tpot_p50": 0.01708, "inter_chunk_p99": 0.3, "throughput": 1042.18},
            (100, 0, 393.02, "20 req/s, 100 requests"),
        ),
        (
            SGLANG,
            "SGLang's bench_serving",
            {"ttft_p50": 0.60688, "e2e_mean": 2.09807, "request_rate": 3.8287},
            (996, None, 260.14, "random, 4 req/s"),
        ),
        (
            AIPERF,
            "AIPerf",
            {"ttft_p95": 0.31, "tpot_p99": 0.041, "inter_chunk_p99": 0.095, "e2e_p99": 4.1},
            (480, 84, 60, "at most 20 in flight"),
        ),
        (
            GENAI_BENCH,
            "genai-bench",
            {"ttft_p50": 0.0324, "tpot_mean": 0.0179, "e2e_p99": 2.3114, "throughput": 54.9},
            (32, 2, 60, "D(100,100), at most 4 in flight"),
        ),
        (
            LLMPERF,
            "LLMPerf",
            {"ttft_mean": 0.18, "ttft_p50": 0.15, "e2e_per_token_p99": 0.04, "request_rate": 8.0},
            (480, 10, 60, "550 prompt tokens, at most 8 in flight"),
        ),
        (
            INFERENCE_PERF,
            "inference-perf",
            {"ttft_p50": 0.0306, "ttft_p999": 0.057, "tpot_p99": 0.0046, "inter_chunk_p99": 0.0144,
             "e2e_per_token_mean": 0.0091, "lateness_p99": 0.0045, "throughput": 2366.2},
            (2278, 0, 60.457, "37.97 req/s"),
        ),
    ],
)  # fmt: skip
def test_a_file_is_told_by_what_it_holds(
    document: dict[str, Any], tool: str, figures: dict[str, float], facts: tuple[Any, ...], tmp_path: Path
) -> None:
    (result,) = read(tmp_path, document)
    assert result.tool == tool
    assert {name: result.value(name) for name in figures} == pytest.approx(figures, rel=1e-4)
    assert (result.completed, result.failed) == facts[:2]
    assert result.seconds == pytest.approx(facts[2], rel=1e-4)
    assert str(result.asked) == facts[3]


def test_guidellm_has_a_result_per_load_and_its_itl_is_a_requests_mean(tmp_path: Path) -> None:
    slow, fast = read(tmp_path, GUIDELLM)
    assert (str(slow.asked), str(fast.asked)) == ("constant, 8 req/s", "constant, 16 req/s")
    assert fast.origin.endswith("result.json, result 2")
    assert slow.figures == pytest.approx(
        {
            "e2e_mean": 2.4, "e2e_p50": 2.4, "e2e_p95": 4.8, "ttft_mean": 0.18, "ttft_p50": 0.18,
            "ttft_p95": 0.36, "tpot_mean": 0.0205, "tpot_p50": 0.0205, "tpot_p95": 0.041,
            "e2e_per_token_mean": 0.021, "e2e_per_token_p50": 0.021, "e2e_per_token_p95": 0.042,
            "throughput": 1020.0, "request_rate": 8.0,
        }
    )  # fmt: skip
    assert (slow.failed, fast.rate_share) == (3, 0.5)
    assert any("TPOT here" in note for note in slow.notes)


def test_appended_listed_and_pretty_printed_results_are_all_read(tmp_path: Path) -> None:
    other = {**VLLM, "duration": 300.0}
    assert [run.seconds for run in read(tmp_path, VLLM, other)] == [393.02, 300.0]
    assert [run.seconds for run in read(tmp_path, [VLLM, other])] == [393.02, 300.0]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(VLLM, indent=2) + json.dumps(other, indent=2))
    assert [run.origin.partition(", ")[2] for run in read_results(path)] == ["result 1", "result 2"]


def test_a_printed_table_states_what_the_file_states(tmp_path: Path) -> None:
    (saved,), (table,) = read(tmp_path, VLLM), printed(tmp_path, VLLM_TABLE)
    assert table.figures == pytest.approx(saved.figures)
    assert (table.tool, table.asked, table.completed) == (saved.tool, saved.asked, saved.completed)
    twice = printed(tmp_path, f"$ vllm bench serve\n{VLLM_TABLE}\nagain\n{VLLM_TABLE}")
    assert [run.origin.partition(", ")[2] for run in twice] == ["result 1", "result 2"]
    (commented,) = printed(tmp_path, SGLANG_TABLE)
    assert (commented.tool, commented.asked) == ("SGLang's bench_serving", AskedLoad(math.inf, 20))
    assert commented.figures == pytest.approx(
        {"throughput": 241.36, "request_rate": 100 / 107.24, "e2e_p50": 19.8765, "ttft_p99": 0.8124}
    )
    assert commented.prompt_tokens == pytest.approx(505.61)


def test_percentiles_that_are_not_stated_come_from_the_requests_where_all_are_kept(tmp_path: Path) -> None:
    kept = {
        **VLLM,
        "completed": 3, "failed": 1, "num_prompts": 4, "ttfts": [1.0, 0.0, 2.0, 3.0],
        "itls": [[0.1], [], [0.2, 0.2], [0.3]], "errors": ["", "refused", "", ""],
    }  # fmt: skip
    (result,) = read(tmp_path, kept)
    assert (result.value("ttft_p90"), result.value("e2e_p50")) == pytest.approx((2.8, 2.4))
    assert result.value("ttft_p50") == pytest.approx(149.33937), "what is stated wins"
    (cut,) = read(tmp_path, {**kept, "completed": 100})
    assert math.isnan(cut.value("ttft_p90"))


def test_what_a_file_cannot_say_is_said(tmp_path: Path) -> None:
    (sglang,), (llmperf,), (perf,) = (read(tmp_path, one) for one in (SGLANG, LLMPERF, INFERENCE_PERF))
    assert "SGLang's bench_serving does not state failures" in sglang.limits
    assert any("inter_chunk, tpot of 0 left out" in line for line in sglang.limits)
    assert math.isnan(sglang.value("inter_chunk_p99"))
    assert "its 10 failed requests are in no percentile" in llmperf.limits
    assert any("whether its client kept up" in line for line in sglang.limits)
    assert not any("whether its client kept up" in line for line in perf.limits)
    late = {**INFERENCE_PERF, "load_summary": {"schedule_delay": {"p99": 54.1}, "requested_rate": 222.8}}
    assert read(tmp_path, late)[0].faults == (
        "its client sent requests up to 54.1 s (P99) after they were due",
    )
    assert read(tmp_path, {**VLLM, "completed": 0})[0].faults == ("no request succeeded",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither JSON nor a table"),
        ("{", "neither JSON nor a table"),
        ("3", "neither JSON nor a table"),
        ('{"chat_id": 3}', r"nor a result of .*GuideLLM.*; its keys are 'chat_id'"),
        (json.dumps({**VLLM, "duration": "long"}), r"a result of vllm bench serve, but damaged \(.*duration"),
        (json.dumps({"benchmarks": [{"metrics": {"request_latency": 3}}]}), r"of GuideLLM, but damaged"),
        (json.dumps({**GENAI_BENCH, "_time_unit": "years"}), r"genai-bench in 'years'; known units: s, ms"),
    ],
)
def test_another_file_is_named_and_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=message) as caught:
        printed(tmp_path, text)
    assert "result.txt" in str(caught.value)


def test_a_folders_results_are_read_and_its_other_files_passed_over(tmp_path: Path) -> None:
    for number in (2, 1):
        (tmp_path / f"run-{number}.json").write_text(json.dumps({**VLLM, "duration": 100.0 * number}))
    (tmp_path / "notes.txt").write_text("the second one was slow")
    assert [run.seconds for run in read_results(tmp_path)] == [100.0, 200.0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ForeignError, match="no file in it holds a result of"):
        read_results(tmp_path / "empty")
