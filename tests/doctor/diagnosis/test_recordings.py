"""A real server in known trouble: the true cause comes first or second, and a healthy one is left alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from recordings import TRUTH, log_path, meta, needs_recordings, scrapes, series_path

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.log_source import LogSource
from doctor.metrics.sources import Scrapes, SeriesFile
from servers.command import parse_command
from servers.server_log import read_log

pytestmark = needs_recordings

KNOWLEDGE = ("nothing", "flags", "log")


@cache
def examine(name: str, knowledge: str = "flags", slo: str | None = None, shared: float = 1000.0) -> Diagnosis:
    """Diagnose a recording, knowing the server's flags from its command line, from its log, or not at all."""
    options: dict[str, Any] = {"slo": slo}
    if knowledge == "flags":
        options["flags"] = parse_command(meta(name)["server_cmd"]).flags
    elif knowledge == "log":
        options["log"] = read_log(log_path(name))
    if name == "prefix-unshared" and shared:
        options["assume"] = {"shared_prefix": shared}
    return diagnose(SeriesFile(series_path(name)), **options)


def arguments(diagnosis: Diagnosis, identity: str) -> list[str]:
    (finding,) = [finding for finding in diagnosis.findings if finding.id == identity]
    return [prescription.args for prescription in finding.prescriptions]


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("name", [name for name, cause in TRUTH.items() if cause])
def test_the_true_cause_is_found(name: str, knowledge: str) -> None:
    found = examine(name, knowledge)
    assert TRUTH[name] in [finding.id for finding in found.findings[:2]]
    assert found.findings[0].suppressed_by is None
    assert not found.healthy


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("name", [name for name, cause in TRUTH.items() if cause is None])
def test_a_healthy_server_is_called_healthy(name: str, knowledge: str) -> None:
    found = examine(name, knowledge, slo="itl_p99<300ms,ttft_p95<5s")
    assert (found.findings, found.healthy, found.worst()) == ((), True, None)
    assert all(judged.held for judged in found.objectives)


def test_unshared_prefixes_cannot_be_told_from_metrics_alone() -> None:
    alone = examine("prefix-unshared", shared=0)
    assert "prefix-misses" not in [finding.id for finding in alone.findings]
    (reason,) = [item for item in alone.cannot_tell if item.id == "prefix-misses"]
    assert [(missing.name, missing.kind) for missing in reason.missing] == [("shared_prefix", "assumption")]
    told = examine("prefix-unshared")
    assert told.findings[0].id == "prefix-misses"
    assert {f.suppressed_by for f in told.findings[1:]} == {"prefix-misses"}


def test_small_chunks_are_fine_for_whoever_grants_them_a_second() -> None:
    found = examine("long-prefill-small-chunks", slo="itl_p99<1s")
    assert (found.findings, found.healthy) == ((), True)


def test_prescriptions_are_computed_from_the_current_flags() -> None:
    spikes = arguments(examine("long-prefill-itl-spikes"), "itl-spikes-long-prefill")
    assert spikes[:2] == ["--max-num-batched-tokens 256", "--long-prefill-token-threshold 128"]
    assert arguments(examine("seq-cap"), "seq-cap") == ["--max-num-seqs 16"]
    assert arguments(examine("kv-starved"), "kv-pressure")[0] == "drop --num-gpu-blocks-override"
    assert arguments(examine("spec-ngram-bad"), "speculation-loses")[0] == "drop --speculative-config"
    assert arguments(examine("small-budget-ttft"), "prefill-slow")[0] == "--max-num-batched-tokens 512"


def test_a_budget_at_its_floor_is_not_lowered_further() -> None:
    args = arguments(examine("long-prefill-small-chunks"), "itl-spikes-long-prefill")
    assert not any("--max-num-batched-tokens" in arg for arg in args)


def test_a_guessed_flag_is_called_guessed() -> None:
    found = examine("small-budget-ttft", "nothing")
    last = found.findings[0].prescriptions[-1]  # on the guess itself its condition does not hold
    assert last.uncertain == {"max_num_batched_tokens": "guessed"}
    assert "only if max_num_batched_tokens <" in last.text
    flag = found.findings[0].flags["max_num_batched_tokens"]
    assert (flag.value, flag.origin) == (2048, "guessed")


def test_the_sequence_cap_is_inferred_where_nobody_states_it() -> None:
    flag = examine("seq-cap", "nothing").findings[0].flags["max_num_seqs"]
    assert (flag.value, flag.origin) == (2, "inferred")


@pytest.mark.parametrize(("flags", "status"), [("flags", "verified"), ("nothing", "not verified")])
def test_a_cure_is_verified_where_its_flags_are_stated(flags: str, status: str) -> None:
    """Its proof says nothing of a value that was computed from an inferred cap."""
    wider = examine("seq-cap", flags).findings[0].prescriptions[0]
    assert (wider.args.split()[0], wider.verification) == ("--max-num-seqs", status)


def test_every_figure_comes_with_its_query() -> None:
    for evidence in examine("overload").findings[0].evidence:
        assert "vllm:" in evidence.query
        assert "[" in evidence.query


def test_a_quantile_beyond_the_last_bucket_is_called_a_bound() -> None:
    evidence = {e.signal: e for e in examine("long-prefill-itl-spikes").findings[0].evidence}
    assert evidence["prefill_tokens_p99"].note == "at least 2000: in the last bucket"
    assert evidence["itl_p99"].note is None


SEEN_IN_A_LOG = {"kv-starved", "overload", "seq-cap", "spec-ngram-bad"}


@pytest.mark.parametrize("name", TRUTH)
def test_a_log_alone_tells_what_it_can_and_nothing_wrong(name: str) -> None:
    found = diagnose(LogSource(log_path(name)), log=read_log(log_path(name)))
    assert [f.id for f in found.findings[:1]] == ([TRUTH[name]] if name in SEEN_IN_A_LOG else [])
    assert not found.healthy


def test_a_log_alone_tells_the_load_and_admits_the_rest() -> None:
    found = diagnose(LogSource(log_path("seq-cap")), log=read_log(log_path("seq-cap")))
    missing = {missing.name for item in found.cannot_tell for missing in item.missing}
    assert {"itl_p50", "ttft_p50"} <= missing


def test_a_short_window_is_enough_to_see_preemption_before_it_is_counted() -> None:
    """At 20 s into the load no preemption had been counted yet, and eight requests had been thrown out."""
    until = meta("kv-starved")["load_start_unix_ms"] + 21_000
    early = [scrape for scrape in scrapes("kv-starved") if scrape[0] <= until]
    found = diagnose(Scrapes(early), {}, window=20)
    assert found.findings[0].id == "kv-pressure"
    evidence = {e.signal: e.value for e in found.findings[0].evidence}
    assert evidence["preemptions"] == 0
