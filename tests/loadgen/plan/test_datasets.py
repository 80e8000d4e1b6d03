"""Datasets: prompts and conversations as recorded, wrong items named, turns in their order."""

import json
from pathlib import Path

import pytest

from loadgen.plan.arrivals import ClosedLoop, Constant
from loadgen.plan.dataset_formats import read_dataset
from loadgen.plan.datasets import Dataset, DatasetError, Turn
from loadgen.plan.workload import Message

CHAT = {
    "conversations": [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "hello"},
        {"from": "gpt", "value": "12345678"},
        {"from": "human", "value": "and then?"},
    ]
}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_sharegpt_becomes_a_turn_for_every_message_of_the_user(tmp_path: Path) -> None:
    data = read_dataset(write(tmp_path / "share.json", json.dumps([CHAT, {"conversations": []}])))
    ((first, second),) = data.conversations
    assert first == Turn((Message("system", "be brief"), Message("user", "hello")), None, 2)
    assert second.messages == (
        *(first.messages or ()), Message("assistant", "12345678"), Message("user", "and then?"),
    )  # fmt: skip
    assert second.output_tokens == 128
    assert data.guessed
    assert data.notes == ("1 of 2 rows left out: 1 x no message of a user in it (first: item 1)",)


def test_json_lines_hold_prompts_or_chats(tmp_path: Path) -> None:
    lines = [
        {"prompt": "once upon a time", "output_tokens": 7},
        {"messages": [{"role": "user", "content": "hi"}], "output_tokens": 9},
    ]
    data = read_dataset(write(tmp_path / "p.jsonl", "\n\n".join(map(json.dumps, lines))))
    assert data.conversations == (
        (Turn(None, "once upon a time", 7),),
        (Turn((Message("user", "hi"),), None, 9),),
    )
    assert not data.guessed


def said(asker: str, answerer: str, answer: str = "12345678") -> dict[str, object]:
    return {"conversations": [{"from": asker, "value": "why"}, {"from": answerer, "value": answer}]}


def test_other_bots_answer_as_assistants_and_an_unknown_one_costs_its_row_only(tmp_path: Path) -> None:
    items = [said("human", "gpt"), said("user", "chatgpt"), said("human", "bing"), said("Human", "bard"),
             {"conversations": []}, said("human", "wizard"), said("human", "wizard"), 3]  # fmt: skip
    data = read_dataset(write(tmp_path / "share.json", json.dumps(items)))
    assert data.conversations == ((Turn((Message("user", "why"),), None, 2),),) * 4
    (note,) = data.notes
    assert note.startswith(
        "4 of 8 rows left out: 2 x a message of role 'wizard' (first: item 5), 1 x no message"
    )
    assert note in data.schedule(seed=1, arrival=ClosedLoop(1)).description


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ADD = {"type": "function", "function": {"name": "add"}}


def test_parts_and_calls_of_tools_go_out_as_they_were_recorded(tmp_path: Path) -> None:
    chat = [
        {"role": "developer", "content": "be brief", "timestamp": None, "toxic": False},
        {"role": "user", "content": [{"type": "text", "text": "sum "}, {"type": "text", "text": "this"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "assistant", "content": "It is 3.", "tool_calls": None},
    ]
    path = write(tmp_path / "tools.jsonl", json.dumps({"messages": chat, "tools": [ADD], "temperature": 0.5}))
    ((first, second),) = read_dataset(path).conversations
    assert [message.body for message in second.messages or ()] == [
        {"role": "system", "content": "be brief"}, *chat[1:5],
    ]  # fmt: skip
    assert [message.text for message in first.messages or ()] == ["be brief", "sum this"]
    assert (first.output_tokens, second.output_tokens) == (-(-len(json.dumps(CALL["function"])) // 4), 2)
    assert first.sampling == (("temperature", 0.5), ("tool_choice", "none"), ("tools", [ADD]))


def test_functions_of_sharegpts_kind_are_tools(tmp_path: Path) -> None:
    value = [("human", "a"), ("function_call", "add()"), ("observation", "3"), ("gpt", "three")]
    item = {"conversations": [{"from": who, "value": text} for who, text in value]}
    (turns,) = read_dataset(write(tmp_path / "f.json", json.dumps([item]))).conversations
    assert [[m.role for m in turn.messages or ()] for turn in turns] == [
        ["user"],
        ["user", "assistant", "tool"],
    ]


def test_a_line_of_a_batch_is_one_request_whatever_its_history(tmp_path: Path) -> None:
    history = [{"role": who, "content": "x"} for who in ("user", "assistant", "user")]
    bodies = [
        {"model": "m", "messages": history, "max_tokens": 40, "top_p": 0.9},
        {"model": "m", "prompt": "once", "max_completion_tokens": 7},
        {"model": "m", "input": "a text to embed"},
    ]
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/x", "body": b} for n, b in enumerate(bodies)]
    lines.append({"custom_id": "9", "response": {"status_code": 200, "body": {}}})
    data = read_dataset(write(tmp_path / "batch.jsonl", "\n".join(map(json.dumps, lines))))
    (chat,), (text,) = data.conversations
    assert ([m.text for m in chat.messages or ()], chat.output_tokens) == (["x"] * 3, 40)
    assert (chat.sampling, text) == ((("top_p", 0.9),), Turn(None, "once", 7))
    assert data.notes[0].startswith("2 of 4 rows left out: 1 x it has none of the keys prompt, messages")
    assert data.notes[1] == "2 answers as long as the recorded limit of tokens allows"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompt in it"),
        ("[", "no JSON"),
        ("[]", "no prompt in it"),
        ('{"prompt": ""}', r"1 x key 'prompt': empty \(first: line 1\)"),
        ('{"prompt": [1, 2]}', r"key 'prompt': no text"),
        ('{"question": "b"}', r"it has none of the keys"),
        ('{"prompt": ', r"no JSON object \(first: line 1\)"),
        ('{"prompt": "a", "output_tokens": -1}', r"key 'output_tokens': no positive whole number"),
        ('{"prompt": "a", "output_tokens": true}', r"key 'output_tokens'"),
        ('{"messages": {}}', r"key 'messages': no list"),
        ('{"messages": [{"content": "x"}]}', r"a message without a role"),
        ('{"messages": [{"role": "user", "content": null}]}', r"a message without a text"),
        ('{"messages": [{"role": "user", "content": [{"text": 3}]}]}', r"a part of a message"),
        ('{"messages": [{"role": "user", "content": "x", "tool_calls": [3]}]}', r"calls of tools"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', r"a message without a text \(first: item 0"),
        ("[3]", r"no JSON object \(first: item 0"),
    ],
)
def test_a_file_of_wrong_rows_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        read_dataset(write(tmp_path / "wrong.json", text))
    assert "wrong.json" in str(caught.value)


def conversations(count: int, turns: int = 2) -> Dataset:
    return Dataset(
        "made",
        tuple(
            tuple(Turn((Message("user", f"{c} {t}"),), None, 4) for t in range(turns)) for c in range(count)
        ),
    )


def test_turns_follow_each_other_and_only_first_ones_have_arrivals() -> None:
    plan = conversations(3).schedule(seed=1, arrival=Constant(2.0), think=0.5)
    assert [r.follows for r in plan.requests] == [None, 0, None, 2, None, 4]
    assert [r.intended for r in plan.requests if r.follows is None] == [0.0, 0.5, 1.0]
    assert all((r.think > 0) == (r.follows is not None) for r in plan.requests)
    assert {r.cls for r in plan.requests} == {"first turn", "later turns"}
    assert plan == conversations(3).schedule(seed=1, arrival=Constant(2.0), think=0.5)
    assert plan.sha256 != conversations(3).schedule(seed=1, arrival=Constant(2.0)).sha256


def test_every_conversation_is_used_once_before_any_is_used_again() -> None:
    plan = conversations(4, turns=1).schedule(seed=7, arrival=ClosedLoop(2), num_requests=10)
    said = [r.messages[0].text for r in plan.requests if r.messages]
    assert len(set(said[:4])) == len(set(said[4:8])) == 4
    assert said[:4] != said[4:8]


def test_lengths_can_be_set_and_a_natural_stop_asked_for() -> None:
    plan = conversations(1).schedule(seed=1, arrival=ClosedLoop(1), output_len=33, natural_stop=True)
    assert {(r.max_tokens, r.ignore_eos) for r in plan.requests} == {(33, False)}
    with pytest.raises(DatasetError, match="think time"):
        conversations(1).schedule(seed=1, arrival=ClosedLoop(1), think=float("nan"))
