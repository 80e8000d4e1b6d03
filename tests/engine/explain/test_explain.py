"""``vtune explain``: worked examples as they are taught, the table, and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from engine.explain.explain import ExplainedStep, explain_steps
from engine.explain.explain_input import read_config, read_requests
from engine.explain.explain_table import budget_bar, describe_events, describe_share
from engine.step import AdmissionStop
from vtune_cli import app

Prompt = int | Sequence[int]


def config(**changes: Any) -> dict[str, Any]:
    small = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 128}
    return {**small, "num_gpu_blocks": 100, **changes}


def request(name: str, prompt: Prompt, output_len: int = 20, arrival_step: int = 0) -> dict[str, Any]:
    """A prompt given as a length shares no token with another request's."""
    tokens = (
        [1000 * ord(name[0]) + place for place in range(prompt)] if isinstance(prompt, int) else [*prompt]
    )
    return {"id": name, "prompt_token_ids": tokens, "output_len": output_len, "arrival_step": arrival_step}


def steps_of(raw_config: dict[str, Any], raw_requests: list[dict[str, Any]]) -> list[ExplainedStep]:
    setup = read_config(raw_config)
    return list(explain_steps(setup, read_requests(raw_requests, setup)))


def shares(step: ExplainedStep) -> dict[str, int]:
    return {share.request_id: share.num_tokens for share in step.shares}


def run(tmp_path: Path, raw_config: object, raw_requests: object, *options: str) -> Result:
    (tmp_path / "config.json").write_text(json.dumps(raw_config))
    (tmp_path / "requests.json").write_text(json.dumps(raw_requests))
    files = ["--config", str(tmp_path / "config.json"), "--requests", str(tmp_path / "requests.json")]
    return CliRunner().invoke(app, ["explain", *files, *options])


# ---------------------------------------------------------- worked examples

DECODING = [request("A", 1), request("B", 1)]


def test_a_budget_of_8_tokens_with_two_that_decode_and_two_that_arrive() -> None:
    steps = steps_of(config(max_num_seqs=4), [*DECODING, request("C", 10, 20, 1), request("D", 3, 20, 1)])
    assert [shares(step) for step in steps[1:4]] == [
        {"A": 1, "B": 1, "C": 6},
        {"A": 1, "B": 1, "C": 4, "D": 2},
        {"A": 1, "B": 1, "C": 1, "D": 1},
    ]
    assert [budget_bar(step) for step in steps[1:4]] == ["ddpppppp", "ddpppppp", "dddp...."]


def test_a_prompt_of_20_tokens_is_computed_beside_two_that_decode() -> None:
    steps = steps_of(config(), [*DECODING, request("C", 20, 20, 1)])
    assert [shares(step)["C"] for step in steps[1:5]] == [6, 6, 6, 2]
    assert all((shares(step)["A"], shares(step)["B"]) == (1, 1) for step in steps[1:5])


def test_an_adapter_without_a_slot_is_passed_over() -> None:
    raw = [request("A", 1, 2), request("B", 1, 2), request("C", 1, 2)]
    for item, adapter in zip(raw, ("sql", "chat", ""), strict=True):
        item["lora_name"] = adapter
    steps = steps_of(config(enable_lora=True), raw)
    assert [list(shares(step)) for step in steps] == [["A", "C"], ["A", "C"], ["B"], ["B"]]
    assert steps[0].plan.admission_stop is AdmissionStop.ADAPTERS


def test_a_finished_request_leaves_its_place_to_the_next_at_once() -> None:
    raw = [request(name, 1, length) for name, length in (("A", 4), ("B", 2), ("C", 3), ("D", 5))]
    steps = steps_of(config(max_num_seqs=4, max_num_batched_tokens=4), [*raw, request("E", 1, 3, 2)])
    assert shares(steps[1]) == {"A": 1, "B": 1, "C": 1, "D": 1}
    assert describe_events(steps[1]) == "finishes B"
    assert shares(steps[2]) == {"A": 1, "C": 1, "D": 1, "E": 1}


@pytest.mark.parametrize(
    ("max_num_seqs", "admitted", "bar", "stop"),
    [(3, "ABC", "pppppp..", AdmissionStop.SEQUENCES), (4, "ABCD", "pppppppp", AdmissionStop.BUDGET)],
)
def test_max_num_seqs_and_the_token_budget_both_bind(
    max_num_seqs: int, admitted: str, bar: str, stop: AdmissionStop
) -> None:
    steps = steps_of(config(max_num_seqs=max_num_seqs), [request(name, 2) for name in "ABCDE"])
    assert shares(steps[0]) == dict.fromkeys(admitted, 2)
    assert budget_bar(steps[0]) == bar
    assert steps[0].plan.admission_stop is stop


def test_chunked_prefill_on_a_long_prompt_takes_what_the_decodes_leave() -> None:
    steps = steps_of(config(max_num_seqs=4), [*DECODING, request("C", 10, 20, 1)])
    assert [shares(step) for step in steps[1:4]] == [
        {"A": 1, "B": 1, "C": 6},
        {"A": 1, "B": 1, "C": 4},
        {"A": 1, "B": 1, "C": 1},
    ]


def test_chunked_prefill_off_with_a_budget_below_max_model_len_is_refused(tmp_path: Path) -> None:
    # the same example is told with a budget of 8 and chunked prefill off, which no server starts with
    raw = config(max_num_seqs=4, enable_chunked_prefill=False)
    result = run(tmp_path, raw, [*DECODING, request("C", 10, 20, 1)])
    assert result.exit_code == 2
    assert "--max-num-batched-tokens 8: must be at least max_model_len (128) when chunked" in result.stderr
    assert "Fix: raise it to 128, lower --max-model-len, or drop --no-enable-chunked-prefill" in result.stderr


def test_chunked_prefill_off_a_prompt_waits_until_the_whole_of_it_fits() -> None:
    raw = config(max_num_seqs=4, enable_chunked_prefill=False, max_model_len=16, max_num_batched_tokens=16)
    requests = [request("A", 1, 4), request("B", 1, 12), request("C", 15, 1, 1), request("D", 2, 1, 1)]
    steps = steps_of(raw, requests)
    for step in steps[1:4]:  # 14 left for 15 tokens; D would fit, and does not overtake
        assert shares(step) == {"A": 1, "B": 1}
        assert step.plan.admission_stop is AdmissionStop.CHUNKING
        assert budget_bar(step) == "dd.............."
    assert shares(steps[4]) == {"B": 1, "C": 15}


def test_the_long_prefill_threshold_leaves_room_for_short_prompts() -> None:
    raw = config(max_num_batched_tokens=16)
    requests = [*DECODING, request("C", 100, 20, 1), request("D", 4, 20, 1), request("E", 4, 20, 1)]
    without = steps_of(raw, requests)[1]
    assert shares(without) == {"A": 1, "B": 1, "C": 14}
    limited = steps_of({**raw, "long_prefill_token_threshold": 4}, requests)[1]
    assert shares(limited) == {"A": 1, "B": 1, "C": 4, "D": 4, "E": 4}
    assert budget_bar(limited) == "ddpppppppppppp.."


def test_a_prefix_hit_comes_in_whole_blocks() -> None:
    # the example says 1000 of 1020 tokens are hit; with blocks of 16 it is 62 of them, 992 tokens
    shared = list(range(1000))
    raw = config(max_num_batched_tokens=512, max_model_len=2048)
    first, second = [*shared, *range(2000, 2020)], [*shared, *range(3000, 3020)]
    steps = steps_of(raw, [request("A", first, 1), request("B", second, 1, 2)])
    assert [shares(step) for step in steps] == [{"A": 512}, {"A": 508}, {"B": 28}]
    assert describe_events(steps[2]) == "admits B (992 cached); finishes B"
    raw["enable_prefix_caching"] = False
    steps = steps_of(raw, [request("A", first, 1), request("B", second, 1, 2)])
    assert [shares(step) for step in steps[2:]] == [{"B": 512}, {"B": 508}]


def test_a_pool_of_10_blocks_a_waiting_request_does_not_preempt_but_a_running_one_does() -> None:
    # the example has C, which waits, preempt B; the real scheduler lets C wait
    raw = config(max_num_batched_tokens=128, num_gpu_blocks=11, max_num_seqs=4)
    steps = steps_of(raw, [request("A", 60, 30), request("B", 60, 30), request("C", 60, 5, 1)])
    assert (steps[1].plan.preempted, steps[1].plan.free_blocks) == ((), 2)
    assert shares(steps[1]) == {"A": 1, "B": 1}
    assert steps[1].plan.admission_stop is AdmissionStop.BLOCKS
    pressed = next(step for step in steps if step.plan.preempted)
    before = steps[pressed.index - 1]
    assert before.plan.free_blocks == 0
    assert pressed.plan.preempted == ("B",)
    assert shares(pressed) == {"A": 1}
    assert describe_events(pressed).startswith(
        "preempts B; others wait: a request was preempted in this step"
    )
    # B, the victim, stands before C, and most of what it had computed is still in the pool
    resumed = next(step for step in steps if "B" in step.plan.admitted_with_computed and step.index > 0)
    assert resumed.plan.admitted_with_computed["B"] == 64


# -------------------------------------------------------------- the table


def test_the_table_shows_the_budget_of_every_step(tmp_path: Path) -> None:
    result = run(tmp_path, config(max_num_seqs=4), [request("A", 1, 4), request("C", 10, 1, 1)])
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines == [
        "8 tokens per step; at most 4 sequences of 128 tokens; 99 usable blocks of 16; fcfs; "
        "chunked prefill on; prefix cache on",
        "budget: d decode, p prefill, s speculative draft, . left over",
        "step  budget    used  left  running  waiting  blocks  who gets how many  what happens",
        "   0  p.......     1     7      1/4        0    1/99  A 1 (1/1)          admits A",
        "   1  dppppppp     8     0      2/4        0    2/99  A 1, C 7 (7/10)    admits C",
        "   2  dppp....     4     4      2/4        0    2/99  A 1, C 3 (10/10)   finishes C",
        "   3  d.......     1     7      1/4        0    1/99  A 1                finishes A",
    ]


def test_drafts_are_shown_apart_and_with_their_acceptance() -> None:
    raw = config(max_num_batched_tokens=16, num_speculative_tokens=3)
    steps = steps_of(raw, [request("A", 4, 9), request("B", 4, 9)])
    step = next(step for step in steps if step.shares[0].num_drafts == 3)
    assert describe_share(step.shares[0]) == "A 1+3"
    assert budget_bar(step).startswith("dsss")
    assert f"A: {step.emitted['A'] - 1} of 3 drafts accepted" in describe_events(step)


def test_a_large_budget_is_drawn_to_scale() -> None:
    step = steps_of(config(max_num_batched_tokens=640, max_model_len=1024), [request("A", 320, 1)])[0]
    assert budget_bar(step) == "p" * 16 + "." * 16


def test_steps_that_await_arrivals_are_empty(tmp_path: Path) -> None:
    result = run(tmp_path, config(), [request("A", 1, 1, 2)])
    assert result.stdout.splitlines()[3].split() == ["0", "........", "0", "8", "0/8", "0", "0/99", "none"]


def test_ids_are_printed_as_they_are(tmp_path: Path) -> None:
    odd = {**request("A", 1, 1), "id": "[bold]é[/]\n\x1b[31m\ud800"}
    result = run(tmp_path, config(), [odd])
    assert result.exit_code == 0
    assert "admits [bold]é[/]\\n\\x1b[31m\\ud800" in result.stdout


# -------------------------------------------------------------- formats


def test_rows_of_jsonl(tmp_path: Path) -> None:
    result = run(tmp_path, config(), [request("A", 2, 2)], "--format", "jsonl")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {
            "step": 0,
            "scheduled": {"A": 2},
            "admitted_with_computed": {"A": 0},
            "preempted": [],
            "finished": [],
            "running": ["A"],
            "free_blocks_after_schedule": 98,
        },
        {
            "step": 1,
            "scheduled": {"A": 1},
            "admitted_with_computed": {},
            "preempted": [],
            "finished": ["A"],
            "running": [],
            "free_blocks_after_schedule": 98,
        },
    ]


def test_rows_tell_drafts_where_speculation_is_configured_even_with_none(tmp_path: Path) -> None:
    result = run(tmp_path, config(num_speculative_tokens=0), [request("A", 2, 1)], "--format", "jsonl")
    row = json.loads(result.stdout)
    assert (row["drafts"], row["emitted"]) == ({}, {"A": 1})


def test_no_requests_are_no_steps(tmp_path: Path) -> None:
    assert run(tmp_path, config(), [], "--format", "jsonl").stdout == ""
    assert run(tmp_path, config(), []).exit_code == 0


def test_yaml_and_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_model_len: 64\nnum_gpu_blocks: 9\nscheduling_policy: priority\n")
    arguments = ["explain", "--config", str(path), "--requests", "-", "--format", "jsonl"]
    result = CliRunner().invoke(app, arguments, input=json.dumps([request("A", 2, 1)]))
    assert result.exit_code == 0
    assert json.loads(result.stdout)["scheduled"] == {"A": 2}


def test_the_command_works_from_a_shell_and_in_ascii(tmp_path: Path) -> None:
    (tmp_path / "c").write_text(json.dumps(config()))
    (tmp_path / "r").write_text(json.dumps([{**request("A", 2, 1), "id": "é"}]))
    program = "from vtune_cli import app; app()"
    command = [sys.executable, "-c", program, "explain", "--config", "c", "--requests", "r"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "admits \\xe9; finishes \\xe9" in done.stdout


def test_warnings_of_the_config_go_to_stderr(tmp_path: Path) -> None:
    raw = config(max_num_batched_tokens=2048, max_num_seqs=1)
    result = run(tmp_path, raw, [request("A", 2, 1)], "--format", "jsonl")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: max_num_batched_tokens (2048) exceeds")


# ----------------------------------------------- what no server starts with


def test_a_budget_below_1_plus_k_is_explained_where_a_server_refuses_it() -> None:
    raw = config(max_num_batched_tokens=8, num_speculative_tokens=11)
    steps = steps_of(raw, [request("A", 20, 3)])
    assert sum(len(step.output.finished) for step in steps) == 1


def test_a_budget_below_1_plus_k_can_block_all_requests_which_is_told(tmp_path: Path) -> None:
    raw = config(max_num_batched_tokens=8, num_speculative_tokens=11, block_size=4)
    requests = [request("A", 9, 1), request("B", request("A", 9)["prompt_token_ids"], 1, 5)]
    result = run(tmp_path, raw, requests, "--format", "jsonl")
    assert result.exit_code == 2
    assert json.loads(result.stdout.splitlines()[-1])["scheduled"] == {}
    assert "nothing can ever be scheduled again. Request 'B' waits with 9 tokens" in result.stderr
    assert "raise max_num_batched_tokens or lower num_speculative_tokens" in result.stderr


@pytest.mark.parametrize("output_format", ["table", "jsonl"])
def test_a_pool_that_is_too_small_is_told_after_the_steps_that_went_well(
    tmp_path: Path, output_format: str
) -> None:
    result = run(tmp_path, config(num_gpu_blocks=2), [request("A", 15, 9)], "--format", output_format)
    assert result.exit_code == 2
    assert "A" in result.stdout
    assert "Request 'A' waits with 17 tokens, because too few free blocks" in result.stderr
    assert "(2 needed, 1 free): raise num_gpu_blocks" in result.stderr


# ------------------------------------------------------------------ bad input

GOOD = [request("A", 2, 1)]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "config: must be an object, got a list of 0"),
        (None, "config: must be an object, got null"),
        (config(blok_size=4), 'config: unknown key "blok_size"; known are max_model_len,'),
        (config(max_num_seqs="4"), 'config: max_num_seqs must be an integer, got "4"'),
        (config(max_num_seqs=True), "config: max_num_seqs must be an integer, got true"),
        (config(max_num_seqs=1.5), "config: max_num_seqs must be an integer, got 1.5"),
        (config(max_num_seqs=None), "config: max_num_seqs must be an integer, got null"),
        (config(enable_prefix_caching=1), "config: enable_prefix_caching must be true or false, got 1"),
        (config(scheduling_policy="lifo"), "--scheduling-policy lifo: must be fcfs or priority"),
        (
            config(num_gpu_blocks=1),
            "config: num_gpu_blocks must be an integer of 2 to 10000000 (one is",
        ),
        (config(num_gpu_blocks=10**12), "(one is the null block), got 1000000000000"),
        (config(block_size=0), "--block-size 0: must be at least 1"),
        (config(max_num_batched_tokens=-8), "--max-num-batched-tokens -8: must be at least 1"),
        (config(max_num_seqs=9), "--max-num-batched-tokens 8: must be at least max_num_seqs (9)"),
        (config(max_model_len=0), "--max-model-len 0: must be at least 1"),
        (config(long_prefill_token_threshold=-1), "--long-prefill-token-threshold -1: must not be negative"),
        (
            config(num_speculative_tokens=-1),
            "config: num_speculative_tokens must be an integer of at",
        ),
        (
            config(num_speculative_tokens=10**9),
            "config: num_speculative_tokens must be 0 to max_model",
        ),
        ({"max_model_len": 8}, "config: num_gpu_blocks is missing"),
        ({"num_gpu_blocks": 8}, "config: max_model_len is missing"),
    ],
)
def test_a_bad_config_is_refused(tmp_path: Path, raw: object, message: str) -> None:
    result = run(tmp_path, raw, GOOD)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "requests: must be a list, got an object"),
        ([7], "requests[0]: must be an object, got 7"),
        ([{"id": "A", "output_len": 1}], "requests[0]: prompt_token_ids is missing"),
        ([{**GOOD[0], "lora_name": "a"}], "requests[0] ('A'): lora_name needs enable_lora in the config"),
        ([{**GOOD[0], "prompt": "x"}], 'requests[0]: unknown key "prompt"; known are id, prompt_token_ids'),
        ([{**GOOD[0], "id": 7}], "requests[0]: id must be a string, got 7"),
        (
            [{**GOOD[0], "prompt_token_ids": "12"}],
            'requests[0]: prompt_token_ids must be a list of at least one token id, got "12"',
        ),
        (
            [{**GOOD[0], "prompt_token_ids": []}],
            "must be a list of at least one token id, got a list of 0",
        ),
        (
            [{**GOOD[0], "prompt_token_ids": [1, -1]}],
            "requests[0]: prompt_token_ids[1] must be a token id of 0 to 2147483647, got -1",
        ),
        ([{**GOOD[0], "prompt_token_ids": [1, 10**30]}], "prompt_token_ids[1] must be a token id of 0 to"),
        ([{**GOOD[0], "prompt_token_ids": [True]}], "prompt_token_ids[0] must be a token id"),
        ([GOOD[0], *GOOD], "requests[1]: id 'A' is taken by requests[0]"),
        (
            [{**GOOD[0], "output_len": 0}],
            "requests[0]: output_len must be an integer of at least 1, got 0",
        ),
        (
            [{**GOOD[0], "arrival_step": -1}],
            "requests[0]: arrival_step must be an integer of 0 to 999999, got -1",
        ),
        ([{**GOOD[0], "arrival_step": 10**9}], "requests[0]: arrival_step must be an integer of 0 to"),
        ([{**GOOD[0], "priority": None}], "requests[0]: priority must be an integer, got null"),
        ([request("A", 128)], "the prompt has 128 tokens, but with max_model_len 128 it can have 127"),
    ],
)
def test_bad_requests_are_refused(tmp_path: Path, raw: object, message: str) -> None:
    result = run(tmp_path, config(), raw)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"{", "c.json", "is not JSON (Expecting property name"),
        (b"", "c.json", "is not JSON (Expecting value"),
        (b"[" * 100_000, "c.json", "is not JSON (maximum recursion depth"),
        (b'{"max_model_len": 1' + b"0" * 5000 + b"}", "c.json", "is not JSON (Exceeds the limit"),
        (b"\xff\xfe", "c.json", "is not UTF-8 text (byte 0)"),
        (b"a: [1", "c.yaml", "is not YAML ("),
        (b"a: 2026-99-99", "c.yaml", "is not YAML ("),
        (None, "missing.json", "cannot be read (No such file or directory)"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes | None, name: str, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["explain", "--config", str(path), "--requests", str(path)])
    assert result.exit_code == 2
    assert f"error: {path}: {message}" in result.stderr


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explain", "--config", str(tmp_path), "--requests", str(tmp_path)])
    assert result.exit_code == 2
    assert "cannot be read (Is a directory)" in result.stderr


def test_standard_input_can_be_only_one_of_the_two() -> None:
    result = CliRunner().invoke(app, ["explain", "--config", "-", "--requests", "-"], input="{}")
    assert result.exit_code == 2
    assert "cannot both be standard input" in result.stderr


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, config(), GOOD, "--format", "xml").exit_code == 2
