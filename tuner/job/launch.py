"""A config as something to type: the bundled engine, ``vllm serve``, Docker, Kubernetes."""

from __future__ import annotations

import math
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from servers.flags.words import render, vocabulary
from servers.kind import ServerKind
from servers.kinds import BUNDLED, VLLM
from servers.kinds.bundled import UNKNOWN_TO_VLLM

BUNDLED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the bundled model is called where vLLM gets it from."""
GPU_IMAGE, CPU_IMAGE = "vllm/vllm-openai", "vllm/vllm-openai-cpu"
PORT = 8000
MOUNTED = "/model"
"""Where a container finds a local checkpoint."""
_RELEASE = re.compile(r"(\d+\.\d+\.\d+(?:\.post\d+)?)(\+cpu)?")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Each GPU of a server is one of these, in their product."""


@dataclass(frozen=True)
class Launch:
    """Commands that start one config."""

    target: str
    """As it was measured."""
    bundled: str
    vllm: str
    docker: str
    kubernetes: str
    """A Deployment and its Service, as YAML."""
    checked: str
    """A sentence on what the image's version rests on."""


@dataclass(frozen=True)
class _Image:
    name: str
    cpu: bool
    checked: str

    @classmethod
    def of(cls, version: str) -> _Image:
        """``version``: of the vLLM that was measured; "": it was another server."""
        release = _RELEASE.fullmatch(version)
        cpu = version.endswith("+cpu")
        tag = f"v{release[1]}" if release else "latest"
        said = "No vLLM was measured: the lines for vLLM and its latest image are not checked."
        if release:
            said = f"The image is of vLLM {release[1]}, which was measured here."
        elif version:
            said = f"vLLM {version} was measured and is no release: the latest image is not checked."
        if cpu:
            machine = "x86_64" if platform.machine() in ("x86_64", "AMD64") else "arm64"
            return cls(f"{CPU_IMAGE}:{tag}-{machine}", cpu, said)
        return cls(f"{GPU_IMAGE}:{tag}", cpu, said)


def launch(
    measured: str, model: str, flags: Mapping[str, Any], kind: ServerKind = VLLM, version: str = ""
) -> Launch:
    """``measured``: the target's own command; ``flags``: those that are given (see ``tuner.space.space``) to
    a server of ``kind``; ``version``: the measured vLLM's, "" where no vLLM was measured.

    The line of a server leaves out flags that it does not have.
    """
    hub_model = BUNDLED_HUB_ID if model == "bundled" else model
    kept = {name: value for name, value in flags.items() if _vllm_has(name, kind)}
    portable = render(kept)
    own = render({name: value for name, value in flags.items() if BUNDLED.has(name)})
    image, local = _Image.of(version), _local(hub_model)
    inside = ["--model", _inside(local) if local else hub_model, *portable]
    docker = ["docker", "run", *([] if image.cpu else ["--gpus", "all"]), "--ipc=host"]
    docker += ["-p", f"{PORT}:{PORT}", *(["-v", f"{local}:{_inside(local)}"] if local else []), image.name]
    manifest = _manifest(image, inside, local, math.prod(int(kept.get(name, 1)) for name in _PARALLEL))
    return Launch(
        target=measured,
        bundled=shlex.join(["vtune", "serve", model, *own]),
        vllm=shlex.join(["vllm", "serve", hub_model, *portable]),
        docker=shlex.join([*docker, *inside]),
        kubernetes=yaml.safe_dump_all(manifest, sort_keys=False, width=1000),
        checked=image.checked,
    )


def _vllm_has(flag: str, kind: ServerKind) -> bool:
    """Whether vLLM has a flag that a server of ``kind`` was given."""
    if kind is VLLM:
        return True
    return flag not in UNKNOWN_TO_VLLM if kind is BUNDLED else flag in vocabulary(VLLM.name).kinds


def _local(model: str) -> Path | None:
    """A checkpoint on this machine, as a path that holds anywhere on it; None for a hub id."""
    path = Path(model).expanduser()
    return path.resolve() if path.exists() else None


def _inside(local: Path) -> str:
    """The checkpoint's path in a container. A file keeps its name, for its ending tells its format."""
    return MOUNTED if local.is_dir() else f"{MOUNTED}/{local.name}"


def _manifest(image: _Image, words: Sequence[str], local: Path | None, gpus: int) -> list[dict[str, Any]]:
    """A Deployment of one server, and the Service in front of it."""
    labels = {"app": "vllm"}
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image.name,
        "args": list(words),
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}},
    }
    if not image.cpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if local:
        mounts.append({"name": "model", "mountPath": _inside(local)})
        on_node = {"path": str(local), "type": "Directory" if local.is_dir() else "File"}
        volumes.append({"name": "model", "hostPath": on_node})
    pod = {"containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm", "labels": dict(labels)},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": dict(labels)},
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "vllm"},
        "spec": {"selector": dict(labels), "ports": [{"port": PORT, "targetPort": PORT}]},
    }
    return [deployment, service]
