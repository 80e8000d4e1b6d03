"""vLLM's flags in SGLang's words, and back."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.target import StartFailed
from loadgen.targets.server import ServerTarget
from servers.command import parse_command
from servers.flags.words import FlagError
from servers.kinds import KINDS, SGLANG, find_start
from servers.kinds.sglang import NAMES


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_num_seqs": 64}, "--max-running-requests 64"),
        ({"max_num_batched_tokens": 4096}, "--chunked-prefill-size 4096"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}, "--chunked-prefill-size -1"),
        ({"enable_chunked_prefill": True}, ""),
        ({"gpu_memory_utilization": 0.85}, "--mem-fraction-static 0.85"),
        ({"enable_prefix_caching": False}, "--disable-radix-cache"),
        ({"enable_prefix_caching": True}, ""),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8_e4m3"),
        ({"tensor_parallel_size": 2}, "--tp-size 2"),
        ({"max_model_len": 8192, "block_size": 64}, "--context-length 8192 --page-size 64"),
        ({"enforce_eager": True}, "--disable-cuda-graph"),
        (
            {"scheduling_policy": "priority"},
            "--enable-priority-scheduling --schedule-low-priority-values-first",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5",
        ),
        (
            {"speculative_config": {"method": "eagle3", "model": "D", "num_speculative_tokens": 3}},
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path D --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        ),
        ({"speculative_config": None}, ""),
        ({"schedule_conservativeness": 0.3}, "--schedule-conservativeness 0.3"),
    ],
)
def test_spelling(flags: dict[str, object], words: str) -> None:
    assert " ".join(SGLANG.spelling.render(flags)) == words


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"long_prefill_token_threshold": 256}, "--long-prefill-token-threshold: SGLang has no such flag"),
        ({"speculative_config": {"method": "suffix"}}, "no method 'suffix'"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}},
            "nothing like 'prompt_lookup_max'",
        ),
    ],
)
def test_what_sglang_does_not_have_is_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(FlagError, match=says):
        SGLANG.spelling.render(flags)
    with pytest.raises(StartFailed, match=says) as caught, ServerTarget.of(SGLANG, "M").open(flags):
        pass
    assert caught.value.reason == "bad_flag"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(
                sorted(set(NAMES) - {"kv_cache_dtype", "scheduling_policy", "max_num_batched_tokens"}),
                st.integers(1, 9),
            ),
            "max_num_batched_tokens": st.integers(1, 9999),
            "enable_prefix_caching": st.just(False),
            "enforce_eager": st.just(True),
            "scheduling_policy": st.sampled_from(["priority", "fcfs"]),
            "kv_cache_dtype": st.sampled_from(["auto", "fp8_e4m3"]),
            "speculative_config": st.fixed_dictionaries(
                {
                    "method": st.sampled_from(["eagle", "draft_model"]),
                    "num_speculative_tokens": st.integers(1, 9),
                    "model": st.just("D"),
                }
            ),
            "schedule_conservativeness": st.floats(0.1, 2),
        },
    )
)
def test_there_and_back(flags: dict[str, object]) -> None:
    assert SGLANG.spelling.from_own(SGLANG.spelling.to_own(flags)) == flags


def test_launch_commands() -> None:
    target = ServerTarget.of(SGLANG, "org/model")
    command = target.launch_command({"max_num_seqs": 8, "enable_prefix_caching": False})
    assert command == (
        "python -m sglang.launch_server --model-path org/model --enable-metrics --max-running-requests 8 "
        "--disable-radix-cache --port 8000"
    )
    assert target.exclusive
    mine = ServerTarget("CUDA_VISIBLE_DEVICES=1 python3 -m sglang.launch_server --model-path 'a b' {flags}")
    assert mine.launch_command({"max_num_seqs": 8}) == (
        "CUDA_VISIBLE_DEVICES=1 python3 -m sglang.launch_server --model-path 'a b' --max-running-requests 8 "
        "--port 8000"
    )


def test_a_command_is_read_in_vllms_names() -> None:
    command = parse_command(
        "python -m sglang.launch_server --model-path M --tp 2 --max-running-requests 64 "
        "--disable-radix-cache --mem-fraction-static 0.8 --schedule-conservativeness 0.5 --port 30000"
    )
    assert (command.kind, command.model) == (SGLANG, "M")
    assert command.flags == {
        "tensor_parallel_size": 2,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.8,
        "schedule_conservativeness": 0.5,
        "port": 30000,
    }
    assert str(command.with_flags({"max_num_seqs": 32, "port": None})) == (
        "python -m sglang.launch_server --model-path M --tp-size 2 --max-running-requests 32 "
        "--disable-radix-cache --mem-fraction-static 0.8 --schedule-conservativeness 0.5"
    )
    assert parse_command("sglang serve --model-path M --context-length 4096").flags == {"max_model_len": 4096}


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("vtune serve bundled {flags}", "bundled"),
        ("/opt/bin/vllm serve M {flags}", "vllm"),
        ("numactl -N 0 vllm serve M {flags}", "vllm"),
        ("python -m vllm.entrypoints.openai.api_server --model M {flags}", "vllm"),
        ("python -m sglang.launch_server --model-path M {flags}", "sglang"),
        ("sglang serve --model-path M {flags}", "sglang"),
        ("my-server {flags} --port {port}", ""),
    ],
)
def test_whose_server_a_template_starts(template: str, kind: str) -> None:
    found = find_start(shlex.split(template))
    assert (found and found.kind) == KINDS.get(kind)
