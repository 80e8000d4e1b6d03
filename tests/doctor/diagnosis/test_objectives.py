"""Every objective is judged by a measured figure, and only who holds them all is healthy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from playbook_cases import BASE
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.objective_judgement import ObjectiveJudgement
from doctor.metrics.sources import Scrapes
from doctor.output.report import as_text


def judged(server: Server, slo: str | None = None) -> tuple[Diagnosis, dict[str, ObjectiveJudgement]]:
    found = diagnose(Scrapes(server.scrapes()), {}, slo)
    return found, {one.bound.metric: one for one in found.objectives}


def slow_first_tokens(seconds: float) -> Server:
    return replace(BASE, histograms={"ttft": {seconds: 10}})


def test_the_defaults_are_judged_and_printed_where_nothing_is_found() -> None:
    found, seen = judged(BASE)
    assert found.healthy
    assert {name: (one.held, one.origin) for name, one in seen.items()} == {
        "itl_p99": (True, "default"),
        "ttft_p95": (True, "default"),
    }
    assert "ITL P99 < 200 ms (default): held, 50 ms" in as_text(found)


@pytest.mark.parametrize(
    ("slo", "held"),
    [
        ("ttft_p50<1s", False),
        ("ttft_p90<1s", False),
        ("ttft_mean<6100ms", True),
        ("ttft_mean<5900ms", False),
        ("tpot_p99<50ms", True),
        ("tpot_mean<20ms", False),
        ("e2e_p95<1s", False),
        ("e2e_p95<10s", True),
        ("itl_p95<10ms", False),
        ("throughput>100", True),
        ("request_rate>1", True),
    ],
)
def test_each_objective_is_judged_by_its_own_figure(slo: str, held: bool) -> None:
    found, (one,) = (result := judged(slow_first_tokens(6.0), slo))[0], result[1].values()
    assert (one.held, one.origin) == (held, slo.replace("6100ms", "6.1s").replace("5900ms", "5.9s"))
    assert found.healthy is held


@pytest.mark.parametrize(
    ("limit", "held"), [("1s", False), ("2.5s", True), ("2.45s", True), ("2.4s", None), ("1.1s", None)]
)
def test_a_limit_inside_the_bucket_of_its_figure_decides_only_on_the_near_side(
    limit: str, held: bool | None
) -> None:
    """All first tokens come after 1.2 s; the bucket is 1 to 2.5 s, and P95 is interpolated to 2.425 s."""
    found, (one,) = (result := judged(slow_first_tokens(1.2), f"ttft_p95<{limit}"))[0], result[1].values()
    assert (one.held, one.bucket) == (held, (1.0, 2.5))
    assert found.healthy is bool(held)
    assert ("its bucket is 1 s to 2.5 s" in as_text(found)) is (limit not in ("1s", "2.5s"))


@pytest.mark.parametrize("slo", ["throughput>1000", "request_rate>9"])
def test_a_rate_is_missed_only_while_requests_wait(slo: str) -> None:
    alone, (one,) = (result := judged(BASE, slo))[0], result[1].values()
    assert (one.held, one.excused, alone.healthy) == (None, True, True)
    assert "no request waited" in as_text(alone)
    queued, (one,) = (result := judged(replace(BASE, waiting=4), slo))[0], result[1].values()
    assert (one.held, queued.healthy) == (False, False)


def test_what_only_a_client_measures_is_said_and_keeps_the_server_from_being_healthy() -> None:
    found, (one,) = (result := judged(BASE, "max_stall_p99<1s"))[0], result[1].values()
    assert (one.held, found.healthy) == (None, False)
    assert "longest gap P99 < 1 s (yours): not judged, only a client can measure it" in as_text(found)


def test_a_decode_window_without_first_tokens_is_no_fault_and_one_without_tokens_is() -> None:
    quiet = {"ttft": {0.1: 0}}
    decoding, seen = judged(replace(BASE, histograms=quiet))
    assert (seen["ttft_p95"].held, seen["ttft_p95"].excused) == (None, True)
    assert decoding.healthy
    stuck, seen = judged(replace(BASE, histograms=quiet, counters={"generation_tokens": 0}))
    assert (seen["ttft_p95"].held, seen["ttft_p95"].excused) == (None, False)
    assert not stuck.healthy


def test_of_a_fleet_the_engine_furthest_from_the_objective_is_shown() -> None:
    pages = [
        replace(
            slow_first_tokens(seconds), labels={"engine": "0", "model_name": "m", "instance": name}
        ).scrapes()
        for name, seconds in (("a:1", 0.1), ("b:1", 4.0), ("c:1", 9.0))
    ]
    merged = [(parts[0][0], "".join(text for _, text in parts)) for parts in zip(*pages, strict=True)]
    text = as_text(diagnose(Scrapes(merged), {}))
    assert "TTFT P95 < 2 s (default): MISSED on 2 of 3 engines (9.88 s on c:1); held on 1 of 3" in text


AS_REPORTED = Server(
    running=2,
    kv=0.1,
    histograms={
        "itl": {0.03: 245},
        "tpot": {0.03: 5},
        "queue_time": {0.001: 5},
        "decode_time": {1.47: 5},
    },
)
"""What people wrote about, rebuilt: a slow first token, or slow gaps, and nothing that waits."""


def reported(**histograms: dict[float, float]) -> Server:
    return replace(AS_REPORTED, histograms={**AS_REPORTED.histograms, **histograms})


def lengths(tokens: float) -> dict[str, dict[float, float]]:
    return {"prompt_length": {tokens: 5}, "prefill_length": {tokens: 5}}


REPORTS = {
    "prompts of 900 tokens that take 6 s": (
        reported(ttft={6.0: 5}, prefill_time={5.9: 5}, e2e={7.47: 5}, **lengths(900.0)),
        "ttft-missed",
        "Objective missed: the time to the first token, most of which is prefill (cause not found)",
        "5.9 s are prefill",
    ),
    "a front end of nearly 5 s": (
        reported(ttft={6.0: 5}, prefill_time={1.2: 5}, e2e={7.47: 5}, **lengths(3000.0)),
        "front-end-slow",
        "Most of the time to the first token passes outside the engine, in the front end",
        "--api-server-count 2",
    ),
    "half explained by nothing": (
        reported(ttft={8.0: 5}, queue_time={0.2: 5}, prefill_time={0.5: 5}, e2e={9.47: 5}, **lengths(500.0)),
        "front-end-slow",
        "Most of the time to the first token passes outside the engine, in the front end",
        "queue and prefill take 700 ms of a request's time, 7,300 ms pass outside",
    ),
    "gaps longer than any prompt takes": (
        reported(
            itl={0.018: 950, 0.95: 50},
            ttft={0.3: 5},
            prefill_time={0.25: 5},
            e2e={13.0: 5},
            decode_time={12.7: 5},
            **lengths(300.0),
        ),
        "itl-missed",
        "Objective missed: the pace of tokens; single gaps longer than a prompt's prefill takes "
        "(cause not found)",
        "prompts do not explain gaps this long",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_missed_objective_says_where_the_time_went(name: str) -> None:
    server, identity, title, words = REPORTS[name]
    flags = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    found = diagnose(Scrapes(server.scrapes()), flags, "itl_p99<100ms,ttft_p95<1s")
    first = found.findings[0]
    assert (first.id, first.title, found.worst(), found.healthy) == (identity, title, "warning", False)
    assert words in as_text(found)


@pytest.mark.parametrize(
    ("queue", "prefill", "outside", "place"),
    [(5.0, 0.4, 0.6, "queueing"), (0.4, 5.0, 0.6, "prefill"), (2.0, 1.9, 2.1, "passes outside the engine")],
)
def test_the_largest_part_of_the_time_to_the_first_token_is_named(
    queue: float, prefill: float, outside: float, place: str
) -> None:
    first = queue + prefill + outside
    server = reported(
        ttft={first: 5}, queue_time={queue: 5}, prefill_time={prefill: 5}, e2e={first + 1.47: 5}
    )
    found = diagnose(Scrapes(server.scrapes()), {}, "ttft_p95<1s")
    (finding,) = [one for one in found.findings if one.id == "ttft-missed"]
    assert f"most of which {'is ' if place != 'passes outside the engine' else ''}{place}" in finding.title


def test_a_growing_queue_is_not_taken_for_a_slow_front_end() -> None:
    """First tokens are of later requests than those that finished: they waited longer."""
    server = reported(ttft={9.0: 5}, queue_time={4.0: 5}, prefill_time={0.5: 5}, e2e={5.97: 5})
    found = diagnose(Scrapes(server.scrapes()), {}, "ttft_p95<1s")
    assert "front-end-slow" not in [one.id for one in found.findings]


def test_a_server_without_the_parts_still_has_its_miss_found() -> None:
    pages = [
        (at, "\n".join(line for line in page.splitlines() if "request_" not in line) + "\n")
        for at, page in reported(ttft={6.0: 5}).scrapes()
    ]
    found = diagnose(Scrapes(pages), {}, "ttft_p95<1s")
    assert "Objective missed: the time to the first token (cause not found)" in [
        one.title for one in found.findings
    ]


def test_a_cause_that_is_found_explains_the_miss() -> None:
    capped = replace(
        BASE, running=2, waiting=9, kv=0.02, histograms={"ttft": {8.0: 10}, "queue_time": {7.8: 10}}
    )
    found = diagnose(Scrapes(capped.scrapes()), {"max_num_seqs": 2})
    seen = {one.id: one for one in found.findings}
    assert seen["ttft-missed"].suppressed_by == "seq-cap"
    assert "cause not found" not in seen["ttft-missed"].title
