"""Every playbook: the schema holds, the rule fires on its symptom, and is silent beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from playbook_cases import BASE, CASES, LONG, Case
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.playbook import PlaybookError, check_together, load_all, parse_playbook
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import Scrapes
from servers.known_flags import FLAG_NAMES

SPECIAL = {
    *(
        "scheduler-bound",
        "host-bound",
        "hardware-limit",
        "colocated",
        "slow-start",
        "baseline-shift",
        "model-changed",
    ),
    *("engine-died", "hung-step", "link-errors", "crash-loop"),
    *("itl-spikes-outside-graphs", "invalid-measurement", "cold-requests"),
}
"""Need more than one server's metrics; test_other_sources.py and test_incidents.py have their cases."""


def examine(server: Server, flags: Mapping[str, Any], case: Case) -> Diagnosis:
    return diagnose(Scrapes(server.scrapes()), flags, case.slo, assume=case.assume)


def test_every_playbook_but_the_fleet_one_has_a_case() -> None:
    judged = {book.id for book in load_all() if book.when.parts}
    assert CASES.keys() | {"replica-imbalance"} | SPECIAL == judged


@pytest.mark.parametrize("identity", CASES)
def test_fires_on_the_symptom(identity: str) -> None:
    case = CASES[identity]
    found = examine(case.firing, case.flags, case)
    assert identity in [finding.id for finding in found.findings]


@pytest.mark.parametrize("identity", CASES)
def test_is_silent_beside_it(identity: str) -> None:
    case = CASES[identity]
    found = examine(case.quiet, case.flags if case.quiet_flags is None else case.quiet_flags, case)
    assert identity not in [finding.id for finding in found.findings]
    assert identity not in [item.id for item in found.cannot_tell]


def test_a_busy_healthy_server_has_no_finding() -> None:
    found = diagnose(Scrapes(BASE.scrapes()), {})
    assert (found.findings, found.healthy, found.idle) == ((), True, False)


def test_an_idle_server_is_idle_and_healthy() -> None:
    nothing = {key: dict.fromkeys(observed, 0.0) for key, observed in LONG.items()}
    quiet = replace(
        BASE,
        running=0,
        kv=0,
        counters=dict.fromkeys(["finished", "prompt_tokens", "generation_tokens", "prefix_queries"], 0),
        histograms={
            **nothing,
            "ttft": {0.1: 0},
            "tpot": {0.1: 0},
            "e2e": {1: 0},
            "queue_time": {0: 0},
            "decode_time": {1: 0},
        },
    )
    found = diagnose(Scrapes(quiet.scrapes()), {})
    assert (found.findings, found.healthy, found.idle) == ((), True, True)
    assert {item.id for item in found.cannot_tell} <= {"prefix-misses", *SPECIAL}


def test_one_replica_with_all_the_load_is_named() -> None:
    pages = [
        replace(BASE, running=load, labels={"engine": "0", "model_name": "m", "instance": name}).scrapes()
        for name, load in (("a:1", 2), ("b:1", 2), ("c:1", 40))
    ]
    merged = [(parts[0][0], "".join(text for _, text in parts)) for parts in zip(*pages, strict=True)]
    found = diagnose(Scrapes(merged), {})
    assert [(f.id, f.instance) for f in found.findings] == [("replica-imbalance", "c:1")]


@pytest.mark.parametrize("book", load_all(), ids=lambda book: book.id)
def test_prose_says_what_why_when_not_and_from_where(book: Any) -> None:
    headings = re.findall(r"^## (.+)$", book.prose, re.MULTILINE)
    assert headings == ["What goes on", "Why the fix works", "When it does not", "Sources"]
    assert book.remedies


def test_a_signal_no_name_of_which_clashes_with_a_flag() -> None:
    assert not SIGNALS.keys() & FLAG_NAMES


VALID = """---
id: x
title: T
severity: warning
when:
  - itl_p99 > 4 * itl_p50
for: 2m
cost: waiting_mean
prescribe:
  - do: something
expect: {itl_p99: "-50%"}
---
Prose.
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("id: x", "id: y", r"x\.md: id: is 'y', but the file is x\.md"),
        ("title: T\n", "", r"x\.md: title: is missing"),
        ("severity: warning", "severity: bad", r"severity: must be one of info, warning, critical"),
        ("for: 2m", "for: soon", r"for: write a duration such as 2m"),
        ("itl_p99 > 4", "itl_p999 > 4", r"when\[0\]: unknown name 'itl_p999' \(did you mean 'itl_p99'\?\)"),
        ("itl_p99 > 4 * itl_p50", "itl_p99", r"when\[0\]: 'itl_p99': write one comparison"),
        ("4 * itl_p50", "abs(itl_p50)", r"when\[0\]: .*'abs\(itl_p50\)' is not allowed"),
        ("4 * itl_p50", "__import__('os').x", r"when\[0\]: .* is not allowed"),
        ("4 * itl_p50", "itl_p50 ** 9", r"when\[0\]: .* is not allowed"),
        ("> 4 *", "> > 4 *", r"when\[0\]: .*not an expression"),
        ("do: something", "set: {max_num_sequences: 4}", r"no flag 'max_num_sequences' \(did you mean"),
        ("do: something", "because: x", r"prescribe\[0\]: needs one of set, unset, do"),
        ("do: something", "undo: x", r"prescribe\[0\]\.undo: unknown key"),
        ('{itl_p99: "-50%"}', '{itl: "-50%"}', r"expect: no signal 'itl'"),
        ("for: 2m", "for: 2m\nextra: 1", r"extra: unknown key"),
        ("cost: waiting_mean\n", "", r"cost: is missing; say how many requests are held up"),
        ("cost: waiting_mean", "cost: {dollars: 1}", r"cost: write an expression, or {tokens: an exp"),
        ("cost: waiting_mean", "cost: {misplaced: x}", r"cost\.misplaced: unknown name 'x'"),
        ("title: T", "title: T\ntitles: [T]", r"titles\[0\]: write {if: a condition, title: text}"),
        ("title: T", "title: T\ntitles: [{if: x > 1, title: U}]", r"titles\[0\]\.if: unknown name 'x'"),
        ("cost: waiting_mean", "cost: waiting_men", r"cost: unknown name 'waiting_men'"),
        ("for: 2m", "for: [", r"front matter is not YAML"),
        ("---\nid", "id", r"must begin with front matter"),
        ("Prose.", "", r"prose: say below"),
        ("  - itl_p99 > 4 * itl_p50", "  - any: []", r"when\[0\]\.any: must name at least one"),
        ("  - itl_p99 > 4 * itl_p50", "  - 3", r"when\[0\]: write a comparison"),
    ],
)
def test_a_broken_playbook_is_refused_with_file_key_and_cure(old: str, new: str, complaint: str) -> None:
    assert parse_playbook(VALID, "x.md").id == "x"
    assert old in VALID
    with pytest.raises(PlaybookError, match=complaint):
        parse_playbook(VALID.replace(old, new, 1), "x.md")


def test_playbooks_that_explain_each_other_are_refused() -> None:
    first = parse_playbook(VALID.replace("for: 2m", "for: 2m\nexplains: [y]"), "x.md")
    second = parse_playbook(
        VALID.replace("id: x", "id: y").replace("for: 2m", "for: 2m\nexplains: [x]"), "y.md"
    )
    with pytest.raises(PlaybookError, match="leads back to itself"):
        check_together([first, second])
    with pytest.raises(PlaybookError, match="no playbook 'y'"):
        check_together([first])
