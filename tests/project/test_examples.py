"""The jobs in docs/examples: they parse, and every option in them is one that ``vtune`` has."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import typer
import yaml
from pages import ROOT

import vtune_cli
from servers.slo.objective import parse_slo
from tuner.study.budget import parse_seconds
from tuner.workers.storage import mask

EXAMPLES = ROOT / "docs" / "examples"
SLURM, KUBERNETES = EXAMPLES / "vtune-slurm.sh", EXAMPLES / "vtune-kubernetes.yaml"


def check(words: Sequence[str]) -> dict[str, str]:
    """The options of ``vtune optimize …``, each of which exists and has a value that can be read."""
    assert list(words[:2]) == ["vtune", "optimize"]
    command: Any = typer.main.get_command(vtune_cli.app)
    known = {name for parameter in command.commands["optimize"].params for name in parameter.opts}
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert set(options) <= known
    parse_slo(options["--slo"])
    parse_seconds(options["--budget"], "--budget")
    assert options["--study"], "without it every worker would make a study of its own"
    return options


def test_the_slurm_job() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text()
    line = re.search(r"^vtune optimize.*?[^\\]$", text, re.M | re.S)
    assert line is not None
    check(shlex.split(line.group().replace("\\\n", " ")))
    storage = re.search(r'^export VTUNE_STORAGE="(.*)"$', text, re.M)
    assert storage is not None
    assert mask(storage.group(1)) == storage.group(1), "no password in a script"
    assert int(re.findall(r"--array=0-(\d+)", text)[0]) > 0


def test_the_kubernetes_job() -> None:
    secret, job = yaml.safe_load_all(KUBERNETES.read_text())
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    check(container["command"])
    variables = {item["name"]: item["valueFrom"] for item in container["env"]}
    reference = variables["VTUNE_STORAGE"]["secretKeyRef"]
    assert reference["name"] == secret["metadata"]["name"]
    assert secret["stringData"][reference["key"]].startswith("postgresql+psycopg://")
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}


def test_the_variable_is_the_one_that_the_command_reads() -> None:
    command: Any = typer.main.get_command(vtune_cli.app)
    storage = next(p for p in command.commands["optimize"].params if "--storage" in p.opts)
    assert storage.envvar in ("VTUNE_STORAGE", ["VTUNE_STORAGE"])
