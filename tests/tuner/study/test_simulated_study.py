"""A whole study on a simulated GPU: through the command, in simulated seconds."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from llama_8b import CONFIG

from tuner.command import run
from tuner.job.options import Options, Place
from tuner.session.new_job import requested_job
from tuner.study.optimize import Optimizer
from tuner.study.target import TargetError, make_target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def study(model: str, out: Path, **more: Any) -> tuple[dict[str, Any], str]:
    """Its report, and what it printed."""
    options = Options(
        target="simulated:h100",
        model=model,
        slo="itl_es99<35ms",
        rate=20.0,
        run_time="5s",
        trials=2,
        pairs=2,
        fix=["all"],
        vary=["max_num_batched_tokens=512,1024"],
        place=Place(out=out),
        **more,
    )
    with redirect_stdout(io.StringIO()) as printed:
        assert run(options) == 0
    return json.loads((out / "report.json").read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies") / "a"


@pytest.fixture(scope="module")
def studied(model: str, place: Path) -> tuple[dict[str, Any], str]:
    return study(model, place)


def test_a_study_finds_the_smaller_budget_and_says_that_it_is_an_estimate(
    model: str, studied: tuple[dict[str, Any], str]
) -> None:
    report, printed = studied
    assert report["verdict"] == "better"
    before, after = report["changes"]["max_num_batched_tokens"]
    assert (before, after < before) == (8192, True)
    assert report["sentence"].startswith("ESTIMATE: ")
    assert "roofline of H100 SXM" in report["estimate"]
    assert any(caveat.startswith("ESTIMATE") for caveat in report["caveats"])
    assert report["confirmation"]["pairs"] == 2
    assert printed.startswith("ESTIMATE: ")
    assert "launch with: vllm serve" in printed
    assert "--max-num-seqs 1024" in report["rollback"]["target"], "the device's default is named"
    folder = Path(model).parent  # a server takes no config.json for a model
    assert all(f" {folder} " in report["launch"][form] for form in ("vllm", "bundled"))
    assert f" -v {folder}:/model " in report["launch"]["docker"]


def test_a_study_is_the_same_each_time_and_its_seconds_are_simulated(
    model: str, studied: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    first, second = studied[0], study(model, tmp_path / "b")[0]
    for key in ("trials", "seconds", "sentence", "confirmation"):
        assert first[key] == second[key], key
    assert first["seconds"] > 2 * 2 * 5.0, "two pairs of runs of five seconds alone take as long"


def test_a_study_that_is_over_confirms_nothing_anew_while_its_report_is_there(
    studied: tuple[dict[str, Any], str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, printed = studied
    concluded: list[str] = []
    conclude = Optimizer.conclude

    def counted(self: Optimizer, ended: str) -> Any:
        concluded.append(ended)
        return conclude(self, ended)

    monkeypatch.setattr(Optimizer, "conclude", counted)
    again = Options(place=Place(study=report["study"], out=place))
    with redirect_stdout(io.StringIO()) as said:
        assert run(again) == 0
    assert (said.getvalue(), concluded) == (printed, [])
    (place / "report.html").unlink()
    with redirect_stdout(io.StringIO()):
        assert run(again) == 0
    assert len(concluded) == 1
    assert (place / "report.html").is_file()


def test_speculation_is_searched_only_when_asked_for() -> None:
    assert "speculative_config" in requested_job(Options(target="simulated:h100")).job.fix
    asked = requested_job(Options(target="simulated:h100", vary=["speculative_config"])).job
    assert "speculative_config" not in asked.fix


def test_defaults_are_the_devices() -> None:
    assert requested_job(Options(target="simulated:l40s")).job.flags["max_num_seqs"] == 256
    job = requested_job(Options(target="simulated:h100", flags="--max-num-seqs 64")).job
    assert (job.flags["max_num_seqs"], job.flags["max_num_batched_tokens"]) == (64, 8192)
    assert (job.server, job.budget) == ("vllm", 1800.0)
    assert requested_job(Options(target="simulated:bundled")).job.server == "bundled"


@pytest.mark.parametrize(
    "words", [{"target": "simulated:h900"}, {"target": "simulated:h100", "model": "/no"}]
)
def test_what_cannot_be_simulated_is_a_usage_error(words: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=next(reversed(words.values()))):
        make_target(requested_job(Options(**words)).job, tmp_path, 60.0)
