"""The report of a real study (against a formula): what is in it, and that it needs no network."""

import json
import re
from html.parser import HTMLParser

import optuna
import pytest
from analytic_target import AnalyticTarget, does_not_start

from tuner.facts import report_facts
from tuner.interrupts import Interrupts
from tuner.job import Job
from tuner.observer import Observer
from tuner.optimize import Optimizer
from tuner.report import figures, write_report
from tuner.slo import parse_slo
from tuner.storage import open_study
from tuner.trial import Bench


def oom_below_80(config):
    """One of the starting points is below."""
    if config["max_num_batched_tokens"] < 80:
        does_not_start(config)


def study(tmp_path, **job):
    options = {"rate": 1.0, "budget": None, "trials": 14, "run_seconds": 60.0, "pairs": 3, **job}
    target = AnalyticTarget(start_fault=oom_below_80)
    job = Job(**options)
    record = open_study(optuna.storages.InMemoryStorage(), "s", parse_slo(job.slo).objective)
    optimizer = Optimizer(job, Bench(target, Observer(), Interrupts(), tmp_path), record)
    outcome = optimizer.run()
    return report_facts("my-study", optimizer, outcome, target)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return study(tmp_path_factory.mktemp("report"), slo="itl", trials=20)


@pytest.fixture(scope="module")
def texts(facts):
    return {path.suffix: path.read_text() for path in write_report(facts)}


class Links(HTMLParser):
    """Collects every attribute that makes a browser fetch or follow something."""

    def __init__(self, text):
        super().__init__()
        self.found, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "data", "srcset")]


def test_html_loads_nothing(texts):
    page = Links(texts[".html"])
    assert page.found == []
    assert "link" not in page.tags
    styles = re.findall(r"<style>.*?</style>", texts[".html"], re.DOTALL)
    assert not any("url(" in style or "@import" in style for style in styles)


def test_html_holds_plotly_and_every_figure(texts, facts):
    assert "Plotly.newPlot" in texts[".html"]
    assert texts[".html"].count('class="plotly-graph-div"') == len(figures(facts))


def test_figures_show_what_was_promised(facts):
    titles = [figure.layout.title.text for figure in figures(facts)]
    assert titles == [
        "ITL: distribution",
        "TTFT: distribution",
        "Trade-off: each config (star: your own)",
        "ITL P99 over max_num_batched_tokens",
        "Which flag mattered (PED-ANOVA)",
        "KV pool over the token budget",
    ]
    before, after = figures(facts)[0].data
    assert max(before.x) > max(after.x)


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_text_reports_say_everything(texts, facts, suffix):
    text = (
        texts[suffix].replace("&#34;", '"').replace("-&gt;", "->").replace("&lt;", "<").replace("&#39;", "'")
    )
    launch = facts.best_launch
    for expected in (
        facts.outcome.sentence,
        launch.bundled,
        launch.vllm,
        launch.docker,
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


def test_json_is_whole_and_strict(texts, facts):
    def fail(name):
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


def test_markdown_table_rows_have_as_many_cells_as_the_head(texts):
    tables = re.findall(r"(?:^\|.*\n)+", texts[".md"], re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_report_of_nothing_better(tmp_path):
    facts = study(tmp_path, fix=("all",), vary={"gpu_memory_utilization": (0.9,)}, trials=3)
    paths = write_report(facts)
    text = paths[1].read_text()
    assert "Nothing beats your config" in text
    assert "## Keep" in text
    assert "Roll back" not in text


def test_speculation_in_the_result_comes_with_a_caveat(facts):
    config = {
        **facts.outcome.best.config,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    best = type(facts.outcome.best)(**{**vars(facts.outcome.best), "config": config})
    changed = type(facts)(**{**vars(facts), "outcome": type(facts.outcome)("better", "s", "e", best)})
    assert any("n-gram drafts" in caveat for caveat in changed.caveats)


def test_text_from_a_server_is_escaped(facts, tmp_path):
    evil = type(facts.results[0])(**{**vars(facts.results[0]), "log_tail": "<script>alert(1)</script>"})
    changed = type(facts)(**{**vars(facts), "results": [evil, *facts.results], "out": tmp_path})
    page = next(p for p in write_report(changed) if p.suffix == ".html").read_text()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
