"""What another release changes for a command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from servers.command import parse_command
from servers.errors import UserError
from servers.release_changes import Change, ReleaseChanges, release_changes
from vtune_cli import app


def changed(command: str, older: str, newer: str) -> ReleaseChanges:
    return release_changes(parse_command(command), older, newer)


def test_a_flag_that_is_gone_is_refused_where_it_is_given() -> None:
    used = changed("vllm serve M --swap-space 4 --max-num-seqs 64", "0.10.2", "0.32.0")
    assert len(used.refused) == 1
    assert "no --swap-space (releases from 0.6.0 to 0.17.1 have)" in used.refused[0]
    assert "--swap-space" not in used.flags_gone
    unused = changed("vllm serve M", "0.10.2", "0.32.0")
    assert unused.refused == ()
    assert "--swap-space" in unused.flags_gone


def test_defaults_count_where_the_command_leaves_them_alone() -> None:
    memory = Change("--gpu-memory-utilization", "0.9", "0.92")
    assert memory in changed("vllm serve M", "0.10.2", "0.32.0").defaults
    given = changed("vllm serve M --gpu-memory-utilization 0.8", "0.10.2", "0.32.0").defaults
    assert all(change.name != memory.name for change in given)


def test_metrics_that_are_gone_name_what_tells_the_same() -> None:
    found = changed("vllm serve M", "0.10.2", "0.32.0")
    gone = {change.name: change.after for change in found.metrics_gone}
    assert gone["vllm:gpu_cache_usage_perc"] == "gone; vllm:kv_cache_usage_perc instead"
    assert "vllm:request_num_preemptions" in found.metrics_new
    hidden = {
        change.name: change.after for change in changed("vllm serve M", "0.10.2", "0.14.1").metrics_gone
    }
    assert hidden["vllm:time_per_output_token_seconds"].startswith("shown with --show-hidden-metrics")


def test_a_renamed_flag_is_said_by_its_new_name() -> None:
    found = changed("python -m sglang.launch_server --model-path M --cuda-graph-max-bs 64", "0.5.9", "0.5.23")
    assert found.refused == ("SGLang 0.5.23 has no --cuda-graph-max-bs: write --cuda-graph-max-bs-decode",)
    assert "--data-parallel-size" not in found.flags_gone, "another form of --dp-size"


def test_the_same_release_changes_nothing() -> None:
    found = changed("vllm serve M --max-num-seqs 64", "0.18.1", "0.18.1").to_json()
    assert all(not found[part] for part in found.keys() - {"server", "older", "newer"})


@pytest.mark.parametrize("version", ["0.5.0", "99.0", "new"])
def test_a_release_that_is_not_known_is_refused(version: str) -> None:
    with pytest.raises(UserError, match=r"is not known|is no release"):
        changed("vllm serve M", "0.10.2", version)


def test_the_command_prints_both_formats_and_fails_where_a_flag_is_gone() -> None:
    words = ["changed", "0.10.2", "0.32.0", "--flags", "vllm serve M --swap-space 4"]
    text, document = CliRunner().invoke(app, words), CliRunner().invoke(app, [*words, "--format", "json"])
    assert (text.exit_code, document.exit_code) == (1, 1)
    assert "Refused of your command (1):\n  vLLM 0.32.0 has no --swap-space" in text.output
    assert json.loads(document.output)["refused"]
