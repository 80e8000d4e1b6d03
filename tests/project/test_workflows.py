"""The action and the workflows: they parse, name real commands, and put no input into a shell line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import vtune_cli

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [
    path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"
]
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
SCRIPTS = [step["run"] for step in STEPS if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_there_is(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for step in (step for job in jobs.values() for step in job["steps"]):
        for target in re.findall(r"\bmake (?:-C base )?(\w+)", step.get("run", "")):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target
        if step.get("uses") == "./":
            assert set(step["with"]) <= set(ACTION["inputs"])
            assert (ROOT / step["with"]["counters"]).is_file()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_ones_that_github_shows(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert set(form) == {"name", "description", "labels", "body"}
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
    for part in form["body"]:
        assert part["type"] in ("input", "textarea")
        assert set(part) <= {"type", "id", "attributes", "validations"}
        assert part["attributes"]["label"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_inputs_reach_a_script_through_its_environment_only(script: str) -> None:
    assert "${{" not in script


@pytest.mark.parametrize("step", [step for step in STEPS if "env" in step], ids=lambda step: step["name"])
def test_every_variable_of_a_script_is_set(step: dict[str, Any]) -> None:
    local = set(re.findall(r"^\s*(?:read -ra )?(\w+)(?:\+?=| <<<)", step["run"], re.M))
    used = set(re.findall(r"\$\{?(\w+)", step["run"]))
    assert used - local - {"GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"} <= set(step["env"])


@pytest.mark.parametrize("command", ["compare", "counters"])
def test_options_in_the_action_exist(command: str) -> None:
    tree: Any = typer.main.get_command(vtune_cli.app)
    known = {name for p in tree.commands["bench"].commands[command].params for name in p.opts}
    script = next(script for script in SCRIPTS if f"vtune bench {command}" in script)
    used = set(re.findall(r"--[a-z-]+", script))
    assert used <= known
    defaults = {name: spec.get("default", "") for name, spec in ACTION["inputs"].items()}
    load = defaults["load"] if command == "compare" else defaults["counters-load"]
    assert {word for word in load.split() if word.startswith("--")} <= known


def test_the_workflow_counts_what_make_gate_counts() -> None:
    """The same options as in the Makefile, and the committed baseline is of just these flags."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "bench.yml").read_text())
    inputs = workflow["jobs"]["bench"]["steps"][-1]["with"]
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    made = re.search(r"^GATE := (.*)$", text, re.M)
    assert made is not None
    words = shlex.split(made[1])
    flags = words.pop(words.index("--flags") + 1)
    words.remove("--flags")
    assert inputs["counters-load"].split() == words
    assert inputs["counters-flags"].split() == flags.split()
    baseline = json.loads((ROOT / "benchmarks" / "baselines" / "counters.json").read_text())
    assert baseline["flags"]["max_num_batched_tokens"] == 96
    assert baseline["preemptions"] > 0
    assert baseline["prefix_hits"] > 0
