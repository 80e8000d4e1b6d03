"""Results for other tools: they parse, say the same figures, and hold nothing that breaks a reader."""

import csv
import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from made_runs import records

from loadgen.compare import Comparison, Pair, compare_runs
from loadgen.output.exports import (
    bencher,
    comparison_cases,
    comparison_csv,
    github_benchmark,
    requests_csv,
    run_benchmark,
    run_cases,
)
from loadgen.output.junit import Case, junit
from servers.slo.bounds import parse_bounds

METRICS = ("itl_p50", "ttft_p95", "throughput", "failed")


def comparison(slower: float = 1.0, failed: int = 0, pairs: int = 8) -> Comparison:
    made = [
        Pair(seed, records(seed), records(seed + 100, gap=10.0 * slower, failed=failed))
        for seed in range(pairs)
    ]
    return compare_runs(made, METRICS)


def verdicts(text: str) -> dict[str, str]:
    (suite,) = ET.fromstring(text)
    cases = {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in suite}
    assert int(suite.attrib["tests"]) == len(cases)
    assert int(suite.attrib["failures"]) == list(cases.values()).count("failure")
    assert int(suite.attrib["skipped"]) == list(cases.values()).count("skipped")
    return {name: {"system-out": "passed"}.get(tag, tag) for name, tag in cases.items()}


def test_junit_has_a_case_a_metric_and_fails_on_a_regression() -> None:
    same = verdicts(junit(comparison_cases(comparison()), "suite"))
    assert same == {"itl_p50": "passed", "ttft_p95": "passed", "throughput": "passed", "failed": "passed"}
    slower = verdicts(junit(comparison_cases(comparison(slower=1.4)), "suite"))
    assert slower["itl_p50"] == slower["throughput"] == "failure"


def test_junit_skips_what_is_inconclusive_and_fails_what_is_invalid() -> None:
    apart = [Pair(0, records(0), records(1, gap=9.0)), Pair(2, records(2), records(3, gap=12.0))]
    two = verdicts(junit(comparison_cases(compare_runs(apart, METRICS)), "suite"))
    assert "skipped" in two.values()
    assert "failure" not in two.values()
    nothing = verdicts(junit(comparison_cases(compare_runs([], METRICS)), "suite"))
    assert nothing == {"validity": "failure"}


def test_junit_escapes_what_xml_cannot_hold() -> None:
    text = junit([Case("a\x00b\x1b[31m", failure="\ud800<&>\ufffe\U0001f600", text='"]]>')], "s")
    (suite,) = ET.fromstring(text.encode())
    assert suite[0].attrib["name"] == r"a\x00b\x1b[31m"
    assert suite[0][0].attrib["message"] == "\\ud800<&>\\ufffe\U0001f600"
    assert suite[0][0].text == '"]]>'


def test_csv_of_a_comparison_has_the_rows_of_the_table() -> None:
    found = comparison(slower=1.4)
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found))))
    assert [row["metric"] for row in rows] == list(METRICS)
    assert float(rows[0]["ratio"]) == found.row("itl_p50").ratio
    assert rows[3]["ratio"] == ""


def test_csv_of_a_run_has_a_line_a_request() -> None:
    rows = list(csv.DictReader(io.StringIO(requests_csv(records(failed=2)))))
    assert len(rows) == 60
    assert float(rows[0]["ttft"]) == pytest.approx(0.05, rel=0.05)
    assert rows[-1]["ttft"] == ""
    assert rows[-1]["failure"] == "connection refused"


def test_a_run_is_held_against_bounds() -> None:
    bounds = parse_bounds("itl_p50<20ms,itl_p90<5ms,ttft_p99<1s,throughput>1,ttft_p50{class=vip}<1s")
    cases = {case.name: case for case in run_cases(records(), bounds)}
    assert verdicts(junit(cases.values(), "run")) == {
        "validity": "passed",
        "itl_p50 <= 20 ms": "passed",
        "itl_p90 <= 5 ms": "failure",
        "ttft_p99 <= 1 s": "skipped",
        "throughput >= 1 tok/s": "passed",
        "ttft_p50{class=vip} <= 1 s": "failure",
    }
    assert "cannot tell from 60 samples" in cases["ttft_p99 <= 1 s"].skipped
    spoilt = replace(records(), verdict="client_limited", reasons=("the loop was late",))
    assert next(run_cases(spoilt, ())).failure == "the loop was late"


def test_github_action_benchmark_gets_smaller_is_better_figures() -> None:
    entries = github_benchmark(comparison(slower=1.4))
    by_name = {entry["name"]: entry for entry in entries}
    assert set(by_name) == {"itl_p50", "ttft_p95", "throughput (1/x)"}
    found = comparison(slower=1.4)
    assert by_name["itl_p50"]["value"] == found.row("itl_p50").b
    assert by_name["throughput (1/x)"]["value"] == 1 / found.row("throughput").b
    assert all({"name", "unit", "value"} <= set(entry) for entry in json.loads(json.dumps(entries)))


def test_bencher_gets_values_inside_their_intervals() -> None:
    for measures in (bencher(comparison(slower=1.4), "x")["x"], run_benchmark(records())["vtune bench run"]):
        assert "itl_p50" in measures
        for measure in measures.values():
            low, high = measure.get("lower_value", 0.0), measure.get("upper_value", float("inf"))
            assert low <= measure["value"] <= high
