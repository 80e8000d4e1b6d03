"""Alerts that mean the same as the diagnosis, and a dashboard whose queries answer."""

from __future__ import annotations

import json
import math
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_prometheus import PROMTOOL, load_recording, needs_prometheus, prometheus
from playbook_cases import CASES
from recordings import needs_recordings, scrapes
from synthetic_server import Server
from typer.testing import CliRunner, Result

from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.judged_objectives import MISSED
from doctor.diagnosis.playbook import load_all
from doctor.export.alerts import alert_rules
from doctor.export.dashboard import dashboard
from doctor.export.export import compiler
from doctor.metrics.sources import PrometheusSource, Scrapes
from servers.facts import releases_of
from servers.metrics.exposition import record
from vtune_cli import app

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="the promtool binary is not installed")
EVERY_S, STEPS = 15, 40
VLLM = releases_of("vllm")
assert VLLM is not None


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("doctor", "export", *arguments), catch_exceptions=False)


def check(text: str, path: Path) -> None:
    assert PROMTOOL is not None
    path.write_text(text)
    command = [PROMTOOL, "check", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts(text: str) -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(text)["groups"]
    return {
        rule["labels"].get("playbook", rule["alert"]): rule for group in groups for rule in group["rules"]
    }


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--flags", "vllm serve m --max-num-seqs 64", "--selector", '{job="vllm"}'],
        ["--vllm-version", "0.8.5", "--slo", "itl_p99<50ms"],
        ["--assume", "shared-prefix=1000", "--window", "10m"],
    ],
)
def test_promtool_takes_the_rules(arguments: list[str], tmp_path: Path) -> None:
    check(run("alerts", *arguments).stdout, tmp_path / "rules.yml")


def test_a_rule_on_a_flag_nobody_stated_is_named_and_left_out() -> None:
    blind = run("alerts").stdout
    assert "# skipped seq-cap: needs max_num_seqs; pass --flags" in blind
    assert "# skipped prefix-misses: needs shared_prefix" in blind
    told = alerts(run("alerts", "--flags", "vllm serve m --max-num-seqs 64").stdout)
    assert "> 50.7)" in told["seq-cap"]["expr"]
    assert told["kv-idle"]["annotations"]["explained_by"] == (
        "adapter-slots, host-bound, overload, prefill-slow, seq-cap"
    )


def test_names_are_those_of_the_version() -> None:
    old, new = (run("alerts", "--vllm-version", version).stdout for version in ("0.9.0", "0.33.0"))
    assert ("gpu_cache_usage_perc" in old, "kv_cache_usage_perc" in old) == (True, False)
    assert ("gpu_cache_usage_perc" in new, "kv_cache_usage_perc" in new) == (False, True)
    assert "vllm:time_per_output_token_seconds_bucket" in old
    assert run("alerts", "--vllm-version", "new").exit_code == 2


def test_what_blinds_a_rule_is_an_alert_too() -> None:
    groups = yaml.safe_load(run("alerts").stdout)["groups"]
    absences = {rule["labels"]["metric"]: rule for rule in groups[1]["rules"]}
    assert "kv-pressure" in absences["vllm:kv_cache_usage_perc"]["annotations"]["description"]
    assert (
        absences["vllm:kv_cache_usage_perc"]["expr"] == "absent(last_over_time(vllm:kv_cache_usage_perc[5m]))"
    )
    assert not any("spec_decode" in name for name in absences)


def exported(flags: dict[str, Any], assume: dict[str, float], slo: str | None = None) -> str:
    """The rules without their ``for``, which tells nothing about whether they hold now."""
    books = [replace(book, hold="0s") for book in load_all()]
    window = float(EVERY_S * 20)
    return alert_rules(books, compiler(None, flags, slo, assume=assume, window=window)).text()


def series_of(pages: list[tuple[int, str]]) -> list[dict[str, str]]:
    """promtool's input: every series as a list of samples."""
    recording = record(pages)
    found = []
    for name, columns in recording.series.items():
        for series in columns:
            inside = ",".join(
                f'{key}="{value}"' for key, value in {**series.labels, "instance": "a:1"}.items()
            )
            values = " ".join(f"{value!r}" for value in series.values.tolist())
            found.append({"series": f"{name}{{{inside}}}", "values": values})
    return found


BY_QUANTILES = {book.id for book in load_all() if not {*MISSED}.isdisjoint(book.when.names)}


@needs_promtool
def test_alerts_fire_where_the_doctor_finds(tmp_path: Path) -> None:
    """Every playbook's firing and quiet server: promtool's alerts are the doctor's findings."""
    document: dict[str, Any] = {"evaluation_interval": "5m", "rule_files": [], "tests": []}
    told = 0
    for number, (identity, case) in enumerate(CASES.items()):
        for mood, server in (("firing", case.firing), ("quiet", case.quiet)):
            flags = dict(case.flags if mood == "firing" or case.quiet_flags is None else case.quiet_flags)
            rules = tmp_path / f"{number}-{mood}.yml"
            text = exported(flags, dict(case.assume), case.slo)
            known = set(alerts(text))
            rules.write_text(text)
            pages = server.scrapes(count=STEPS + 1, every_ms=EVERY_S * 1000)
            window = float(EVERY_S * 20)
            found = diagnose(Scrapes(pages), flags, case.slo, assume=case.assume, window=window)
            expected = sorted({finding.id for finding in found.findings} & known)
            told += identity in expected
            # An interpolated quantile says more than the bucket that it lies in.
            unsure = "|".join({item.id for item in found.cannot_tell} & BY_QUANTILES)
            test = {
                "interval": f"{EVERY_S}s",
                "input_series": series_of(pages),
                "promql_expr_test": [
                    {
                        "expr": f'count by (playbook) (ALERTS{{alertstate="firing",playbook!~"|{unsure}"}})',
                        "eval_time": f"{STEPS * EVERY_S}s",
                        "exp_samples": [
                            {"labels": f'{{playbook="{book}"}}', "value": 1} for book in expected
                        ],
                    }
                ],
            }
            path = tmp_path / f"test-{number}-{mood}.yml"
            path.write_text(json.dumps({**document, "rule_files": [str(rules)], "tests": [test]}))
    assert told >= 12
    assert PROMTOOL is not None
    paths = sorted(map(str, tmp_path.glob("test-*.yml")))
    command = [PROMTOOL, "test", "rules", *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


HOUR_MS = 3_600_000
LAST_WEEK = Server(histograms={"ttft": {0.12: 100}, "prompt_length": {200.0: 100}})
LONGER = Server(histograms={"ttft": {0.9: 100}, "prompt_length": {900.0: 100}})


@needs_promtool
@pytest.mark.parametrize(("today", "fires"), [(LONGER, True), (LAST_WEEK, False)])
def test_longer_prompts_than_a_week_ago_are_an_alert(today: Server, fires: bool, tmp_path: Path) -> None:
    books = [replace(book, hold="0s") for book in load_all() if book.id == "baseline-shift"]
    text = alert_rules(books, compiler(None, {}, window=6 * 3600.0)).text()
    assert "offset 1w" in text
    (tmp_path / "rules.yml").write_text(text)
    before = LAST_WEEK.scrapes(count=168, every_ms=HOUR_MS)
    now = [(at + 168 * HOUR_MS, page) for at, page in today.scrapes(count=12, every_ms=HOUR_MS)]
    test = {
        "interval": "1h",
        "input_series": series_of([*before, *now]),
        "promql_expr_test": [
            {
                "expr": 'count by (playbook) (ALERTS{alertstate="firing",playbook!=""})',
                "eval_time": "179h",
                "exp_samples": [{"labels": '{playbook="baseline-shift"}', "value": 1}] * fires,
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(
        json.dumps(
            {"evaluation_interval": "1h", "rule_files": [str(tmp_path / "rules.yml")], "tests": [test]}
        )
    )
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("dashboard")
    name = "spec-ngram-bad"
    load_recording(record(scrapes(name)), directory, {"job": "vllm", "instance": "a:1"})
    with prometheus(directory) as url:
        yield url


@needs_prometheus
@needs_recordings
def test_every_panel_of_the_dashboard_answers(loaded: str) -> None:
    end = scrapes("spec-ngram-bad")[-1][0] / 1000
    drafts = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'"""
    flags = f"vllm serve m --max-num-seqs 128 {drafts}"
    arguments = ["--selector", 'job="vllm"', "--window", "50s", "--flags", flags]
    board = json.loads(run("dashboard", *arguments).stdout)
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) >= 12
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    for panel in panels:
        if panel["title"] == "Load against peers":
            continue
        answered = [
            ask(loaded, target["expr"].replace("$instance", ".*"), end) for target in panel["targets"]
        ]
        assert all(answered), panel["title"]
    findings = {
        t["legendFormat"]: ask(loaded, t["expr"].replace("$instance", ".*"), end)
        for t in panels[0]["targets"]
    }
    assert float(findings["speculation-loses"][0]["value"][1]) == 1
    assert float(findings["seq-cap"][0]["value"][1]) == 0


def ask(url: str, query: str, at: float) -> Any:
    parameters = urllib.parse.urlencode({"query": query, "time": at})
    with urllib.request.urlopen(f"{url}/api/v1/query?{parameters}", timeout=20) as answer:
        return json.load(answer)["data"]["result"]


def test_a_dashboard_leaves_out_what_the_server_lacks() -> None:
    lacking = dashboard(load_all(), compiler(Scrapes(Server().scrapes()), {}))
    full = dashboard(load_all(), compiler(None, {}))
    titles = [{panel["title"] for panel in board["panels"]} for board in (lacking, full)]
    assert titles[1] - titles[0] == {"Acceptance", "Tokens per draft"}


def test_an_infinite_objective_never_alerts() -> None:
    made = compiler(None, {}, "ttft_p95<1s")
    assert made.constants["slo_itl_p99"] == math.inf
    text = alert_rules(load_all(), made).text()
    assert "# skipped itl-flat-high: cannot hold with these flags and objectives" in text


@pytest.mark.parametrize("kind", ["alerts", "dashboard"])
@pytest.mark.parametrize("version", VLLM.releases[::5])
def test_nothing_asks_for_a_metric_that_the_release_never_had(version: str, kind: str) -> None:
    """An alert on the absence of such a metric would fire for ever."""
    text = run(kind, "--vllm-version", version).stdout
    names = (re.sub(r"_(count|sum|bucket)$", "", name) for name in re.findall(r"vllm:\w+", text))
    told = {name.removesuffix("_total") for name in names}
    known = {name.removesuffix("_total") for name in VLLM.metrics_at(version)}
    assert told
    assert told <= known, told - known


KUBERNETES = {"cluster": "eu", "namespace": "prod", "job": "vllm", "pod": "vllm-0", "team": "search"}


@needs_prometheus
@pytest.mark.parametrize("looked_at", ["nothing", "a page", "the prometheus"])
def test_an_alert_keeps_the_labels_by_which_it_is_routed(looked_at: str, tmp_path: Path) -> None:
    """Also where the rules were made from a bare page, which has none of them."""
    pages = Server(running=2, waiting=9, kv=0.02).scrapes(count=STEPS + 1, every_ms=EVERY_S * 1000)
    engine = {**KUBERNETES, "instance": "10.0.0.7:8000", "engine": "0", "model_name": "m"}
    load_recording(record(pages), tmp_path, {**KUBERNETES, "instance": "10.0.0.7:8000"})
    with prometheus(tmp_path) as url:
        at = pages[-1][0] / 1000
        sources = {
            "nothing": None,
            "a page": Scrapes(pages),
            "the prometheus": PrometheusSource(url, at=at),
        }
        rules = alert_rules(load_all(), compiler(sources[looked_at], {"max_num_seqs": 2}))
        board = dashboard(load_all(), compiler(sources[looked_at], {"max_num_seqs": 2}))
        alert = alerts(rules.text())["seq-cap"]
        assert [element["metric"] for element in ask(url, alert["expr"], at)] == [engine]
        for panel in board["panels"][2:]:
            for target in panel.get("targets", ()):
                for element in ask(url, target["expr"], at):
                    assert element["metric"].items() >= engine.items(), target["expr"]
                assert "{{namespace}} {{job}} {{pod}} {{instance}}" in target["legendFormat"]
        assert "adhoc" in {variable["type"] for variable in board["templating"]["list"]}
    assert "{{ with $labels.pod }}pod {{ . }}, {{ end }}" in alert["annotations"]["summary"]
