"""Schedules: what is in them, that a seed fixes them, and that prompts share only what they should."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from loadgen.plan.arrivals import ClosedLoop, Constant, Poisson
from loadgen.plan.workload import (
    PRESETS,
    Length,
    RequestClass,
    Schedule,
    Workload,
    WorkloadError,
    preset,
)


def mixed(seed: int = 0, count: int = 200, rate: float = 5.0) -> Schedule:
    load = preset("mixed", max_model_len=8192, vocab_size=49152)
    return load.schedule(seed=seed, arrival=Poisson(rate), num_requests=count)


def test_the_mixed_preset_is_the_three_classes_at_a_stated_scale() -> None:
    load = preset("mixed", max_model_len=8192)
    lengths = {cls.name: (cls.weight, cls.prompt.mean, cls.output.mean, cls.priority) for cls in load.classes}
    assert lengths == {"short": (80, 25, 50, 0), "rag": (15, 2000, 200, 1), "background": (5, 5000, 100, 2)}
    assert "prompts scaled x0.25 (context 8192)" in load.description


def test_a_large_context_needs_no_scaling() -> None:
    load = preset("mixed", max_model_len=131072)
    assert [cls.prompt.mean for cls in load.classes] == [100, 8000, 20000]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("context", [512, 2048, 8192, 131072])
def test_every_preset_fits_every_context(name: str, context: int) -> None:
    schedule = preset(name, max_model_len=context).schedule(seed=3, arrival=ClosedLoop(2), num_requests=40)
    for request in schedule.requests + schedule.warmup:
        assert request.prompt_token_ids is not None
        assert len(request.prompt_token_ids) + request.max_tokens <= context


def test_classes_come_in_exact_shares() -> None:
    requests = mixed(count=200).requests
    for start in range(0, 200, 20):
        assert Counter(r.cls for r in requests[start : start + 20]) == {
            "short": 16,
            "rag": 3,
            "background": 1,
        }
    orders = {tuple(r.cls for r in requests[start : start + 20]) for start in range(0, 200, 20)}
    assert len(orders) > 5


def test_shares_that_fill_no_deck_come_right_over_several() -> None:
    classes = (RequestClass("a", 2, Length(10), Length(1)), RequestClass("b", 1, Length(10), Length(1)))
    schedule = Workload("w", classes).schedule(seed=0, arrival=Constant(1.0), num_requests=300)
    assert Counter(r.cls for r in schedule.requests) == {"a": 200, "b": 100}


def test_no_two_prompts_share_a_first_token() -> None:
    schedule = mixed()
    firsts = [r.prompt_token_ids[0] for r in schedule.requests + schedule.warmup if r.prompt_token_ids]
    assert len(set(firsts)) == len(firsts) == 203


def test_warm_up_comes_on_prompts_of_its_own_one_of_each_class() -> None:
    schedule = mixed()
    assert [r.cls for r in schedule.warmup] == ["short", "rag", "background"]
    assert [r.index for r in schedule.warmup] == [-1, -2, -3]
    assert max(r.max_tokens for r in schedule.warmup) <= 16


def test_a_shared_prefix_is_shared_and_nothing_after_it() -> None:
    load = preset("shared-prefix", max_model_len=8192)
    (cls,) = load.classes
    prompts = [
        r.prompt_token_ids for r in load.schedule(seed=1, arrival=Poisson(1.0), num_requests=30).requests
    ]
    assert cls.shared_prefix == 500
    assert len({prompt[:500] for prompt in prompts if prompt}) == 1
    assert len({prompt[500] for prompt in prompts if prompt}) == 30


def test_prefix_groups_have_prefixes_of_their_own() -> None:
    cls = RequestClass("p", 1, Length(40), Length(1), shared_prefix=32, prefix_groups=4)
    requests = Workload("w", (cls,)).schedule(seed=1, arrival=Poisson(1.0), num_requests=60).requests
    assert len({r.prompt_token_ids[:32] for r in requests if r.prompt_token_ids}) == 4


def test_tokens_stay_inside_the_vocabulary_and_off_its_ends() -> None:
    load = preset("random", max_model_len=512, vocab_size=1000, input_len=64, output_len=4)
    for request in load.schedule(seed=0, arrival=Poisson(1.0), num_requests=50).requests:
        assert request.prompt_token_ids is not None
        assert min(request.prompt_token_ids) >= 250
        assert max(request.prompt_token_ids) < 750


def test_more_requests_than_the_vocabulary_has_ids() -> None:
    load = preset("random", max_model_len=64, vocab_size=64, input_len=8, output_len=1)
    prompts = [
        r.prompt_token_ids for r in load.schedule(seed=0, arrival=Poisson(1.0), num_requests=90).requests
    ]
    assert len(set(prompts)) == 90


def test_the_hash_is_a_function_of_the_seed() -> None:
    assert mixed(1).sha256 == mixed(1).sha256
    assert mixed(1).sha256 != mixed(2).sha256
    assert mixed(1).sha256 != mixed(1, rate=6.0).sha256
    assert mixed(1).sha256 != mixed(1, count=199).sha256


def test_the_hash_is_the_same_in_another_process() -> None:
    """Nothing comes from ``hash(str)``, which is salted anew in every process."""
    program = (
        "from loadgen.plan.arrivals import Poisson; from loadgen.plan.workload import preset; "
        "load = preset('mixed', max_model_len=8192, vocab_size=49152); "
        "print(load.schedule(seed=4, arrival=Poisson(5.0), num_requests=200).sha256)"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == mixed(4).sha256


def test_the_rate_changes_the_times_and_nothing_else() -> None:
    slow, fast = mixed(1).requests, mixed(1, rate=50.0).requests
    assert [r.intended for r in slow] != [r.intended for r in fast]
    assert [(r.cls, r.prompt_token_ids, r.max_tokens) for r in slow] == [
        (r.cls, r.prompt_token_ids, r.max_tokens) for r in fast
    ]


def test_intended_times_rise() -> None:
    assert all(a.intended <= b.intended for a, b in pairwise(mixed().requests))


def test_modes() -> None:
    load = preset("chat", max_model_len=2048)
    assert load.schedule(seed=0, arrival=ClosedLoop(3), num_requests=9).mode == "closed"
    assert load.schedule(seed=0, arrival=Poisson(1.0), num_requests=9).mode == "open"
    capped = load.schedule(seed=0, arrival=Poisson(1.0), num_requests=9, max_concurrency=4)
    assert (capped.mode, capped.concurrency) == ("semi-open", 4)
    assert "semi-open" in capped.description


def test_a_timed_closed_loop_has_requests_enough_but_not_without_end() -> None:
    small = preset("random", max_model_len=4096, input_len=16, output_len=50)
    assert len(small.schedule(seed=0, arrival=ClosedLoop(4), duration=2.0).requests) == 4 * 2 * 10
    assert len(small.schedule(seed=0, arrival=ClosedLoop(4), duration=0.01).requests) == 4
    large = preset("random", max_model_len=131072, input_len=100_000, output_len=100)
    assert len(large.schedule(seed=0, arrival=ClosedLoop(4), duration=60.0).requests) == 20


def test_a_schedule_with_and_without_priorities_is_one_load() -> None:
    ranked = preset("mixed", max_model_len=8192).schedule(seed=0, arrival=Poisson(1.0), num_requests=40)
    plain = ranked.without_priorities()
    assert {r.priority for r in plain.requests + plain.warmup} == {0}
    assert {(r.cls, r.priority) for r in ranked.requests} == {("short", 0), ("rag", 1), ("background", 2)}
    assert plain.sha256 == ranked.sha256


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "nope", "max_model_len": 2048}, "mixed"),
        ({"name": "chat", "max_model_len": 20}, "too short"),
        ({"name": "random", "max_model_len": 256, "input_len": 250, "output_len": 50}, "exceed the context"),
        ({"name": "mixed", "max_model_len": 8192, "input_len": 5}, "several classes"),
        ({"name": "mixed", "max_model_len": 8192, "scale": 1.0}, "exceed the context of 8192"),
        ({"name": "chat", "max_model_len": 8192, "scale": -1.0}, "positive"),
        ({"name": "chat", "max_model_len": 8192, "vocab_size": 3}, "vocabulary"),
        ({"name": "chat", "max_model_len": 8192, "vocab_size": 10**11}, "no model has so many"),
    ],
)
def test_what_cannot_be_built_says_why(arguments: dict, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        preset(**arguments)


def test_a_schedule_without_a_request_is_refused() -> None:
    with pytest.raises(WorkloadError, match="gives no request"):
        preset("chat", max_model_len=2048).schedule(seed=0, arrival=Poisson(0.001), duration=0.5)


@pytest.mark.parametrize("extent", [{"num_requests": 10_000_000}, {"num_requests": 1, "warmup": 10_000_000}])
def test_a_schedule_that_would_not_fit_into_memory_is_refused(extent: dict) -> None:
    with pytest.raises(WorkloadError, match=r"more than the 100,000,000 that are planned at once"):
        preset("chat", max_model_len=8192).schedule(seed=0, arrival=Poisson(1.0), **extent)
