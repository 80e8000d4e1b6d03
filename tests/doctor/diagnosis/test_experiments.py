"""How a page says that its symptom is brought about, and the load that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from doctor.diagnosis.experiment import (
    Experiment,
    ExperimentError,
    ExperimentSide,
    RequestStream,
    overlaid,
    read_reproduction,
)
from doctor.diagnosis.playbook import load_all, parse_playbook
from doctor.proof.experiment_load import describe_load, schedule
from doctor.proof.experiment_target import fleet_scrapes
from loadgen.measure.record import Records
from loadgen.plan.workload import Schedule
from loadgen.targets.simulated import SimulatedTarget

CHAT = {"name": "chat", "clients": 2, "prompt": 64, "output": [8, 16]}
PLAIN: dict[str, Any] = {"engine": {"max_num_seqs": 2}, "load": [CHAT]}


def only(value: Any) -> Experiment:
    (experiment,) = read_reproduction(value).experiments
    return experiment


@pytest.mark.parametrize("book", load_all(), ids=lambda book: book.id)
def test_every_page_has_an_experiment_or_says_why_not(book: Any) -> None:
    assert bool(book.reproduction.experiments) != bool(book.reproduction.why_none)
    assert "nobody has written" not in book.reproduction.why_none


@pytest.mark.parametrize("book", load_all(), ids=lambda book: book.id)
def test_an_experiment_tries_a_cure_of_its_page(book: Any) -> None:
    for experiment in book.reproduction.experiments:
        assert experiment.remedy is None or experiment.remedy < len(book.remedies)
        remedy = book.remedies[experiment.remedy or 0]
        typed = bool(remedy.settings or remedy.unset)
        assert typed or experiment.instead, "advice in words needs something that stands for it"
        assert book.expect or experiment.claims or experiment.folklore
        assert book.refutes or not experiment.folklore


def test_what_is_not_said_has_a_default() -> None:
    experiment = only(PLAIN)
    assert (experiment.target, experiment.model, experiment.simulated) == ("bundled", "bundled", False)
    assert experiment.sick == ExperimentSide(
        {"max_num_seqs": 2}, (RequestStream("chat", (64, 64), (8, 16), clients=2),)
    )


def test_the_cure_is_what_is_prescribed_over_what_stands_for_advice() -> None:
    experiment = only({**PLAIN, "instead": {"engine": {"block_size": 16}, "warmup": False}})
    cured = experiment.cured({"max_num_seqs": None, "max_num_batched_tokens": 512})
    assert cured.engine == {"block_size": 16, "max_num_batched_tokens": 512}
    assert (cured.warmup, cured.load) == (False, experiment.sick.load)


def test_the_time_before_differs_where_it_says_so() -> None:
    earlier = only({**PLAIN, "earlier": {"load": [{**CHAT, "clients": 1}]}}).earlier
    assert earlier is not None
    assert (earlier.engine, earlier.load[0].clients) == ({"max_num_seqs": 2}, 1)


def test_none_has_a_reason() -> None:
    assert read_reproduction("none, because it takes a GPU").why_none == "it takes a GPU"


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("none", "write an experiment, or 'none, because …'"),
        ([], "is empty"),
        ({"engine": {}}, "load: is missing"),
        ({**PLAIN, "machine": "x"}, "machine: unknown key; known: target"),
        ({**PLAIN, "target": "vllm"}, "target: write bundled, or simulated:h100"),
        ({**PLAIN, "seconds": 0}, "seconds: must be a number, 1 or more"),
        ({**PLAIN, "remedy": -1}, "remedy: must be a whole number"),
        ({**PLAIN, "replicas": 2}, "of a simulated device only"),
        ({**PLAIN, "routing": "best"}, "routing: must be one of"),
        ({**PLAIN, "claims": {"itl_p99": "better"}}, r"claims\.itl_p99: 'better' cannot be judged"),
        ({**PLAIN, "instead": {"lod": []}}, "lod: unknown key"),
        ({**PLAIN, "load": [{**CHAT, "rate": 2}]}, r"load\[0\]: needs either clients or a rate"),
        ({**PLAIN, "load": [{**CHAT, "prompt": [9, 3]}]}, r"prompt: write \[least, most\]"),
        ({**PLAIN, "load": [{**CHAT, "shared": 64}]}, "leave nothing of a prompt of 64"),
        ({**PLAIN, "load": [{"name": "x", "clients": 1, "prompt": 9}]}, r"load\[0\]\.output: is missing"),
    ],
)
def test_a_wrong_experiment_is_refused_with_key_and_cure(value: Any, complaint: str) -> None:
    with pytest.raises(ExperimentError, match=complaint):
        read_reproduction(value)


def test_a_page_names_its_file_in_the_complaint() -> None:
    page = (
        "---\nid: x\ntitle: T\nseverity: info\nwhen: [itl_p99 > 1]\nfor: 2m\nprescribe: [{do: a}]\n"
        "expect: {}\nreproduce: {engine: {}}\n---\nProse."
    )
    with pytest.raises(Exception, match=r"x\.md: reproduce: load: is missing"):
        parse_playbook(page, "x.md")


def made(*streams: Mapping[str, Any], seed: int = 1, warmup: bool = True) -> Schedule:
    side = overlaid(ExperimentSide(), {"load": list(streams)})
    return schedule(side.load, seed=seed, seconds=5.0, warmup=warmup)


def test_a_schedule_is_its_seed() -> None:
    assert made(CHAT).sha256 == made(CHAT).sha256 != made(CHAT, seed=2).sha256


def test_a_client_is_a_chain_of_requests() -> None:
    planned = made(CHAT, {"name": "long", "rate": 1, "even": True, "prompt": 900, "output": 4})
    assert [r.intended for r in planned.requests] == sorted(r.intended for r in planned.requests)
    assert [r.index for r in planned.requests] == list(range(len(planned.requests)))
    firsts = [r for r in planned.requests if r.cls == "chat" and r.follows is None]
    assert len(firsts) == 2
    for turn in planned.requests:
        if turn.follows is not None:
            before = planned.requests[turn.follows]
            assert (before.cls, before.intended) == ("chat", turn.intended)
    followed = [r.follows for r in planned.requests if r.follows is not None]
    assert len(set(followed)) == len(followed)


def test_prompts_share_what_they_should_behind_their_header() -> None:
    stream = {"name": "a", "rate": 4, "prompt": 50, "output": 1, "shared": 30, "header": 10, "groups": 2}
    prompts = [r.prompt_token_ids or () for r in made(stream).requests]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({prompt[10:40] for prompt in prompts}) == 2
    assert len({prompt[:10] for prompt in prompts}) == len(prompts)


def test_a_warm_up_knows_every_shared_part_and_may_be_left_out() -> None:
    stream = {"name": "a", "rate": 4, "prompt": 50, "output": 40, "shared": 30, "groups": 3}
    warm = made(stream).warmup
    assert len({(r.prompt_token_ids or ())[:30] for r in warm}) == 3
    assert [r.index for r in warm] == [-1, -2, -3]
    assert made(stream, warmup=False).warmup == ()


def test_a_stream_is_described_in_words() -> None:
    (stream,) = overlaid(ExperimentSide(), {"load": [{**CHAT, "shared": 20, "header": 5}]}).load
    assert describe_load(stream) == "2 clients of chat (64 in, 8-16 out, 20 shared behind a header of 5)"


def test_a_fleet_is_scraped_as_one_page_with_instances(small_fleet: tuple[Records, ...]) -> None:
    pages = fleet_scrapes(small_fleet)
    assert len(pages) >= 2
    for _, text in pages:
        for name in ("replica-0", "replica-1"):
            assert f'vllm:num_requests_running{{instance="{name}",engine="0",model_name=' in text


@pytest.fixture
def small_fleet() -> tuple[Records, ...]:
    """Two replicas, of which one never gets a request."""
    from doctor.proof.experiment_target import packaged

    target = SimulatedTarget("simulated:h100", packaged("shape", "8b"), replicas=2, routing="length-pooled")
    with target.open({}) as fleet:
        fleet.run(made({"name": "a", "rate": 4, "prompt": 50, "output": 20}))
        return fleet.parts
