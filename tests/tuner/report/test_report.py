"""The report of a real study (against a formula): what is in it, and that it needs no network."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import optuna
import pytest
from analytic_target import AnalyticTarget, does_not_start

from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.report import plots
from tuner.report.coverage import coverage
from tuner.report.curves import KnobCurve, Point, along
from tuner.report.facts import report_facts
from tuner.report.report import figures, write_report
from tuner.runs.findings import TrialFinding
from tuner.runs.interrupts import Interrupts
from tuner.runs.result import Measurement, Reading, TrialResult
from tuner.space.space import build_space, config_key, render_value
from tuner.study.cost import time_spent
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench
from tuner.workers.storage import open_study


def oom_below_80(config: Any) -> None:
    """One of the starting points is below."""
    if config["max_num_batched_tokens"] < 80:
        does_not_start(config)


def study(tmp_path: Path, **given: Any) -> Any:
    options: dict[str, Any] = {
        "strategy": "tpe",
        "rate": 1.0,
        "budget": None,
        "trials": 14,
        "run_seconds": 60.0,
        "pairs": 3,
        **given,
    }
    target = AnalyticTarget(start_fault=oom_below_80)
    job = Job(**options)
    record = open_study(optuna.storages.InMemoryStorage(), "s", parse_slo(job.slo).objective)
    optimizer = Optimizer(job, Bench(target, Observer(), Interrupts(), tmp_path), record)
    outcome = optimizer.run()
    return report_facts(optimizer, outcome)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return study(tmp_path_factory.mktemp("report"), slo="itl", trials=20, run_seconds=80.0)


@pytest.fixture(scope="module")
def texts(facts: Any) -> dict[str, str]:
    return {path.suffix: path.read_text() for path in write_report(facts)}


class Links(HTMLParser):
    """Collects every attribute that makes a browser fetch or follow something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "data", "srcset")]


def test_html_loads_nothing(texts: dict[str, str]) -> None:
    page = Links(texts[".html"])
    assert page.found == ["data:,"], "an icon of no bytes, so that no browser asks for one"
    styles = re.findall(r"<style>.*?</style>", texts[".html"], re.DOTALL)
    assert not any("url(" in style or "@import" in style for style in styles)


def test_which_flag_mattered_names_its_source(facts: Any, tmp_path: Path) -> None:
    predictions = {
        config_key({**facts.outcome.best.config, "max_num_batched_tokens": tokens}): {
            "itl_es99": 1e-4 * tokens
        }
        for tokens in (64, 2048)
    }
    simulated = dataclasses.replace(facts, predictions=predictions, out=tmp_path)
    write_report(simulated)
    assert simulated.importances["max_num_batched_tokens"] == max(simulated.importances.values())
    assert (
        "| max_num_batched_tokens | 6.4 ms | 205 ms | 2 simulated |" in (tmp_path / "report.md").read_text()
    )


def test_without_a_knob_that_was_varied_alone_all_trials_say_which_flag_mattered(
    facts: Any, tmp_path: Path
) -> None:
    alone = dataclasses.replace(
        facts, results=facts.results[:1], ped_anova={"max_num_seqs": 1.0}, out=tmp_path
    )
    write_report(alone)
    assert alone.importances == {"max_num_seqs": 1.0}
    assert "## Which flag mattered (PED-ANOVA over all trials)" in (tmp_path / "report.md").read_text()


def test_html_holds_plotly_and_every_figure(texts: dict[str, str], facts: Any) -> None:
    assert "Plotly.newPlot" in texts[".html"]
    assert texts[".html"].count('class="plotly-graph-div"') == len(figures(facts))


def test_figures_show_what_was_promised(facts: Any) -> None:
    titles = [figure.layout.title.text for figure in figures(facts)]
    assert titles[:4] == [
        "ITL: distribution",
        "TTFT: distribution",
        "Trade-off: each config (star: your own)",
        "The search, trial by trial",
    ]
    assert "max_num_batched_tokens, through the best config" in titles
    assert titles[-2:] == ["KV pool over the token budget", "Time spent"]
    before, after = figures(facts)[0].data
    assert max(before.x) > max(after.x)


def test_every_figure_of_a_measurement_has_its_interval(facts: Any) -> None:
    """Bars are as long as the interval; where there is none they have no length."""
    spread = Measurement(
        {"itl_es99": Reading(0.1, 100, 0.08, 0.15), "throughput": Reading(50.0, 100)}, window=20.0
    )
    told = dataclasses.replace(facts.outcome.best, measurement=spread)
    drawn = plots.history([told], [told], facts.slo)
    marks = next(trace for trace in drawn.data if trace.name == "feasible")
    assert (marks.y, marks.error_y.array, marks.error_y.arrayminus) == (
        pytest.approx((100.0,)), pytest.approx((50.0,)), pytest.approx((20.0,)),
    )  # fmt: skip
    changed = dataclasses.replace(facts, results=[told])
    points = plots.trade_off([told], facts.space, changed.front).data[0]
    assert points.error_x.array == pytest.approx((50.0,))
    point = Point("8", 0, spread.reading("itl_es99"), trial=1, best=True)
    curve = KnobCurve("max_num_seqs", ("8",), (point,), (), ())
    line = next(trace for trace in plots.one_knob(curve, facts.slo).data if trace.line.color == plots.AFTER)
    assert line.error_y.arrayminus == pytest.approx((20.0,))


def test_the_line_of_the_best_so_far_is_what_the_leaders_measured(facts: Any) -> None:
    history = plots.history(facts.results, facts.leaders, facts.slo)
    line = next(trace for trace in history.data if trace.name == "best so far")
    assert len(facts.leaders) == len(facts.results)
    assert facts.leaders[-1].number == facts.outcome.best.number
    assert line.y[-1] == pytest.approx(1e3 * facts.leaders[-1].value(facts.slo.objective))


def test_a_knobs_curve_holds_the_trials_that_differ_in_it_alone(facts: Any) -> None:
    best = facts.outcome.best
    for curve in facts.curves:
        for point in curve.through:
            config = next(r.config for r in facts.results if r.number == point.trial)
            differing = [
                a.name
                for a in facts.space.axes
                if facts.space.params(config).get(a.name) != facts.space.params(best.config).get(a.name)
            ]
            assert set(differing) <= {curve.axis} | {
                a.name for a in facts.space.axes if a.needs == curve.axis
            }
        assert sum(point.best for point in curve.through) == 1
        assert [point.place for point in curve.through] == sorted(point.place for point in curve.through)


def test_predictions_are_drawn_apart_from_measurements(facts: Any) -> None:
    best = facts.outcome.best
    axis = facts.space.axes[0]
    expected = {
        config_key(c): {"itl_es99": 0.1 + k} for k, c in enumerate(along(axis, best.config, facts.space))
    }
    told = dataclasses.replace(facts, predictions=expected, prior="a simulation")
    curve = next(curve for curve in told.curves if curve.axis == axis.name)
    assert [point.reading.value for point in curve.predicted] == [0.1 + k for k in range(len(axis.values))]
    assert all(point.trial is None for point in curve.predicted)
    drawn = plots.one_knob(curve, facts.slo)
    line = next(trace for trace in drawn.data if trace.name == "predicted by simulation")
    assert line.line.dash == "dash"
    against = plots.expectations(facts.results, expected, facts.slo)
    assert against.layout.title.text == "ITL ES99: predicted against measured"
    nothing = [dataclasses.replace(r, expected={}) for r in facts.results]
    assert plots.expectations(nothing, {}, facts.slo) is None


def test_the_cost_adds_up(facts: Any) -> None:
    assert sum(item.seconds for item in facts.cost) >= facts.seconds * 0.99
    assert sum(item.share for item in facts.cost) == pytest.approx(1.0)
    starts = next(item for item in facts.cost if item.purpose == "starting servers")
    served = [r for r in facts.results if r.status in ("measured", "stopped")]
    assert starts.seconds == pytest.approx(2.0 * len(served))


def test_cost_by_purpose() -> None:
    result = TrialResult(
        1, {}, "o", "measured", seconds={"start": 4.0, "load": 20.0, "warm-up": 1.0, "total": 26.0}
    )
    items = {
        item.purpose: item
        for item in time_spent([result, result], {"confirmation": 30.0, "choosing": 2.0}, 90.0)
    }
    assert items["measuring trials"].seconds == 40.0
    assert items["confirming on fresh runs"].share == pytest.approx(30 / 90)
    assert next(reversed(items.values())).seconds == pytest.approx(90 - 8 - 40 - 2 - 30 - 2)
    crowd = time_spent([result] * 10, {}, 100.0)
    assert sum(item.seconds for item in crowd) == 250.0, "several workers: more than the whole"
    assert time_spent([], {}, 0.0) == []


def test_what_was_not_tried_and_why(facts: Any) -> None:
    found = facts.coverage
    knobs = {knob.name: knob for knob in found.knobs}
    budget = knobs["max_num_batched_tokens"]
    assert "2048" in budget.tried
    every = {render_value(v) for a in facts.space.axes if a.name == budget.name for v in a.values}
    assert set(budget.tried) | set(budget.untried) | set(budget.failed) == every
    assert found.failed.get("out_of_memory", 0) == sum(r.status == "failed" for r in facts.results)
    assert found.stopped == sum(r.status == "stopped" for r in facts.results)
    assert found.configs == facts.space.size


def test_what_nobody_was_ever_short_of_is_said_to_do_nothing(facts: Any, tmp_path: Path) -> None:
    roomy = {"peak_kv_usage": 0.1, "preemptions": 0, "prefix_hits": 0, "peak_running": 7}
    told = [dataclasses.replace(r, **roomy) for r in facts.results]
    without = dataclasses.replace(facts, results=told, out=tmp_path)
    knobs = {knob.name: knob for knob in without.coverage.knobs}
    memory, places = knobs["gpu_memory_utilization"], knobs["max_num_seqs"]
    assert memory.untried == memory.inactive
    assert {int(word) for word in places.inactive} == {int(w) for w in places.untried if int(w) > 128}
    assert not knobs["max_num_batched_tokens"].inactive
    pages = [path.read_text() for path in write_report(without)]
    assert ["was never the limit" in page for page in pages] == [False, True, True]
    full = [dataclasses.replace(r, peak_kv_usage=0.9, peak_running=128) for r in told]
    assert not any(knob.inactive for knob in dataclasses.replace(without, results=full).coverage.knobs)


def test_what_lies_beyond_a_crash_is_said_to_be_forbidden(facts: Any) -> None:
    failed = dataclasses.replace(
        facts.results[0], number=99, status="failed", reason="did not start: out_of_memory: no room",
        config=facts.space.snap({"max_num_batched_tokens": 1024}), measurement=None,
    )  # fmt: skip
    base = dataclasses.replace(facts.results[0], config=facts.space.snap({"max_num_batched_tokens": 64}))
    refused = dataclasses.replace(
        base,
        status="refused",
        reason="max_num_seqs=256: must be at most max_num_batched_tokens; a=3: too small",
    )
    found = coverage([base, failed, refused, refused], facts.space)
    budget = next(knob for knob in found.knobs if knob.name == "max_num_batched_tokens")
    assert budget.failed == ("1024",)
    assert "4096" in budget.forbidden
    assert "512" not in budget.forbidden
    assert found.refused == {"max_num_seqs: must be at most max_num_batched_tokens": 2, "a: too small": 2}


def test_the_front_is_in_the_report_with_its_knee(facts: Any, texts: dict[str, str]) -> None:
    data = json.loads(texts[".json"])["pareto"]
    assert data["trials"] == [r.number for r in facts.front.trials]
    assert data["knee"] in data["trials"]
    assert f"| {data['knee']} (knee) |" in texts[".md"]


def test_findings_of_each_trial_are_shown(facts: Any, tmp_path: Path) -> None:
    finding = TrialFinding("kv-pressure", "warning", "The pool is full", {"kv_max": 0.99})
    cause = TrialFinding("seq-cap", "info", "Few", {}, suppressed_by="kv-pressure")
    told = dataclasses.replace(facts.results[0], findings=(finding, cause))
    changed = dataclasses.replace(facts, results=[told, *facts.results[1:]], out=tmp_path)
    texts = {path.suffix: path.read_text() for path in write_report(changed)}
    assert "<b>kv-pressure</b> (warning): The pool is full. kv_max 0.99" in texts[".html"]
    assert "explained by kv-pressure" in texts[".html"]
    assert "| kv-pressure |" in texts[".md"]
    assert json.loads(texts[".json"])["trials"][0]["findings"][0]["id"] == "kv-pressure"


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_text_reports_say_everything(texts: dict[str, str], facts: Any, suffix: str) -> None:
    text = (
        texts[suffix]
        .replace("&#34;", '"')
        .replace("-&gt;", "->")
        .replace("&lt;", "<")
        .replace("&#39;", "'")
        .replace("\\[", "[")
        .replace("\\]", "]")
    )
    launch = facts.best_launch
    for expected in (
        facts.outcome.sentence,
        launch.bundled,
        launch.vllm,
        launch.docker,
        launch.checked,
        "kind: Deployment",
        "--max-num-batched-tokens",
        facts.baseline_launch.target,
        "start: itl first",
        "CUDA out of memory",
        "torch.OutOfMemoryError",
        "stopped early",
        "token-weighted",
        "95 % interval",
        "open loop, Poisson",
        "optuna",
    ):
        assert expected.replace("&gt;", ">") in text, expected


def test_json_is_whole_and_strict(texts: dict[str, str], facts: Any) -> None:
    def fail(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    data = json.loads(texts[".json"], parse_constant=fail)
    assert data["schema"] == "vtune.report/1"
    assert data["verdict"] == "better"
    assert data["sentence"] == facts.outcome.sentence
    assert data["changes"]["max_num_batched_tokens"][0] == 2048
    assert data["confirmation"]["pairs"] == 3
    assert len(data["trials"]) == len(facts.results)
    failed = [t for t in data["trials"] if t["status"] == "failed"]
    assert failed
    assert all(t["log_tail"] and t["reason"] for t in failed)
    pools = {row["max_num_batched_tokens"]: row["kv_tokens"] for row in data["kv_pool"]}
    assert pools[2048] < pools[min(pools)], "a larger budget leaves a smaller pool"


def test_markdown_table_rows_have_as_many_cells_as_the_head(texts: dict[str, str]) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", texts[".md"], re.MULTILINE)
    assert len(tables) >= 8
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_report_of_nothing_better(tmp_path: Path) -> None:
    facts = study(tmp_path, fix=("all",), vary={"gpu_memory_utilization": (0.9,)}, trials=3)
    paths = write_report(facts)
    text = paths[1].read_text()
    assert "No improvement found" in text
    assert "## Keep your current command" in text
    assert "Roll back" not in text


def test_speculation_in_the_result_comes_with_a_caveat(facts: Any) -> None:
    config = {
        **facts.outcome.best.config,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    best = dataclasses.replace(facts.outcome.best, config=config)
    changed = dataclasses.replace(facts, outcome=type(facts.outcome)("better", "s", "e", best))
    assert any("n-gram drafts" in caveat for caveat in changed.caveats)


def test_runs_that_are_doubted_for_several_reasons_are_counted_under_each(facts: Any) -> None:
    first, *others = facts.results
    measured = dataclasses.replace(first.measurement, verdict="too_few_samples, client_limited")
    doubted = [dataclasses.replace(first, measurement=measured), *others]
    caveat = dataclasses.replace(facts, results=doubted).caveats[-1]
    assert "too few samples for percentiles" in caveat
    assert "invalid: the client was the limit" in caveat


def test_text_from_a_server_is_escaped(facts: Any, tmp_path: Path) -> None:
    evil = dataclasses.replace(facts.results[0], log_tail="<script>alert(1)</script>")
    changed = dataclasses.replace(facts, results=[evil, *facts.results], out=tmp_path)
    page = next(p for p in write_report(changed) if p.suffix == ".html").read_text()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_flag_that_is_off_is_said_to_be(facts: Any, tmp_path: Path) -> None:
    fixed = build_space(facts.space.baseline, 8192, fix=("speculative_config",))
    paths = write_report(dataclasses.replace(facts, space=fixed, out=tmp_path))
    assert ["speculative_config off" in path.read_text() for path in paths] == [False, True, True]
    assert json.loads(paths[0].read_text())["not_tried"]["held"]["speculative_config"] is None
