"""Commands as people show them: each is read right, or refused with what to write instead."""

import json
from pathlib import Path
from typing import Any

import pytest

from servers.command import parse_command
from servers.flags.words import FlagError

HERE = Path(__file__).parent / "launch"
SHOWN = json.loads((HERE / "commands.json").read_text())
REFUSED = {
    "abbreviated": "--kv-cache is short for several flags",
    "tgi": "which vLLM does not. Which server is it?",
}


def read(command: str) -> dict[str, Any]:
    flags = dict(parse_command(command).flags)
    drafts = flags.get("speculative_config")
    if isinstance(drafts, dict):
        flags["num_speculative_tokens"] = drafts.get("num_speculative_tokens")
    return flags


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown["id"])
def test_public_forms(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    if reason := REFUSED.get(shown["id"]):
        with pytest.raises(FlagError, match=reason.replace("?", r"\?")):
            parse_command(shown["cmd"])
        return
    flags = read(shown["cmd"])
    assert {name: flags.get(name) for name in shown["want"]} == shown["want"]


KUBERNETES = """
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      initContainers:
        - {name: download, image: busybox, command: [sh, -c, "echo hello"]}
      containers:
        - name: server
          image: vllm/vllm-openai:v0.18.1
          command: ["vllm", "serve", "m/8b"]
          args:
            - --max-num-seqs=96
            - --max-num-batched-tokens
            - "$(TOKENS)"
          env:
            - {name: TOKENS, value: "4096"}
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: s, key: k}}}
"""
COMPOSE = """
services:
  web: {image: nginx, ports: ["80:80"]}
  vllm:
    image: vllm/vllm-openai:latest
    environment: {VLLM_LOGGING_LEVEL: INFO}
    command: --model m/8b --max-num-seqs ${SEQS:-48}
"""
UNIT = """[Service]
Environment=VLLM_LOGGING_LEVEL=INFO
ExecStart=/opt/v/bin/vllm serve m/8b \\
  --max-num-seqs 64
Restart=always
"""


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (KUBERNETES, {"max_num_seqs": 96, "max_num_batched_tokens": 4096}),
        (COMPOSE, {"max_num_seqs": 48}),
        (UNIT, {"max_num_seqs": 64}),
        ("bash -c 'cd /srv && exec vllm serve m --max-num-seqs 8'", {"max_num_seqs": 8}),
        (
            "docker run --gpus all --entrypoint bash i:1 -lc 'pip install x && vllm serve m -tp4'",
            {"tensor_parallel_size": 4},
        ),
        ("docker run --entrypoint vllm i:1 serve m --max-num-seqs 8", {"max_num_seqs": 8}),
        ("docker run --entrypoint=python3 i:1 -m vllm.entrypoints.openai.api_server --model m -tp 2",
         {"tensor_parallel_size": 2}),
        ("docker run vllm/vllm-openai:v0.18.1 vllm serve m --max-num-seqs 8", {"max_num_seqs": 8}),
        ("podman run my/own:1 --model m --max-num-seqs 8", {"max_num_seqs": 8}),
        ("docker run lmsysorg/sglang:v1 python3 -m sglang.launch_server --model-path m --tp 2",
         {"tensor_parallel_size": 2}),
        ("export SEQS=12\nvllm serve m --max-num-seqs $SEQS", {"max_num_seqs": 12}),
        ("TP=2 vllm serve m -tp ${TP} --max-model-len 32k",
         {"tensor_parallel_size": 2, "max_model_len": 32000}),
        ("# a server\ncd /srv\nvllm serve m \\\n  --max-num-seqs 8", {"max_num_seqs": 8}),
        ("vllm serve m --max-num-seqs 8 >> log.txt 2>&1 & disown", {"max_num_seqs": 8}),
        ("vllm serve m --max-num-seqs 8; echo done", {"max_num_seqs": 8}),
        ("vllm serve m -dpl 2 -dp8 --spec-method ngram --spec-tokens 3",
         {"data_parallel_size": 8, "data_parallel_size_local": 2, "num_speculative_tokens": 3}),
        ("vllm serve m --speculative-config “{\"method\": \"ngram\", \"num_speculative_tokens\": 2}”",
         {"num_speculative_tokens": 2}),
        ("vllm serve m --max-num-batched 4096", {"max_num_batched_tokens": 4096}),
        ("python -m sglang.launch_server --model m --tp 2", {"tensor_parallel_size": 2}),
        ("docker run vllm/vllm-openai:v0.9.0 --model m --kv-cache fp8", {"kv_cache_dtype": "fp8"}),
        ("vllm serve m -O'{\"mode\": 3}' --max-num-seqs 1_024", {"max_num_seqs": 1024}),
        ("vllm serve m --no-enable-prefix-cach", {"enable_prefix_caching": False}),
    ],
)  # fmt: skip
def test_other_forms(command: str, flags: dict[str, Any]) -> None:
    found = read(command)
    assert {name: found.get(name) for name in flags} == flags


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("vllm serve a --port 1 & vllm serve b --port 2", "several servers are started there"),
        ("services:\n  a: {image: vllm/vllm-openai, command: --model m}\n"
         "  b: {image: vllm/vllm-openai, command: --model n}\n",
         r"several servers are started there \(a, b\)"),
        ("services:\n  web: {image: nginx}\n", "no server is named"),
        ("vllm serve --config nowhere.yaml", "--config nowhere.yaml: cannot be read here"),
        ("@nowhere.yaml", "the file with the command nowhere.yaml: cannot be read here"),
        ("vllm serve m --max-num-sequences 8", "vLLM has no such flag. Is --max-num-seqs meant"),
        ("vllm serve m --max-num-seqs $SEQS", r"what \$\{SEQS\} stands for is not known here"),
        ("a: [1", "neither a command nor YAML"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(command: str, reason: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlagError, match=reason):
        parse_command(command)


def test_a_file_may_hold_the_command(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(COMPOSE)
    assert parse_command(f"@{path}").flags["max_num_seqs"] == 48


def test_a_command_line_outranks_its_config_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max-num-seqs: 8\nmax_num_batched_tokens: 2k\nenforce-eager: false\nmodel: m\n")
    found = parse_command(f"vllm serve --config {path} --max-num-seqs 9")
    assert found.flags == {"max_num_seqs": 9, "max_num_batched_tokens": 2000, "enforce_eager": False}
    assert found.model == "m"
