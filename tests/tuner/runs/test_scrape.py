from typing import Any

import pytest

from tuner.runs.scrape import ServerFigures, read_figures

SCRAPE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_running{{engine="1"}} 1.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} {preempted}
vllm:num_preemptions_created{{engine="0"}} 1.7e9
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",num_gpu_blocks="101"}} 1.0
"""


def test_figures_of_a_run() -> None:
    scrapes = [(at, SCRAPE.format(running=at % 5, preempted=3 + at)) for at in range(10)]
    assert read_figures(scrapes) == ServerFigures(kv_tokens=1600, peak_running=5, preemptions=9)


def test_what_is_not_there_is_none_and_not_zero() -> None:
    assert read_figures([(0, "")]) == ServerFigures()
    assert read_figures([]) == ServerFigures()


def test_the_log_stands_in_for_the_pool() -> None:
    log = "INFO GPU KV cache size: 12,345 tokens\nINFO KV cache: 23,456 tokens, max concurrency 2.9x"
    assert read_figures([], log).kv_tokens == 23456


def test_other_values_of_the_cache_info_are_no_pool() -> None:
    unknown = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert read_figures([(0, "# TYPE vllm:cache_config_info gauge\n" + unknown)]).kv_tokens is None


def test_sglangs_names() -> None:
    scrapes = [
        (1, '# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{engine_type="unified"} 3.0\n'),
        (
            2,
            "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 7.0\n"
            "# TYPE sglang:max_total_num_tokens gauge\nsglang:max_total_num_tokens 665690.0\n",
        ),
    ]
    assert read_figures(5 * scrapes) == ServerFigures(kv_tokens=665_690, peak_running=7)


def test_the_fullest_engines_pool_counts() -> None:
    page = (
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{{engine="0"}} {}\nvllm:kv_cache_usage_perc{{engine="1"}} {}\n'
    )
    scrapes = [(k, page.format(*usage)) for k, usage in enumerate(4 * [(0.1, 0.3), (0.4, 0.2), (0.2, 0.2)])]
    assert read_figures(scrapes).peak_kv_usage == 0.4
    sglang = "# TYPE sglang:token_usage gauge\nsglang:token_usage 0.7\n"
    assert read_figures([(at, sglang) for at in range(10)]).peak_kv_usage == 0.7


def test_scrapes_before_and_after_say_nothing_about_the_load_between_them() -> None:
    before_and_after = [(at, SCRAPE.format(running=0, preempted=0)) for at in (0, 1, 1, 2)]
    found = read_figures(before_and_after)
    assert (found.peak_running, found.preemptions) == (None, 0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-3", "1e300", "eleven", ""])
def test_nonsense_is_not_read_and_what_stands_beside_it_is(value: str) -> None:
    sane = [(at, SCRAPE.format(running=2, preempted=at)) for at in range(10)]
    page = SCRAPE.format(running=value, preempted=value).replace('"101"', '"²"')
    found = read_figures([*sane, (10, page)])
    assert found == ServerFigures(kv_tokens=1600, peak_running=3, preemptions=9)
    alone = read_figures([(at, page.replace('"1"} 1.0', f'"1"}} {value}')) for at in range(10)])
    assert alone == ServerFigures()


@pytest.mark.parametrize("page", ["<html>502</html>\n", "\0\xff\n", SCRAPE[:-40], SCRAPE.replace("} ", "")])
def test_a_page_that_is_none_says_nothing(page: Any) -> None:
    assert read_figures([(0, page)]).peak_running is None


def test_a_pool_beyond_all_reason_is_none() -> None:
    page = SCRAPE.format(running=1, preempted=0).replace('"101"', f'"{"9" * 400}"')
    assert read_figures([(0, page)]).kv_tokens is None
    assert read_figures([], f"GPU KV cache size: {'9' * 5000} tokens").kv_tokens is None
    assert read_figures([], "GPU KV cache size: ,, tokens").kv_tokens is None


def test_a_counter_that_begins_anew_is_counted_from_there() -> None:
    scrapes = [(k, SCRAPE.format(running=1, preempted=count)) for k, count in enumerate([40, 50, 0, 3])]
    assert read_figures(scrapes).preemptions == 13
