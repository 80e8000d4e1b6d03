"""``--workload FILE``: request classes of your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.commands.options import Load
from loadgen.plan.arrivals import Poisson
from loadgen.plan.workload import WorkloadError, preset
from loadgen.plan.workload_file import is_file, read_workload, workload_of
from vtune_cli import app

CLASSES = [
    {"name": "question", "weight": 4, "prompt": {"mean": 300, "spread": 0.5}, "output": 80},
    {"name": "document", "prompt": 2000, "output": 200, "shared_prefix": 1000, "prefix_groups": 2},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path, {"classes": CLASSES})


def written(folder: Path, data: Any) -> Path:
    path = folder / "support.json"
    path.write_text(json.dumps(data))
    return path


def test_classes_and_lengths_are_those_of_the_file(path: Path) -> None:
    workload = workload_of(str(path), max_model_len=4096)
    assert (workload.name, [cls.name for cls in workload.classes]) == ("support", ["question", "document"])
    requests = workload.schedule(seed=1, arrival=Poisson(5), num_requests=60).requests
    questions = [len(r.prompt_token_ids or ()) for r in requests if r.cls == "question"]
    documents = [r.prompt_token_ids or () for r in requests if r.cls == "document"]
    assert len(questions) == 4 * len(documents)
    assert 150 <= min(questions) < max(questions) <= 450
    assert {len(prompt) for prompt in documents} == {2000}
    assert len({prompt[:1000] for prompt in documents}) == 2


def test_lengths_are_scaled_only_when_asked(path: Path) -> None:
    half = workload_of(str(path), max_model_len=4096, scale=0.5)
    assert [cls.prompt.mean for cls in half.classes] == [150, 1000]
    assert half.classes[1].shared_prefix == 500
    with pytest.raises(WorkloadError, match=r"class document: .* exceed the context of 1024"):
        workload_of(str(path), max_model_len=1024)


def test_a_presets_name_is_a_preset(path: Path) -> None:
    assert not is_file("mixed")
    assert workload_of("mixed", max_model_len=8192) == preset("mixed", max_model_len=8192)


def test_bench_takes_the_file_too(path: Path) -> None:
    schedule = Load(rate=5.0, num_requests=20, workload=str(path)).source(4096)(0)
    assert {r.cls for r in schedule.requests} == {"question", "document"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "write"),
        ({"classes": []}, "write"),
        ({"classes": [3]}, "class 1: no JSON object"),
        ({"classes": [{**CLASSES[0], "wait": 3}]}, "class 1, key 'wait': unknown"),
        ({"classes": [{**CLASSES[0], "name": ""}]}, "key 'name'"),
        ({"classes": [{**CLASSES[0], "weight": "4"}]}, "key 'weight': '4' is no number"),
        ({"classes": [{**CLASSES[0], "weight": 0}]}, "weight 0 must be positive"),
        ({"classes": [{**CLASSES[0], "priority": 1.5}]}, "key 'priority': 1.5 is no whole number"),
        ({"classes": [{**CLASSES[0], "prompt": None}]}, "key 'prompt': None is no length"),
        ({"classes": [{**CLASSES[0], "output": {"mean": 3, "low": 1}}]}, "key 'output'"),
        ({"classes": [{**CLASSES[0], "output": True}]}, "key 'output'"),
        ({"classes": [CLASSES[0], CLASSES[0]]}, "two classes of one name"),
        ({"classes": [{**CLASSES[1], "shared_prefix": 2000}]}, "shared prefix"),
    ],
)
def test_a_wrong_file_is_told_by_class_and_key(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=message):
        read_workload(written(tmp_path, data))


def test_no_json_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(WorkloadError, match="no JSON"):
        read_workload(tmp_path / "broken.json")
    with pytest.raises(WorkloadError, match="cannot be read"):
        workload_of(str(tmp_path / "none.json"), max_model_len=4096)


def test_the_options_of_a_trace_come_after_the_commands_own() -> None:
    text = CliRunner().invoke(app, ["bench", "run", "--help"], env={"COLUMNS": "200"}).output
    assert text.index("--rate ") < text.index("--trace-columns")
