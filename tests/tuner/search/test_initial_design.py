"""Starting points: what follows from the baseline's own measurement, and what was published."""

import math
from typing import Any

from servers.slo.objective import parse_slo
from tuner.search.initial_design import starting_points

BASELINE = {"max_num_batched_tokens": 8192, "max_num_seqs": 64}


def starts(
    slo: str,
    speed: float = 40_000.0,
    running: float = 10.0,
    pace: Any = math.nan,
    baseline: Any = BASELINE,
    offered: Any = None,
) -> list[Any]:
    return list(starting_points(parse_slo(slo), baseline, speed, running, pace, offered))


def test_the_budget_of_a_bound_on_itl_is_what_a_step_within_it_can_take() -> None:
    flags, why = starts("itl_es99<50ms,ttft_es95<2s", pace=0.010)[0]
    assert flags == {"max_num_batched_tokens": round((0.8 * 0.050 - 0.010) * 40_000)}
    assert "within the ITL bound" in why


def test_a_bound_that_decoding_alone_misses_or_an_unknown_pace_gives_no_budget() -> None:
    for pace in (0.045, math.nan):
        assert not any("within" in why for _, why in starts("itl_es99<50ms", pace=pace))


def test_where_every_place_is_taken_more_places_come_first() -> None:
    flags, why = starts("ttft", running=64)[0]
    assert flags == {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    assert "every max_num_seqs" in why
    assert "every max_num_seqs" not in starts("ttft", running=63)[0][1]
    assert "every max_num_seqs" in starts("throughput", running=64, offered=65)[0][1]
    assert "every max_num_seqs" not in starts("throughput", running=64, offered=64)[0][1], "no request waits"


def test_a_budget_is_never_smaller_than_the_places() -> None:
    small = {"max_num_batched_tokens": 128, "max_num_seqs": 64}
    for flags, _ in starts("itl_es99<20ms", speed=1000.0, running=64, pace=0.012, baseline=small):
        assert flags["max_num_batched_tokens"] >= flags.get("max_num_seqs", 64)


def test_published_budgets_are_carried_over_by_the_speed_of_prefill() -> None:
    assert starts("ttft")[0][0] == {"max_num_batched_tokens": 8192}
    assert starts("ttft", speed=10_000.0)[0][0] == {"max_num_batched_tokens": 2048}


def test_stalls_start_where_inter_token_latency_does() -> None:
    assert [flags for flags, _ in starts("stall")] == [flags for flags, _ in starts("itl")]
