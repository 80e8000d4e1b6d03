"""Datasets: prompts and conversations as recorded, wrong items named, turns in their order."""

import json
from pathlib import Path

import pytest

from loadgen.plan.arrivals import ClosedLoop, Constant
from loadgen.plan.datasets import Dataset, DatasetError, Turn, read_dataset

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
    assert first == Turn((("system", "be brief"), ("user", "hello")), None, 2)
    assert second.messages == (
        ("system", "be brief"), ("user", "hello"), ("assistant", "12345678"), ("user", "and then?"),
    )  # fmt: skip
    assert second.output_tokens == 128
    assert data.guessed


def test_json_lines_hold_prompts_or_chats(tmp_path: Path) -> None:
    lines = [
        {"prompt": "once upon a time", "output_tokens": 7},
        {"messages": [{"role": "user", "content": "hi"}], "output_tokens": 9},
    ]
    data = read_dataset(write(tmp_path / "p.jsonl", "\n\n".join(map(json.dumps, lines))))
    assert data.conversations == (
        (Turn(None, "once upon a time", 7),),
        (Turn((("user", "hi"),), None, 9),),
    )
    assert not data.guessed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompt in it"),
        ("[", "no JSON"),
        ("[]", "no prompt in it"),
        ('{"prompt": "a"}\n{"prompt": ""}', r"line 2, key 'prompt': empty"),
        ('{"prompt": "a"}\n{"question": "b"}', r"line 2: it has none of the keys"),
        ('{"prompt": "a"}\n{"prompt": ', r"line 2, column \d+: no JSON"),
        ('{"prompt": "a", "output_tokens": -1}', r"line 1, key 'output_tokens': -1"),
        ('{"prompt": "a", "output_tokens": true}', r"line 1, key 'output_tokens': True"),
        ('{"messages": {}}', r"line 1, key 'messages': no list"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', r"key 'messages', message 0: needs 'role'"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', r"item 0, key 'conversations', message 0"),
        ("[3]", r"item 0: no JSON object"),
    ],
)
def test_a_wrong_item_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        read_dataset(write(tmp_path / "wrong.json", text))
    assert "wrong.json" in str(caught.value)


def conversations(count: int, turns: int = 2) -> Dataset:
    return Dataset(
        "made",
        tuple(tuple(Turn((("user", f"{c} {t}"),), None, 4) for t in range(turns)) for c in range(count)),
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
    said = [r.messages[0][1] for r in plan.requests if r.messages]
    assert len(set(said[:4])) == len(set(said[4:8])) == 4
    assert said[:4] != said[4:8]


def test_lengths_can_be_set_and_a_natural_stop_asked_for() -> None:
    plan = conversations(1).schedule(seed=1, arrival=ClosedLoop(1), output_len=33, natural_stop=True)
    assert {(r.max_tokens, r.ignore_eos) for r in plan.requests} == {(33, False)}
    with pytest.raises(DatasetError, match="think time"):
        conversations(1).schedule(seed=1, arrival=ClosedLoop(1), think=float("nan"))
