"""``--baseline``: whether the optimum of an earlier study moved, and the command that does a study again."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest
from analytic_target import AnalyticTarget, does_not_start
from llama_8b import CONFIG
from typer.testing import CliRunner

from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.report.facts import report_facts
from tuner.report.report import Facts, write_report
from tuner.report.reproduce import command_of
from tuner.runs.interrupts import Interrupts
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.outcome import Outcome
from tuner.study.regression import KEY, PreviousError, Recommendation, read_previous
from tuner.study.trial import Bench
from tuner.workers.storage import open_storage, open_study
from vtune_cli import app


def study(out: Path, target: AnalyticTarget, previous: Recommendation | None = None, **job: Any) -> Facts:
    """A study of two budgets against a formula in which the smaller one is the better."""
    knobs = {"max_num_batched_tokens": (256, 512)}
    options = {"rate": 1.0, "budget": None, "trials": 2, "run_seconds": 60.0, "pairs": 3, **job}
    if previous is not None:
        options |= {"flags": previous.flags, "baseline": previous.to_json()}
    asked = Job(**{"slo": "itl", "fix": ("all",), "vary": knobs, **options})
    record = open_study(optuna.storages.InMemoryStorage(), "today", parse_slo(asked.slo).objective)
    optimizer = Optimizer(asked, Bench(target, Observer(), Interrupts(), out), record)
    return report_facts(optimizer, optimizer.run())


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return study(tmp_path_factory.mktemp("before"), AnalyticTarget())


@pytest.fixture(scope="module")
def recommended(before: Facts) -> Recommendation:
    assert before.recommendation is not None
    return before.recommendation


def test_a_study_keeps_what_it_recommends(before: Facts, recommended: Recommendation) -> None:
    assert recommended.flags == {"max_num_batched_tokens": 256}
    confirmation = before.outcome.confirmation
    assert confirmation is not None
    assert recommended.figures["itl_es99"] == confirmation.candidate.readings["itl_es99"], "on fresh runs"
    assert Recommendation.from_json(json.loads(json.dumps(recommended.to_json()))) == recommended


def test_an_optimum_that_stands_has_not_moved(recommended: Recommendation, tmp_path: Path) -> None:
    facts = study(tmp_path, AnalyticTarget(), recommended)
    assert facts.regression is not None
    assert not facts.regression.moved
    assert facts.exit_code == 0
    assert "has not moved: its flags hold the SLO today" in facts.lines[0]
    then_and_now = {metric: (then.value, now.value) for metric, then, now in facts.regression.figures}
    assert then_and_now["itl_es99"][0] == pytest.approx(then_and_now["itl_es99"][1], rel=0.05)


def test_an_optimum_that_is_beaten_has_moved(recommended: Recommendation, tmp_path: Path) -> None:
    """Something about the small budget has become bad."""
    target = AnalyticTarget(
        itl_factor=lambda config, seed: 9.0 if config["max_num_batched_tokens"] < 300 else 1
    )
    facts = study(tmp_path, target, recommended)
    assert facts.regression is not None
    assert facts.regression.moved
    assert facts.exit_code == 1
    assert facts.outcome.exit_code == 0
    assert "moved: max_num_batched_tokens 256 -> 512" in facts.lines[0]
    assert "(-79 % [-79, -79])" in facts.lines[0]
    paths = {path.suffix: path.read_text() for path in write_report(facts)}
    data = json.loads(paths[".json"])["regression"]
    assert data["moved"] is True
    assert data["previous"]["flags"] == {"max_num_batched_tokens": 256}
    assert {row["metric"] for row in data["figures"]} >= {"itl_es99", "ttft_es95", "throughput"}
    assert all(row["today"]["low"] <= row["today"]["value"] for row in data["figures"][:2])
    for suffix in (".md", ".html"):
        assert "The optimum of today moved" in paths[suffix]


def test_old_flags_that_miss_the_slo_have_moved_although_nothing_is_better(
    recommended: Recommendation, tmp_path: Path
) -> None:
    facts = study(tmp_path, AnalyticTarget(), recommended, slo="itl_es99<10ms")
    assert facts.regression is not None
    assert facts.regression.moved
    assert "miss the SLO today (ITL ES99" in facts.lines[0]
    assert "Nothing better was found" in facts.lines[0]
    assert facts.exit_code == 1
    assert any("itl_es99 <= 10 ms" in missed for missed in facts.regression.missed)


def test_old_flags_that_no_longer_serve_have_moved(recommended: Recommendation, tmp_path: Path) -> None:
    def fault(config: Any) -> None:
        if config["max_num_batched_tokens"] == 256:
            does_not_start(config)

    facts = study(tmp_path, AnalyticTarget(start_fault=fault), recommended)
    assert facts.regression is not None
    assert facts.regression.moved
    assert "out of memory" in facts.lines[0]
    assert facts.exit_code == 1


def test_an_interrupted_study_says_nothing(before: Facts, tmp_path: Path) -> None:
    from tuner.study.regression import compare_with, recommendation

    baseline = before.baseline
    assert baseline is not None
    assert before.recommendation is not None
    outcome = Outcome("interrupted", "Interrupted", "interrupted")
    assert compare_with(before.recommendation, outcome, baseline, before.slo) is None
    assert recommendation("s", outcome, baseline, {}, "", {}) is None


# Where an earlier study is read from.


def test_a_report_and_its_directory_and_the_studys_name(before: Facts) -> None:
    write_report(before)
    places = (str(before.out), str(before.out / "report.json"), before.out.name)
    found = [read_previous(where, before.out.parent) for where in places]
    assert {str(previous.flags) for previous in found} == {"{'max_num_batched_tokens': 256}"}
    assert [previous.where for previous in found] == list(places)


def test_a_storage_and_a_study(recommended: Recommendation, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    storage = open_storage(url)
    optuna.create_study(storage=storage, study_name="may").set_user_attr(KEY, recommended.to_json())
    optuna.create_study(storage=storage, study_name="june")
    assert read_previous(f"{url}#may", tmp_path).flags == recommended.flags
    with pytest.raises(PreviousError, match=r"no study july in there\. It has: "):
        read_previous(f"{url}#july", tmp_path)
    with pytest.raises(PreviousError, match="has recommended nothing"):
        read_previous(f"{url}#june", tmp_path)


def test_to_ask_for_a_database_that_is_not_there_makes_none(tmp_path: Path) -> None:
    with pytest.raises(PreviousError, match=r"there is no file .*none\.db"):
        read_previous(f"sqlite:///{tmp_path}/none.db#may", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_database_that_does_not_answer_is_named_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(PreviousError, match=r"^--baseline nonsense://x: cannot be opened"):
        read_previous("nonsense://x#may", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file, directory or study"),
        ("{", r"no JSON .*Give the study's directory, or the report\.json in it"),
        ("[]", "recommends nothing"),
        ('{"sentence": "No feasible config", "recommendation": null}', r"recommends nothing \(No feasible"),
        ('{"recommendation": {"flags": {}}}', "made by another version"),
    ],
)
def test_what_recommends_nothing_is_told(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    where = tmp_path if text is not None else tmp_path / "none"
    with pytest.raises(PreviousError, match=message):
        read_previous(str(where), tmp_path)


# Through the command.


def optimize(*words: str) -> Any:
    return CliRunner().invoke(app, ["optimize", *words])


def test_a_study_after_a_study(tmp_path: Path) -> None:
    """On twice the load the earlier optimum misses what it held; the rest is as it was asked before."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first, second = tmp_path / "may", tmp_path / "june"
    words = [
        "--target",
        "simulated:h100",
        "--model",
        str(tmp_path / "config.json"),
        "--fix",
        "all",
        "--pairs",
        "2",
    ]
    words += ["--slo", "itl_es99<35ms", "--vary", "max_num_batched_tokens=512,1024", "--run-time", "5s"]
    assert optimize(*words, "--rate", "20", "--trials", "2", "--out", str(first)).exit_code == 0
    result = optimize(
        *(
            "--baseline",
            str(first),
            "--slo",
            "itl_es99<12ms",
            "--rate",
            "40",
            "--trials",
            "1",
            "--pairs",
            "2",
        ),
        *("--out", str(second), "--json"),
    )
    assert result.exit_code == 1, result.output
    report = json.loads((second / "report.json").read_text())
    sentence = report["regression"]["sentence"]
    assert sentence.startswith("ESTIMATE: The optimum of optimize-")
    assert "which was for the SLO itl_es99<35ms, moved: its flags miss the SLO today" in sentence
    assert sentence.count("ESTIMATE") == 1
    assert "goodput" not in {row["metric"] for row in report["regression"]["figures"]}, "of other bounds"
    assert "for the SLO `itl_es99<35ms`, measured under" in (second / "report.md").read_text()
    assert report["regression"]["moved"] is True
    old = json.loads((first / "report.json").read_text())[KEY]["flags"]
    assert report["regression"]["previous"]["flags"] == old
    words = shlex.split(report["command"])
    assert words[words.index("--baseline") + 1] == str(first)
    assert words[words.index("--target") + 1] == "simulated:h100"
    assert words[words.index("--rate") + 1] == "40.0"
    again = optimize(*words[2:], "--out", str(tmp_path / "again"))
    assert again.exit_code == 1, again.output
    assert json.loads((tmp_path / "again" / "report.json").read_text())["regression"]["moved"] is True


def test_flags_and_an_earlier_study_are_two_baselines(before: Facts) -> None:
    write_report(before)
    result = optimize("--baseline", str(before.out), "--flags", "--max-num-seqs 3")
    assert result.exit_code == 2
    assert "Give one of the two" in result.output


def test_the_command_of_a_job_gives_the_job_back() -> None:
    job = Job(
        slo="itl_es99<50ms", flags={"max_num_seqs": 12, "enable_prefix_caching": False}, rate=2.5,
        budget=90.0, run_seconds=5.0, pairs=4, fix=("gpu_memory_utilization",),
        vary={"block_size": (16, 32), "max_num_seqs": None}, seed=7, loads=(1.0, 4.0),
    )  # fmt: skip
    words = shlex.split(command_of(job))
    assert words[:2] == ["vtune", "optimize"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options["--flags"] == "--max-num-seqs 12 --no-enable-prefix-caching"
    assert options["--budget"] == "90s"
    assert options["--run-time"] == "5s"
    assert options["--loads"] == "1,4"
    assert [word for flag, word in pairwise(words) if flag == "--vary"] == [
        "block_size=16,32",
        "max_num_seqs",
    ]
    assert "--strategy" not in words, "what is usual is left out"


def test_the_load_that_was_found_is_named() -> None:
    assert "--rate 3.142" in command_of(Job(), rate=3.14159)
    assert "--concurrency 8" in command_of(Job(), concurrency=8)
    assert "--rate 1.0" in command_of(Job(rate=1.0), rate=3.0)
