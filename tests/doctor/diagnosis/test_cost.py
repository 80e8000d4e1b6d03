"""Findings are ranked by what they cost the users, causes before consequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from synthetic_server import Server

from doctor.diagnosis.cost import Cost, CostUnit, Toll, total
from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.finding import Finding
from doctor.diagnosis.playbook import load_all
from doctor.metrics.sources import Scrapes
from doctor.output.report import as_text
from servers.expression import Lookup, parse_expression
from servers.reading import Missing, Number, Reading

VALUES = {"waiting_mean": 9.0, "request_rate": 3.0, "tpot_mean": 0.05, "itl_mean": 0.2}


def lookup(values: Mapping[str, float]) -> Lookup:
    def look(name: str) -> Reading:
        return Number.exactly(values[name]) if name in values else Missing(name, "metric", "gone")

    return look


def cost(text: str, values: Mapping[str, float], unit: CostUnit = "delay") -> Toll | None:
    return Cost(parse_expression(text), unit).of(lookup(values))


def test_requests_held_up_are_seconds_of_each() -> None:
    toll = cost("waiting_mean", VALUES)
    assert toll is not None
    assert (toll.delay, toll.per_request) == (9.0, 3.0)
    assert toll.words() == "Impact: about 3 s extra latency per request (9 requests delayed on average)"


def test_lost_tokens_hold_up_the_streams_that_would_have_had_them() -> None:
    toll = cost("40", VALUES, "tokens")
    assert toll == Toll(delay=2.0, rate=3.0, tokens=40.0)
    assert toll.words() == "Impact: about 40 output tokens per second lost"
    slower = {name: value for name, value in VALUES.items() if name != "tpot_mean"}
    assert cost("40", slower, "tokens") == Toll(delay=8.0, rate=3.0, tokens=40.0)
    assert cost("40", {}, "tokens") == Toll(delay=None, rate=None, tokens=40.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("waiting_mean - 20", None),
        ("0.005 * waiting_mean", None),
        ("waiting_mean / 9", "Impact: about 0.33 s extra latency per request (1 request delayed on average)"),
        ("waiting_max", None),
        ("1 / (waiting_mean - 9)", None),
    ],
    ids=["below nothing", "next to nothing", "one", "unknown", "infinite"],
)
def test_what_is_said_of_little_or_nothing(text: str, words: str | None) -> None:
    toll = cost(text, VALUES)
    assert (None if toll is None else toll.words()) == words


def test_without_a_rate_only_the_requests_are_counted() -> None:
    assert Toll(9.0).words() == "Impact: about 9 requests delayed on average"


def test_a_fleet_pays_for_all_its_engines() -> None:
    assert total([Toll(2.0, 1.0), None, Toll(4.0, 2.0)]) == Toll(6.0, 3.0, None)
    assert total([None]) is None


def test_whoever_is_to_be_warned_is_told_what_it_costs() -> None:
    assert all(book.cost for book in load_all() if book.severity != "info" and book.when.parts)


CAPPED = Server(running=2, waiting=9, kv=0.02)
SPIKY = replace(
    CAPPED,
    histograms={
        "itl": {0.03: 970, 1.5: 30},
        "prefill_length": {100.0: 9, 4000.0: 1},
        "prompt_length": {100.0: 9, 4000.0: 1},
    },
)


def ranked(server: Server) -> list[Finding]:
    return list(diagnose(Scrapes(server.scrapes()), {"max_num_seqs": 2}).findings)


def test_the_costlier_of_two_causes_comes_first() -> None:
    roots = [f for f in ranked(SPIKY) if f.suppressed_by is None]
    assert [f.id for f in roots][:2] == ["seq-cap", "itl-spikes-long-prefill"]
    many = replace(SPIKY, running=lambda t: 40.0, waiting=0)
    few = [f.id for f in ranked(many) if f.suppressed_by is None]
    assert few[0] == "itl-spikes-long-prefill"


def test_causes_come_before_consequences_whatever_these_cost() -> None:
    found = ranked(replace(CAPPED, waiting=12, histograms={"ttft": {8.0: 10}, "queue_time": {8.0: 10}}))
    assert found[0].id == "seq-cap"
    behind = [f for f in found if f.suppressed_by]
    assert {f.suppressed_by for f in behind} == {"seq-cap"}
    assert found[-len(behind) :] == behind


def test_the_report_says_what_it_costs_in_plain_words() -> None:
    text = as_text(diagnose(Scrapes(CAPPED.scrapes()), {"max_num_seqs": 2}))
    assert "Impact: about 3.6 s extra latency per request (9 requests delayed on average)" in text


def test_one_finding_on_many_engines_outranks_a_costlier_one_on_a_single_engine() -> None:
    labels = [{"engine": "0", "model_name": "m", "instance": f"h{n}:8000"} for n in range(5)]
    slow = {"ttft": {6.0: 10}, "prefill_time": {5.9: 10}, "prefill_length": {3000.0: 10}}
    fleet = [replace(CAPPED, labels=own) for own in labels[:4]]
    fleet.append(
        replace(
            CAPPED,
            running=1,
            waiting=0,
            labels=labels[4],
            histograms={**slow, "prompt_length": {3000.0: 10}},
        )
    )
    pages = [server.scrapes() for server in fleet]
    merged = [(parts[0][0], "".join(page for _, page in parts)) for parts in zip(*pages, strict=True)]
    found = diagnose(Scrapes(merged), {"max_num_seqs": 2, "max_num_batched_tokens": 64})
    roots = [f for f in found.findings if f.suppressed_by is None]
    assert [f.id for f in roots[:4]] == ["seq-cap"] * 4
    alone = next(f for f in roots if f.id == "prefill-slow")
    assert alone.cost is not None
    assert roots[0].cost is not None
    assert alone.cost > roots[0].cost
