"""What is printed to start a config: it must start, and with these flags."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from servers.command import parse_command
from servers.kinds import BUNDLED, KINDS, VLLM
from servers.kinds.bundled import UNKNOWN_TO_VLLM
from tuner.job.launch import Launch, launch

PORTABLE = {
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": False,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}
OWN = {"device_memory": 1 << 30, "scheduler": "two-track", "preemption_mode": "swap", "swap_space": 4.0}
FLAGS = {**PORTABLE, **OWN}
OLD = {"max_num_partial_prefills": 2}
"""A flag that the bundled engine has, and older versions of vLLM."""


def manifest(commands: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    deployment, service = yaml.safe_load_all(commands.kubernetes)
    return deployment, service


def container(commands: Launch) -> dict[str, Any]:
    (only,) = manifest(commands)[0]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_every_form_carries_the_same_flags() -> None:
    commands = launch("measured", "bundled", FLAGS, BUNDLED)
    assert commands.target == "measured"
    assert parse_command(commands.bundled).flags == FLAGS
    assert parse_command(commands.vllm).flags == PORTABLE
    assert parse_command(commands.docker).flags == PORTABLE
    assert parse_command(shlex.join(container(commands)["args"])).flags == PORTABLE


def test_flags_that_vllm_does_not_have_are_known() -> None:
    """By what the parser of vLLM 0.32 has."""
    path = Path(__file__).parents[2] / "engine" / "server" / "vllm_defaults.json"
    vllm = {name.replace("-", "_") for name in json.loads(path.read_text())}
    assert BUNDLED.flags is not None
    assert BUNDLED.flags - vllm == UNKNOWN_TO_VLLM


@pytest.mark.parametrize(
    ("kind", "flags", "bundled", "vllm"),
    [
        ("vllm", OLD, OLD, OLD),
        ("vllm", {"tensor_parallel_size": 2}, {}, {"tensor_parallel_size": 2}),
        ("bundled", OLD, OLD, {}),
        ("sglang", {"max_num_seqs": 4, "schedule_policy": "lpm"}, {"max_num_seqs": 4}, {"max_num_seqs": 4}),
    ],
)  # fmt: skip
def test_each_line_has_only_flags_of_its_server(
    kind: str, flags: dict[str, Any], bundled: dict[str, Any], vllm: dict[str, Any]
) -> None:
    commands = launch("measured", "M", flags, KINDS[kind])
    assert parse_command(commands.bundled).flags == bundled
    assert parse_command(commands.vllm).flags == vllm
    assert parse_command(commands.docker).flags == vllm


def test_the_bundled_model_has_a_name_that_vllm_knows() -> None:
    commands = launch("measured", "bundled", {})
    assert parse_command(commands.bundled).model == "bundled"
    assert parse_command(commands.vllm).model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "-v" not in shlex.split(commands.docker)
    assert [v["name"] for v in manifest(commands)[0]["spec"]["template"]["spec"]["volumes"]] == ["shm"]


def test_words_are_quoted() -> None:
    words = {"served_model_name": ["yes", "it's 'it'"], "revision": "1e3"}
    commands = launch("measured", "my model; rm -rf /", words)
    assert parse_command(commands.vllm).model == "my model; rm -rf /"
    assert parse_command(commands.docker).model == "my model; rm -rf /"
    for line in (commands.vllm, commands.docker, shlex.join(container(commands)["args"])):
        assert parse_command(line).flags == words
    assert all(isinstance(word, str) for word in container(commands)["args"])


def test_a_local_checkpoint_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    commands = launch("measured", "my model", {})
    docker = shlex.split(commands.docker)
    assert docker[docker.index("-v") + 1] == f"{tmp_path}/my model:/model"
    assert parse_command(commands.docker).model == "/model"
    (mount,) = [m for m in container(commands)["volumeMounts"] if m["name"] == "model"]
    (_, volume) = manifest(commands)[0]["spec"]["template"]["spec"]["volumes"]
    assert container(commands)["args"][:2] == ["--model", mount["mountPath"]]
    assert volume["hostPath"] == {"path": f"{tmp_path}/my model", "type": "Directory"}


def test_a_local_file_keeps_its_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    commands = launch("measured", str(path), {})
    assert f"{path}:/model/m.gguf" in shlex.split(commands.docker)
    assert parse_command(commands.docker).model == "/model/m.gguf"
    (_, volume) = manifest(commands)[0]["spec"]["template"]["spec"]["volumes"]
    assert volume["hostPath"] == {"path": str(path), "type": "File"}


@pytest.mark.parametrize(
    ("version", "tag", "checked"),
    [
        ("0.32.0", ":v0.32.0", "is of vLLM 0.32.0, which was measured"),
        ("0.32.0+cpu", ":v0.32.0-", "is of vLLM 0.32.0, which was measured"),
        ("0.33.1.dev5+gabc", ":latest", "is no release: the latest image is not checked"),
        ("", ":latest", "No vLLM was measured"),
    ],
)
def test_the_image_is_of_the_version_that_was_measured(version: str, tag: str, checked: str) -> None:
    commands = launch("measured", "M", {}, VLLM, version)
    image = parse_command(commands.docker).program
    assert tag in image
    assert container(commands)["image"] == image
    assert checked in commands.checked


@pytest.mark.parametrize("cpu", [False, True])
def test_only_a_gpu_server_asks_for_gpus(cpu: bool) -> None:
    flags = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    commands = launch("measured", "M", flags, VLLM, "0.32.0+cpu" if cpu else "0.32.0")
    limits = container(commands).get("resources", {}).get("limits")
    assert limits == (None if cpu else {"nvidia.com/gpu": 4})
    assert ("--gpus" in shlex.split(commands.docker)) is not cpu
    assert ("openai-cpu" in container(commands)["image"]) is cpu


def test_the_manifest_is_whole() -> None:
    deployment, service = manifest(launch("measured", "M", {}))
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert deployment["metadata"]["name"]
    assert service["metadata"]["name"]
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert labels
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (only,) = template["spec"]["containers"]
    (port,) = only["ports"]
    assert service["spec"]["ports"] == [{"port": 8000, "targetPort": port["containerPort"]}]
    named = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in only["volumeMounts"]} == named
