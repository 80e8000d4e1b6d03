from collections import Counter
from typing import Any

import pytest

from loadgen.plan.workload import preset, schedule_hash
from tuner.runs.load import DECK_REQUESTS, GeneratedLoad, capacity_schedule, load_seconds, lone_schedule

MIXED = preset("mixed", max_model_len=8192)


def load(seconds: float = 20.0, **kwargs: Any) -> GeneratedLoad:
    return GeneratedLoad(MIXED, seed=3, seconds=seconds, **kwargs)


def test_an_open_run_is_whole_decks_of_requests() -> None:
    slow = load(rate=0.5)
    (whole,) = slow.rungs()
    assert len(whole.requests) == DECK_REQUESTS
    assert slow.run_seconds == DECK_REQUESTS / 0.5
    classes = Counter(r.cls for r in whole.requests)
    assert classes == {"short": 16, "rag": 3, "background": 1}
    assert len(load(rate=5.0).confirmation(1).requests) == 100


def test_a_run_that_is_too_short_to_be_cut_is_what_a_confirmation_would_send() -> None:
    """Parts of a few seconds begin with an idle server and see less of a queue than a whole run."""
    for traffic in (load(rate=2.0), load(concurrency=4)):
        (whole,) = traffic.rungs()
        assert whole.seed is not None
        assert whole == traffic.confirmation(whole.seed)
    parts = [len(load(seconds, concurrency=4).rungs()) for seconds in (74.9, 75.0)]
    assert parts == [1, 2]


def test_the_rungs_are_one_schedule_cut_in_two() -> None:
    short, rest = load(80.0, rate=2.0).rungs()
    assert rest.requests[0].intended == 0.0
    assert rest.warmup == ()
    assert short.warmup
    assert load_seconds(short) < load_seconds(rest)
    assert rest.requests[0].index == short.requests[-1].index + 1
    for part in (short, rest):
        assert part.sha256 == schedule_hash(part.requests, part.mode, part.concurrency, part.duration)


def test_trials_share_their_requests_and_confirmations_have_others() -> None:
    assert load(rate=2.0).rungs() == load(rate=2.0).rungs()
    seeds = load(rate=2.0).confirmation_seeds(4)
    hashes = {load(rate=2.0).confirmation(seed).sha256 for seed in seeds}
    hashes |= {part.sha256 for part in load(rate=2.0).rungs()}
    assert len(hashes) == 4 + 1


def test_another_seed_is_another_load() -> None:
    other = GeneratedLoad(MIXED, seed=4, seconds=20.0, rate=2.0)
    assert not {s.sha256 for s in other.rungs()} & {s.sha256 for s in load(rate=2.0).rungs()}


def test_a_closed_loop_runs_for_its_time() -> None:
    short, rest = load(100.0, concurrency=4).rungs()
    assert (short.mode, short.concurrency) == ("closed", 4)
    assert load_seconds(short) + load_seconds(rest) == pytest.approx(100.0)
    assert "closed loop" in load(concurrency=4).description


def test_probes() -> None:
    burst = capacity_schedule(MIXED, 0, 40, 16)
    assert (len(burst.requests), burst.mode, burst.concurrency) == (40, "closed", 16)
    lone = lone_schedule(32000, 1024, 16, 0)
    assert {len(r.prompt_token_ids) for r in lone.requests} == {1024}
    assert {r.max_tokens for r in lone.requests} == {16}
