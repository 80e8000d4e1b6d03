"""A config as something to type: the bundled engine, ``vllm serve``, Docker, Kubernetes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servers.flags.words import render

BUNDLED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the bundled model is called where vLLM gets it from."""
VLLM_IMAGE = "vllm/vllm-openai:latest"
BUNDLED_ONLY = frozenset({"device_memory"})
"""Flags of the bundled engine that vLLM does not know."""


@dataclass(frozen=True)
class Launch:
    """Commands that start one config."""

    target: str
    """As it was measured."""
    bundled: str
    vllm: str
    docker: str
    kubernetes: str
    """The ``image`` and ``args`` of a container, as YAML."""


def launch(measured: str, model: str, flags: Mapping[str, Any]) -> Launch:
    """``measured``: the target's own command; ``flags``: those that are given (see ``tuner.space.space``)."""
    hub_model = BUNDLED_HUB_ID if model == "bundled" else model
    portable = render({name: value for name, value in flags.items() if name not in BUNDLED_ONLY})
    docker = ["docker", "run", "--gpus", "all", "--ipc=host", "-p", "8000:8000", VLLM_IMAGE]
    return Launch(
        target=measured,
        bundled=shlex.join(["vtune", "serve", model, *render(flags)]),
        vllm=shlex.join(["vllm", "serve", hub_model, *portable]),
        docker=shlex.join([*docker, "--model", hub_model, *portable]),
        kubernetes=_container(["--model", hub_model, *portable]),
    )


def _container(words: list[str]) -> str:
    """JSON strings are YAML strings, whatever is in them."""
    args = "\n".join(f"  - {json.dumps(word)}" for word in words)
    return f"image: {VLLM_IMAGE}\nargs:\n{args}"
