"""A fleet that is out of balance: who has far too much is named, and who gets far too little."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.sources import Scrapes
from doctor.output.report import as_text

MORE = "One instance carries far more load than its peers"
FEWER = "One instance gets far fewer requests than its peers"


@dataclass(frozen=True)
class Replica:
    """One instance: requests on it at any time, and first tokens between two scrapes."""

    name: str
    load: float
    requests: float
    joins: int = 0
    """The scrape from which on it is there."""
    restarts: int | None = None
    """The scrape before which its counters begin anew."""

    def page(self, number: int) -> str:
        done = number + 1 if self.restarts is None or number < self.restarts else number - self.restarts + 1
        labels = {"engine": "0", "model_name": "m", "instance": self.name}
        server = Server(
            running=self.load,
            counters={"finished": self.requests, "generation_tokens": 100 * self.requests},
            histograms={"ttft": {0.12: self.requests}},
            labels=labels,
        )
        return server.page(done, 0.0) if number >= self.joins else ""


def judged(fleet: Sequence[Replica], count: int = 16) -> Diagnosis:
    pages = [(4000 * (n + 1), "".join(replica.page(n) for replica in fleet)) for n in range(count)]
    return diagnose(Scrapes(pages), {})


def named(fleet: Sequence[Replica]) -> list[tuple[str, str]]:
    found = judged(fleet).findings
    assert {finding.id for finding in found} <= {"replica-imbalance"}
    return [(finding.instance, finding.title) for finding in found]


BUSY = [Replica("a:1", 12, 10), Replica("b:1", 12, 10)]


def test_the_starved_one_of_three_is_named_with_what_the_others_get() -> None:
    (finding,) = judged([*BUSY, Replica("c:1", 0.5, 0.5)]).findings
    assert (finding.id, finding.instance, finding.title) == ("replica-imbalance", "c:1", FEWER)
    seen = {item.signal: item.value for item in finding.evidence}
    assert (seen["peers_load"], seen["running_mean"]) == (pytest.approx(12), pytest.approx(0.5))
    assert (seen["peers_requests"], seen["first_tokens"]) == pytest.approx((150, 7.5), rel=0.01)
    first, second = finding.prescriptions
    assert first.text.startswith("check the router")
    assert second.text.startswith("see that the router knows this instance")


@pytest.mark.parametrize("hosts", [1, 2])
def test_no_router_is_blamed_for_the_ranks_of_one_server(hosts: int) -> None:
    """Two data-parallel ranks on each host: the first has nearly everything."""
    ranks = [
        Server(
            running=30 if host + rank == 0 else 2,
            labels={"engine": str(rank), "model_name": "m", "instance": f"h{host}:1"},
        ).scrapes()
        for host in range(hosts)
        for rank in range(2)
    ]
    pages = [(parts[0][0], "".join(text for _, text in parts)) for parts in zip(*ranks, strict=True)]
    found = diagnose(Scrapes(pages), {})
    (busiest,) = [finding for finding in found.findings if finding.title == MORE]
    assert busiest.labels == {"engine": "0", "model_name": "m", "instance": "h0:1"}
    advice = [step.text for step in busiest.prescriptions]
    assert [text.startswith("check the router") for text in advice] == [True, False][2 - hosts :]
    assert "--data-parallel-external-lb" in advice[-1]
    assert "data parallel ranks" not in as_text(found).splitlines()[-1]


def test_one_that_the_router_never_sends_anything_is_named() -> None:
    assert named([*BUSY, Replica("c:1", 0, 0)]) == [("c:1", FEWER)]


def test_of_two_instances_both_are_named_each_for_what_it_is() -> None:
    diagnosis = judged([Replica("a:1", 12, 10), Replica("b:1", 1, 1)])
    assert [(f.instance, f.title) for f in diagnosis.findings] == [("a:1", MORE), ("b:1", FEWER)]
    text = as_text(diagnosis)
    assert f"1. WARNING replica-imbalance: {MORE}\n   on a:1\n" in text
    assert f"2. WARNING replica-imbalance: {FEWER}\n   on b:1\n" in text
    assert "Impact: at least 5.5 requests on the wrong instance on average" in text


@pytest.mark.parametrize("starved", [1, 30])
def test_of_a_hundred_instances_the_starved_ones_are_named_and_no_other(starved: int) -> None:
    fleet = [
        Replica(f"h{n:02}:1", *((0.2, 0.5) if n < starved else (10 + n % 2, 20 + 3 * (n % 2))))
        for n in range(100)
    ]
    diagnosis = judged(fleet, count=3)
    found = {(finding.instance, finding.title) for finding in diagnosis.findings}
    assert found == {(f"h{n:02}:1", FEWER) for n in range(starved)}
    if starved > 1:
        assert "on h00:1 and 29 more: " in as_text(diagnosis)


@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param([Replica("a:1", 3, 10), Replica("b:1", 0, 0)], id="low load: an idle one is no fault"),
        pytest.param([Replica("a:1", 3, 3), Replica("b:1", 2, 2), Replica("c:1", 0, 0)], id="of three"),
        pytest.param([*BUSY, Replica("c:1", 0, 0, joins=12)], id="it has just been added"),
        pytest.param([*BUSY, Replica("c:1", 1, 2, restarts=8)], id="it was restarted"),
        pytest.param([*BUSY, Replica("c:1", 10, 2)], id="few requests, but long ones"),
        pytest.param([*BUSY, Replica("c:1", 4, 9)], id="as many requests, on a faster device"),
        pytest.param([*BUSY, Replica("c:1", 8, 5)], id="half as many is not far from it"),
        pytest.param([Replica("a:1", 9, 1), Replica("b:1", 9, 1), Replica("c:1", 2, 0)], id="too few to say"),
        pytest.param([Replica("a:1", 12, 10)], id="alone"),
    ],
)
def test_nobody_is_named(fleet: Sequence[Replica]) -> None:
    assert named(fleet) == []


def test_alone_it_is_neither_found_nor_undecided() -> None:
    page = Server().scrapes()
    without = [(at, text.replace("vllm:time_to_first_token", "other:ttft")) for at, text in page]
    for pages in (page, without):
        assert "replica-imbalance" not in {item.id for item in diagnose(Scrapes(pages), {}).cannot_tell}


@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_instances_behind_a_random_router_are_not_said_to_be_starved(seed: int) -> None:
    """Forty requests each, on average, by chance alone."""
    chance = random.Random(seed)
    counts = [0] * 100
    for _ in range(4000):
        counts[chance.randrange(100)] += 1
    fleet = [Replica(f"h{n:02}:1", count / 8, count / 2) for n, count in enumerate(counts)]
    diagnosis = judged(fleet, count=3)
    assert FEWER not in {finding.title for finding in diagnosis.findings}
    assert "replica-imbalance" not in {item.id for item in diagnosis.cannot_tell}


def test_nobody_is_compared_with_the_few_who_say_how_they_are() -> None:
    """Of three instances one does not say; beside the other, an ordinary one would look overloaded."""
    fleet = [*BUSY, Replica("c:1", 0.2, 0.2)]
    pages = [(4000 * (n + 1), "".join(replica.page(n) for replica in fleet)) for n in range(9)]
    silent = [
        (
            at,
            "".join(line for line in page.splitlines(True) if '"a:1"' not in line or "requests_" not in line),
        )
        for at, page in pages
    ]
    found = diagnose(Scrapes(silent), {})
    assert found.findings == ()
    why = {missing.why for item in found.cannot_tell for missing in item.missing}
    assert "not known of 1 of 3 instances" in why
