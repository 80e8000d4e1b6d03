"""One reader of /metrics: what the catalogue's metrics come to on a page."""

from __future__ import annotations

import pytest

from servers.kinds import plain
from servers.metrics.page import PageReader

PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.6
vllm:gpu_cache_usage_perc{engine="0"} 0.9
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 7
vllm:cache_config_info{engine="0",num_gpu_blocks="101",block_size="16"} 1
vllm:num_requests_waiting{engine="0"} 12"""


def test_engines_are_combined_and_of_two_names_the_newer_counts() -> None:
    page = PageReader().read(PAGE)
    assert page.figure("running") == 7
    assert page.figure("kv_usage") == 0.6  # and not the deprecated name's
    assert page.kv_tokens == 1600
    assert page.figure("waiting") is None, "the last line has no line feed: it may go on"


def test_only_what_is_asked_for_is_read() -> None:
    page = PageReader(["running"]).read(PAGE)
    assert {name for name, _ in page.samples} == {"vllm:num_requests_running"}


def test_lines_that_cannot_be_read_are_counted_and_cost_no_other_line() -> None:
    reader = PageReader(["running"])
    for garbled in ('vllm:num_requests_running{engine="0" 3\n', "vllm:num_requests_running\n"):
        page = reader.read(garbled + PAGE)
        assert (page.figure("running"), page.unreadable) == (7, 1)


def test_copies_and_an_aggregate_beside_its_parts_count_once() -> None:
    page = PageReader(["running", "waiting", "prompt_tokens"]).read(
        "".join(
            f'sglang:num_running_reqs{{dp_rank="{rank // 2}",tp_rank="{rank}"}} {4 + rank // 2}\n'
            for rank in range(4)
        )
        + 'sglang:num_queue_reqs{priority=""} 3\n'
        + 'sglang:num_queue_reqs{priority="0"} 1\nsglang:num_queue_reqs{priority="1"} 2\n'
        + 'ray_sglang_prompt_tokens_total{WorkerId="a"} 7\nray_sglang_prompt_tokens_total{WorkerId="b"} 9\n'
    )
    assert [page.figure(key) for key in ("running", "waiting", "prompt_tokens")] == [9, 3, 16]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("ray_vllm:num_requests_running", "vllm:num_requests_running"),
        ("ray_vllm_num_requests_running", "vllm:num_requests_running"),
        ("sglang_token_usage", "sglang:token_usage"),
        ("otel_collector_lmdeploy_num_requests_running", "lmdeploy:num_requests_running"),
        ("job:vllm:num_requests_running", "job:vllm:num_requests_running"),
        ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL"),
    ],
)
def test_a_name_is_read_behind_what_a_pipeline_put_before_it(name: str, own: str) -> None:
    assert plain(name) == own
