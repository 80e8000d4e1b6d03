"""A run whose prompts an earlier one left in the server's prefix cache."""

from dataclasses import replace

import numpy as np
import pytest
from recorded_exchange import record, records

from loadgen.measure.record import Records
from loadgen.measure.warm_cache import judge_cache
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.sharing import repeated_share
from loadgen.plan.workload import Message, Schedule, preset


def schedule(name: str = "random", seed: int = 1) -> Schedule:
    return preset(name, max_model_len=4096).schedule(seed=seed, arrival=ClosedLoop(4), num_requests=40)


def told(hits: float, queries: float = 12_400.0, verdict: str = "ok") -> Records:
    names = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
    pages = [
        "".join(f"{n} {70 + at * v}\n" for n, v in zip(names, (hits, queries), strict=True)) for at in (0, 1)
    ]
    run = records([record(k, k / 10) for k in range(100)])
    return replace(run, verdict=verdict, scrapes=tuple((1000 * n, page) for n, page in enumerate(pages)))


@pytest.mark.parametrize(
    ("hits", "shared", "before", "verdict"),
    [
        (11_904, 0.0, "ok", "warm_cache"),
        (11_904, 0.9, "ok", "ok"),
        (1200, 0.0, "ok", "ok"),
        (11_904, 0.0, "client_limited", "client_limited"),
        (11_904, 0.0, "server_saturated", "server_saturated"),
        (11_904, 0.0, "server_failing", "warm_cache"),
    ],
)
def test_hits_beyond_what_prompts_share_are_said(
    hits: float, shared: float, before: str, verdict: str
) -> None:
    judged = judge_cache(told(hits, verdict=before), shared)
    assert judged.verdict == verdict
    said = "11,904 of 12,400 prompt tokens were found in the prefix cache"
    assert any(said in reason for reason in judged.reasons) == (hits == 11_904 and shared == 0)


def test_a_server_that_does_not_tell_is_not_judged() -> None:
    assert judge_cache(replace(told(11_904), scrapes=()), 0.0).verdict == "ok"
    silent = replace(told(11_904), scrapes=((0, "up 1\n"), (1, "up 1\n")))
    assert judge_cache(silent, 0.0).verdict == "ok"
    assert judge_cache(told(0, queries=0), 0.0).verdict == "ok"


def test_what_prompts_share_is_counted_in_blocks_from_the_beginning() -> None:
    assert repeated_share(schedule()) == 0
    shared = schedule("shared-prefix")
    assert 0.5 < repeated_share(shared) < 1
    twice = replace(shared, requests=shared.requests * 2)
    assert repeated_share(twice) > repeated_share(shared)
    first = replace(schedule().requests[0], prompt_token_ids=None, prompt="a" * 640)
    other = replace(first, prompt="b" + "a" * 639)
    assert repeated_share(replace(schedule(), requests=(first, first), warmup=())) == 0.5
    assert repeated_share(replace(schedule(), requests=(first, other), warmup=())) == 0
    chat = replace(first, prompt=None, messages=(Message("user", "a" * 640),))
    assert repeated_share(replace(schedule(), requests=(chat, chat), warmup=())) == pytest.approx(
        0.5, abs=0.01
    )


def test_a_salted_schedule_is_one_load_of_which_no_cache_knows() -> None:
    plain = schedule("shared-prefix")
    salted = plain.salted(np.random.default_rng(1))
    assert salted.sha256 == plain.sha256
    assert repeated_share(salted) == pytest.approx(repeated_share(plain), abs=0.02)
    for before, after in zip(plain.requests, salted.requests, strict=True):
        assert before.prompt_token_ids[3:] == after.prompt_token_ids[3:]
        assert before.prompt_token_ids[:3] != after.prompt_token_ids[:3]
    both = replace(plain, requests=(*plain.requests, *salted.requests))
    again = replace(plain, requests=plain.requests * 2)
    assert repeated_share(both) < repeated_share(again)
    text = replace(plain, requests=(replace(plain.requests[0], prompt_token_ids=None, prompt="a"),))
    assert text.salted(np.random.default_rng(1)).requests == text.requests
