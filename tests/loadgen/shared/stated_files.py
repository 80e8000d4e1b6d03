"""Result files of other tools, reduced from published ones: the keys are theirs, the numbers retyped."""

from __future__ import annotations

from typing import Any

VLLM: dict[str, Any] = {
    "date": "20260519-101801", "endpoint_type": "openai-chat", "backend": "openai-chat", "model_id": "m",
    "num_prompts": 100, "request_rate": 20.0, "burstiness": 1.0, "max_concurrency": None, "duration": 393.02,
    "completed": 100, "failed": 0, "total_input_tokens": 1639637, "total_output_tokens": 409600,
    "request_throughput": 0.2544, "request_goodput": None, "output_throughput": 1042.18,
    "ttfts": [153.9, 149.3], "itls": [[0.017], [0.018]], "errors": ["", ""], "mean_ttft_ms": 153886.28,
    "median_ttft_ms": 149339.37, "std_ttft_ms": 101000.0, "p99_ttft_ms": 356431.02, "mean_tpot_ms": 17.41,
    "median_tpot_ms": 17.08, "p99_tpot_ms": 26.87, "mean_itl_ms": 43.0, "p99_itl_ms": 300.0,
}  # fmt: skip
VLLM_TABLE = """\
INFO 05-19 10:18:01 [serve.py] done
============ Serving Benchmark Result ============
Successful requests:                     100
Failed requests:                         0
Request rate configured (RPS):           20.00
Benchmark duration (s):                  393.02
Total input tokens:                      1639637
Total generated tokens:                  409600
Request throughput (req/s):              0.25
Output token throughput (tok/s):         1042.18
---------------Time to First Token----------------
Mean TTFT (ms):                          153886.28
Median TTFT (ms):                        149339.37
P99 TTFT (ms):                           356431.02
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          17.41
Median TPOT (ms):                        17.08
P99 TPOT (ms):                           26.87
---------------Inter-token Latency----------------
Mean ITL (ms):                           43.00
P99 ITL (ms):                            300.00
==================================================
"""
SGLANG: dict[str, Any] = {
    "tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": 4.0, "max_concurrency": None,
    "duration": 260.14, "completed": 996, "total_input_tokens": 342460, "total_output_tokens": 218257,
    "total_output_tokens_retokenized": 95297, "request_throughput": 3.83, "output_throughput": 839.0,
    "mean_e2e_latency_ms": 2098.07, "median_e2e_latency_ms": 606.86, "mean_ttft_ms": 2074.09,
    "median_ttft_ms": 606.88, "p99_ttft_ms": 15089.74, "median_tpot_ms": 0.0, "mean_itl_ms": 0.0,
    "p99_itl_ms": 0.0,
}  # fmt: skip
SGLANG_TABLE = """\
# ============ Serving Benchmark Result ============
# Backend:                                 sglang-oai-chat
# Traffic request rate:                    inf
# Max request concurrency:                 20
# Successful requests:                     100
# Benchmark duration (s):                  107.24
# Total input tokens:                      50,561
# Output token throughput (tok/s):         241.36
# ----------------End-to-End Latency----------------
# Median E2E Latency (ms):                 19876.50
# ---------------Time to First Token----------------
# P99 TTFT (ms):                           812.40
# ==================================================
"""


def _distribution(middle: float) -> dict[str, Any]:
    return {"successful": {"mean": middle, "median": middle, "percentiles": {"p95": 2 * middle, "p001": 0.1}}}


GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 2, "guidellm_version": "0.7.1"},
    "benchmarks": [
        {
            "type_": "generative_benchmark",
            "duration": 60.1,
            "config": {"strategy": {"type_": "constant", "rate": rate}},
            "metrics": {
                "request_totals": {"successful": 480, "errored": 3, "incomplete": 8, "total": 491},
                "requests_per_second": _distribution(8.0),
                "request_latency": _distribution(2.4),
                "time_to_first_token_ms": _distribution(180.0),
                "time_per_output_token_ms": _distribution(21.0),
                "inter_token_latency_ms": _distribution(20.5),
                "output_tokens_per_second": _distribution(1020.0),
            },
        }
        for rate in (8.0, 16.0)
    ],
}
AIPERF: dict[str, Any] = {
    "time_to_first_token": {
        "unit": "ms",
        "avg": 182.0,
        "p50": 170.0,
        "p95": 310.0,
        "p99": 520.0,
        "min": 90.0,
    },
    "inter_token_latency": {"unit": "ms", "avg": 20.5, "p50": 20.1, "p99": 41.0},
    "inter_chunk_latency": {"unit": "ms", "avg": 22.0, "p99": 95.0},
    "request_latency": {"unit": "ms", "avg": 2400.0, "p99": 4100.0},
    "request_throughput": {"unit": "requests/sec", "avg": 8.0},
    "request_count": {"unit": "requests", "avg": 480.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 1020.0},
    "output_sequence_length": {"unit": "tokens", "avg": 127.5},
    "input_config": {"endpoint": {"model_names": ["m"]}, "loadgen": {"concurrency": 20}},
    "was_cancelled": True,
    "error_summary": [{"error_details": {"code": 499}, "count": 81}, {"error_details": None, "count": 3}],
}
GENAI_BENCH: dict[str, Any] = {
    "aggregated_metrics": {
        "scenario": "D(100,100)", "num_concurrency": 4, "run_duration": 60.0,
        "mean_output_throughput_tokens_per_s": 54.9, "requests_per_second": 0.5333, "num_error_requests": 2,
        "num_completed_requests": 32,
        "stats": {
            "ttft": {"min": 31.0, "mean": 52.4, "stddev": 110.8, "p50": 32.4, "p99": 472.3},
            "tpot": {"mean": 17.9, "p99": 18.4}, "e2e_latency": {"mean": 1843.6, "p99": 2311.4},
            "num_input_tokens": {"mean": 90.7}, "num_output_tokens": {"mean": 100.0},
        },
    },
    "individual_request_metrics": [], "_time_unit": "ms",
}  # fmt: skip
LLMPERF: dict[str, Any] = {
    "version": "2023-08-31", "name": "m_550_150_summary", "model": "m", "mean_input_tokens": 550,
    "num_concurrent_requests": 8, "results_inter_token_latency_s_quantiles_p99": 0.04,
    "results_inter_token_latency_s_mean": 0.02, "results_ttft_s_quantiles_p50": 0.15,
    "results_ttft_s_quantiles_p99": 0.5, "results_ttft_s_mean": 0.18,
    "results_num_requests_started": 490, "results_number_errors": 10,
    "results_mean_output_throughput_token_per_s": 1020.0, "results_num_completed_requests_per_min": 480.0,
}  # fmt: skip
INFERENCE_PERF: dict[str, Any] = {
    "load_summary": {
        "count": 2278, "schedule_delay": {"mean": 0.0008, "median": -0.0001, "p99": 0.0045, "p0.1": -0.001},
        "send_duration": 59.97, "requested_rate": 37.97, "achieved_rate": 37.98,
    },
    "successes": {
        "count": 2278,
        "latency": {
            "request_latency": {"mean": 0.564, "median": 0.561, "p99": 0.625},
            "normalized_time_per_output_token": {"mean": 0.0091},
            "time_per_output_token": {"mean": 0.0041, "p99": 0.0046},
            "time_to_first_token": {"mean": 0.0313, "median": 0.0306, "p99": 0.0457, "p99.9": 0.057},
            "inter_token_latency": {"mean": 0.0041, "p99": 0.0144},
        },
        "throughput": {"output_tokens_per_sec": 2366.2, "requests_per_sec": 37.68},
        "prompt_len": {"mean": 200.9}, "output_len": {"mean": 62.8},
    },
    "failures": {"count": 0, "request_latency": None, "prompt_len": None},
}  # fmt: skip
