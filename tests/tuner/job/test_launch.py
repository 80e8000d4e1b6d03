import shlex

import yaml

from servers.command import parse_command
from tuner.job.launch import launch

FLAGS = {
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": False,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "device_memory": 1 << 30,
}
PORTABLE = {name: value for name, value in FLAGS.items() if name != "device_memory"}


def test_every_form_carries_the_same_flags() -> None:
    commands = launch("measured", "bundled", FLAGS)
    assert commands.target == "measured"
    assert parse_command(commands.bundled).flags == FLAGS
    assert parse_command(commands.vllm).flags == PORTABLE
    assert parse_command(commands.docker).flags == PORTABLE
    container = yaml.safe_load(commands.kubernetes)
    assert parse_command(shlex.join(container["args"])).flags == PORTABLE


def test_the_bundled_model_has_a_name_that_vllm_knows() -> None:
    commands = launch("measured", "bundled", {})
    assert parse_command(commands.bundled).model == "bundled"
    assert parse_command(commands.vllm).model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_words_are_quoted() -> None:
    commands = launch("measured", "my model; rm -rf /", {})
    assert parse_command(commands.vllm).model == "my model; rm -rf /"
    assert "my model; rm -rf /" in yaml.safe_load(commands.kubernetes)["args"]
