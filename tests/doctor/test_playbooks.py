"""Every playbook: the schema holds, the rule fires on its symptom, and is silent beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.playbook import PlaybookError, check_together, load_all, parse_playbook
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import Scrapes
from servers.flags.known_flags import FLAG_NAMES

BASE = Server()
LONG = {
    "itl": {0.03: 970, 1.5: 30},
    "prefill_length": {100.0: 9, 4000.0: 1},
    "prompt_length": {100.0: 9, 4000.0: 1},
    "prefill_time": {0.1: 9, 1.5: 1},
}
MIXED = {
    "prefill_length": {100.0: 270, 4000.0: 30},
    "prompt_length": {100.0: 270, 4000.0: 30},
}
QUEUE = {"queue_time": {8.0: 10}, "ttft": {8.1: 10}}
SPECULATING = {"drafts": 1000, "draft_tokens": 5000, "accepted_tokens": 200}


@dataclass(frozen=True)
class Case:
    """A server with the symptom, and one that is near it and has another or none."""

    firing: Server
    quiet: Server
    flags: Mapping[str, Any] = field(default_factory=dict)
    quiet_flags: Mapping[str, Any] | None = None
    """The quiet server's own flags, where it has others."""
    assume: Mapping[str, float] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "itl-spikes-long-prefill": Case(
        replace(BASE, histograms=LONG),
        # As high and as rare, but the prompts are short: no chunk size makes such a spike smaller.
        replace(BASE, histograms={"itl": {0.03: 970, 1.5: 30}}),
    ),
    "seq-cap": Case(
        replace(BASE, running=4, waiting=12, kv=0.1, histograms=QUEUE),
        # The same picture with slow steps is overload.
        replace(BASE, running=4, waiting=12, kv=0.1, histograms={**QUEUE, "itl": {0.35: 1000}}),
        flags={"max_num_seqs": 4},
    ),
    "overload": Case(
        replace(BASE, running=128, waiting=lambda t: 150 * t, histograms={**QUEUE, "itl": {0.35: 1000}}),
        replace(BASE, running=128, waiting=lambda t: 40 * (t > 0.9), histograms={"itl": {0.09: 1000}}),
    ),
    "prefill-slow": Case(
        replace(
            BASE,
            running=1,
            histograms={
                "ttft": {6.0: 10},
                "prefill_time": {5.9: 10},
                "prefill_length": {3000.0: 10},
                "prompt_length": {3000.0: 10},
            },
        ),
        # A burst of short prompts that share a step: slow first tokens, but no prompt is cut.
        replace(BASE, histograms={"ttft": {3.0: 10}, "prefill_time": {2.0: 10}}),
        flags={"max_num_batched_tokens": 64},
        quiet_flags={"max_num_batched_tokens": 2048},
    ),
    "kv-pressure": Case(
        replace(BASE, kv=0.98, running=lambda t: 16 - 8 * t, waiting=lambda t: 8 * t),
        replace(BASE, kv=1.0, running=16),
    ),
    "kv-near-capacity": Case(replace(BASE, kv=1.0, running=16), replace(BASE, kv=lambda t: 0.5 + 0.5 * t)),
    "kv-idle": Case(
        replace(BASE, running=3, waiting=6, kv=0.05, histograms={**QUEUE, "prefill_time": {4.0: 10}}),
        replace(BASE, running=3, kv=0.05),
        flags={"max_num_seqs": 64, "max_num_batched_tokens": 256},
    ),
    "prefix-misses": Case(
        replace(BASE, histograms={"prompt_length": {1200.0: 10}, "prefill_length": {1200.0: 10}}),
        replace(
            BASE,
            counters={"prefix_queries": 12000, "prefix_hits": 9600},
            histograms={"prompt_length": {1200.0: 10}, "prefill_length": {240.0: 10}},
        ),
        assume={"shared_prefix": 1000.0},
    ),
    "speculation-loses": Case(
        replace(BASE, running=16, counters=SPECULATING),
        replace(BASE, running=4, counters={**SPECULATING, "accepted_tokens": 3000}),
    ),
    "speculation-preempts": Case(
        replace(
            BASE,
            running=64,
            kv=0.97,
            counters={**SPECULATING, "accepted_tokens": 4500, "preemptions": 2},
            config={"num_gpu_blocks": "501"},
        ),
        # The pool is so large that the drafts' slots cannot be the reason.
        replace(
            BASE, running=8, kv=0.97, counters={**SPECULATING, "accepted_tokens": 4500, "preemptions": 2}
        ),
    ),
    "client-disconnects": Case(
        replace(BASE, counters={"finished": 5}),
        # All of them finish, and the batch fills up meanwhile.
        replace(BASE, running=lambda t: 40 * t, counters={"finished": 9}),
    ),
    "itl-flat-high": Case(
        replace(BASE, running=64, histograms={"itl": {0.35: 1000}, "tpot": {0.35: 10}}),
        replace(BASE, running=64, histograms={"itl": {0.12: 1000}, "tpot": {0.12: 10}}),
    ),
    "short-behind-long": Case(
        replace(BASE, histograms={**LONG, "ttft": {0.2: 8, 4.0: 2}}),
        # Only the long prompts themselves are slow.
        replace(BASE, histograms={**LONG, "ttft": {0.2: 9, 4.0: 1}}),
    ),
    "oversized-max-model-len": Case(
        replace(BASE, histograms={"generation_length": {100.0: 10}}),
        replace(BASE, histograms={"generation_length": {9000.0: 10}}),
        flags={"max_model_len": 32768},
    ),
    "myth-fragmentation": Case(
        replace(BASE, running=64, kv=0.97, counters={"preemptions": 2}),
        replace(BASE, running=64, kv=0.97),
        flags={"gpu_memory_utilization": 0.85},
    ),
    "budget-eats-pool": Case(
        replace(BASE, running=64, kv=0.97, counters={"preemptions": 2}),
        # The prompts are so long that the budget is used.
        replace(
            BASE,
            running=64,
            kv=0.97,
            counters={"preemptions": 2},
            histograms={"prompt_length": {9000.0: 10}, "prefill_length": {9000.0: 10}},
        ),
        flags={"max_num_batched_tokens": 16384},
    ),
    "long-and-short-mixed": Case(
        replace(BASE, histograms={**MIXED, "ttft": {0.1: 270, 1.5: 30}}),
        # The short ones are as slow: it is not the order.
        replace(BASE, histograms={**MIXED, "ttft": {1.2: 270, 1.5: 30}}),
        flags={"max_num_batched_tokens": 2048},
    ),
    "ttft-slo-queue": Case(
        replace(BASE, running=64, waiting=15, kv=0.95, histograms=QUEUE),
        replace(BASE, running=64, waiting=5, kv=0.95, histograms=QUEUE),
    ),
}


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
    *("itl-spikes-outside-graphs", "invalid-measurement", "cold-requests"),
}
"""Need more than one server's metrics; test_other_sources.py has their cases."""


def examine(server: Server, flags: Mapping[str, Any], assume: Mapping[str, float]) -> Diagnosis:
    return diagnose(Scrapes(server.scrapes()), flags, assume=assume)


def test_every_playbook_but_the_fleet_one_has_a_case() -> None:
    judged = {book.id for book in load_all() if book.when.parts}
    assert CASES.keys() | {"replica-imbalance"} | SPECIAL == judged


@pytest.mark.parametrize("identity", CASES)
def test_fires_on_the_symptom(identity: str) -> None:
    case = CASES[identity]
    found = examine(case.firing, case.flags, case.assume)
    assert identity in [finding.id for finding in found.findings]


@pytest.mark.parametrize("identity", CASES)
def test_is_silent_beside_it(identity: str) -> None:
    case = CASES[identity]
    found = examine(case.quiet, case.flags if case.quiet_flags is None else case.quiet_flags, case.assume)
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
