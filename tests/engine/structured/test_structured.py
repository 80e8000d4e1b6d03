"""Grammars: what they allow, how they follow an output, and how requests wait for them and end with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_kit import EOS, HashRunner, make_model

from engine.config import EngineConfig, StructuredOutputsConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.request import Request, RequestStatus, SamplingParams, StructuredOutputsParams
from engine.step import StepPlan, StepResult
from engine.structured.grammars import MAX_CACHED_GRAMMARS, Grammar, GrammarError, Grammars, LLGuidance

ANYTHING = StructuredOutputsParams(regex=".*")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> LLGuidance:
    """Of a model whose tokens are the ASCII characters."""
    return make_compiler(make_model(tmp_path_factory.mktemp("model")))


def make_compiler(model: Path) -> LLGuidance:
    return LLGuidance(EngineConfig(model=str(model), load_format="dummy"))


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def allowed(grammar: Grammar, output: str, drafts: str = "") -> list[str | None]:
    """What may stand in each place; "$" is the end."""
    rows = grammar.allowed(ids(output), ids(drafts))
    return [
        None if row is None else "".join("$" if i == EOS else chr(i) for i in row.nonzero()[0].tolist())
        for row in rows
    ]


@pytest.mark.parametrize(
    ("structure", "steps"),
    [
        (StructuredOutputsParams(regex="ab|abc+"), {"": "a", "a": "b", "ab": "c$", "abc": "c$"}),
        (StructuredOutputsParams(choice=["yes", "no", 'q"\n']), {"": "nqy", "n": "o", "no": "$", 'q"': "\n"}),
        (StructuredOutputsParams(choice=["", "x"]), {"": "x$"}),
        (StructuredOutputsParams(grammar='root ::= "a" root | "b"'), {"": "ab", "aab": "$"}),
        (StructuredOutputsParams(grammar='start: "a" | "b"'), {"": "ab", "a": "$"}),
        (StructuredOutputsParams(json={"const": 7}), {"": "7", "7": "$"}),
        (StructuredOutputsParams(json='{"enum": ["u", true]}'), {"": '"t', "t": "r", '"u"': "$"}),
        (StructuredOutputsParams(json_object=True, disable_any_whitespace=True), {"": "{", "{": '"}'}),
        (
            StructuredOutputsParams(json={"type": "object"}, whitespace_pattern="_"),
            {"": "{", "{": '"_}'},
        ),
    ],
)
def test_what_may_come_next(
    compiler: LLGuidance, structure: StructuredOutputsParams, steps: dict[str, str]
) -> None:
    grammar = compiler(structure)
    for output, expected in steps.items():
        (found,) = allowed(grammar, output)
        assert found is not None
        assert sorted(found) == sorted(expected), output
    assert not grammar.error


def test_white_space_can_be_switched_off_for_all(tmp_path: Path) -> None:
    settings = StructuredOutputsConfig.parse('{"disable_any_whitespace": true, "backend": "guidance"}')
    config = EngineConfig(
        model=str(make_model(tmp_path)), load_format="dummy", structured_outputs_config=settings
    )
    grammar = LLGuidance(config)(StructuredOutputsParams(json_object=True))
    assert [sorted(row or "") for row in allowed(grammar, "{")] == [['"', "}"]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ({"reasoning_parser": "x"}, "no other keys"),
        ({"backend": "xgrammar"}, "backend must be auto or guidance"),
        ({"disable_any_whitespace": 1}, "must be true or false"),
    ],
)
def test_settings_that_are_refused(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--structured-outputs-config .*{words}"):
        StructuredOutputsConfig.parse(value)


def test_drafts_are_looked_at_one_by_one_and_forgotten(compiler: LLGuidance) -> None:
    grammar = compiler(StructuredOutputsParams(regex="ab(c|de)"))
    assert allowed(grammar, "", "abd") == ["a", "b", "cd", "e"]
    assert allowed(grammar, "a", "xy") == ["b", None, None]
    assert allowed(grammar, "ab", "c") == ["cd", "$"]
    stop = grammar.allowed(ids("abc"), [EOS, 97])
    assert [row is None for row in stop] == [False, True, True]
    assert grammar.keep_valid(ids("a"), ids("bdx")) == ids("bd")
    assert allowed(grammar, "ab") == ["cd"]
    assert grammar.keep_valid([*ids("abc"), EOS], ids("a")) == []  # it has ended: no error
    assert not grammar.error


def test_the_state_follows_the_output_wherever_it_goes(compiler: LLGuidance) -> None:
    grammar = compiler(StructuredOutputsParams(regex="a*b"))
    assert allowed(grammar, "aaaa") == ["ab"]
    copy = grammar.copy()
    assert allowed(grammar, "aab") == ["$"]  # tokens that were dropped
    assert allowed(grammar, "") == ["ab"]
    assert allowed(copy, "aaaab") == ["$"]


def test_a_dead_end_is_an_error_and_no_end(compiler: LLGuidance) -> None:
    grammar = compiler(StructuredOutputsParams(choice=["né"]))  # which no token of the model can write
    assert allowed(grammar, "") == ["n"]
    assert allowed(grammar, "n") == [None]
    assert "tokens cannot write" in grammar.error
    assert grammar.keep_valid(ids("no"), ids("o")) == []
    assert "tokens cannot write" in grammar.error  # the first cause is the one to tell
    left = compiler(StructuredOutputsParams(regex="a"))
    assert allowed(left, "b") == [None]
    assert "does not match" in left.error


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (StructuredOutputsParams(regex="("), "unclosed group"),
        (StructuredOutputsParams(regex="(?=a)b"), "look-around"),
        (StructuredOutputsParams(json={"type": "wrong"}), "Invalid type: wrong"),
        (StructuredOutputsParams(json={"uniqueItems": True}), "Unimplemented keys"),
        (StructuredOutputsParams(json={"$ref": "http://127.0.0.1/schema"}), "does not fetch"),
        (StructuredOutputsParams(json="nonsense"), "expected ident"),
        (StructuredOutputsParams(grammar="nonsense"), "Expected ::="),
        (StructuredOutputsParams(regex="(" * 100_000), "..."),
    ],
)
def test_what_cannot_be_compiled(
    compiler: LLGuidance, structure: StructuredOutputsParams, words: str
) -> None:
    with pytest.raises(GrammarError, match=words.replace("(", r"\(")) as caught:
        compiler(structure)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({}, "not none"),
        ({"regex": "a", "choice": ["a"]}, "not regex and choice"),
        ({"choice": []}, "at least one"),
        ({"choice": "yes"}, "list"),
    ],
)
def test_exactly_one_kind(kinds: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StructuredOutputsParams(**kinds)


def test_a_model_without_an_end_cannot_have_forms(tmp_path: Path) -> None:
    compiler = make_compiler(make_model(tmp_path, eos_token_id=None))
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        compiler(ANYTHING)


# ---------------------------------------------------------------- waiting for one


class SlowCompiler:
    """Compiles when the test lets it."""

    def __init__(self, compile_structure: Callable[[StructuredOutputsParams], Grammar]) -> None:
        self._compile = compile_structure
        self.go = threading.Event()
        self.asked: list[StructuredOutputsParams] = []

    def __call__(self, structure: StructuredOutputsParams) -> Grammar:
        self.asked.append(structure)
        assert self.go.wait(240)
        return self._compile(structure)


class MaskedRunner(HashRunner):
    """Chooses by hash among what the grammar allows."""

    def execute(self, plan: StepPlan) -> StepResult:
        free = super().execute(plan)
        tokens = {}
        for item in plan.scheduled:
            request = item.request
            if item.emits and request.grammar is not None:
                (row,) = request.grammar.allowed(request.output_token_ids)
                choices = [0] if row is None else row.nonzero()[0].tolist()
                tokens[request.request_id] = [choices[free.tokens[request.request_id][0] % len(choices)]]
        return StepResult({**free.tokens, **tokens})


@pytest.fixture
def slow(compiler: LLGuidance) -> Iterator[SlowCompiler]:
    waiting = SlowCompiler(compiler)
    yield waiting
    waiting.go.set()


def make_core(compile_structure: Callable[[StructuredOutputsParams], Grammar], **flags: Any) -> EngineCore:
    config = EngineConfig(
        num_gpu_blocks_override=40, max_num_batched_tokens=64, **{"max_num_seqs": 8, **flags}
    )
    return EngineCore(config, MaskedRunner(), compiler=compile_structure)


def make_request(name: str, structure: StructuredOutputsParams | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 30, **sampling}, structured_outputs=structure)
    return Request(name, ids("prompt"), params, eos_token_ids=(EOS,))


def text(request: Request) -> str:
    return "".join(chr(token) for token in request.output_token_ids if token != EOS)


def finish(core: EngineCore) -> None:
    core.grammars.wait()
    while core.has_unfinished:
        core.step()
        core.scheduler.check()


def test_others_run_while_a_grammar_is_compiled(slow: SlowCompiler) -> None:
    core = make_core(slow)
    waits = make_request("waits", StructuredOutputsParams(regex="[ab]{5}"))
    free = make_request("free", max_tokens=3)
    core.add(waits)
    core.add(free)
    assert waits.status is RequestStatus.WAITING_FOR_GRAMMAR
    for _ in range(3):
        core.step()
    assert free.status is RequestStatus.FINISHED_LENGTH
    assert waits.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert not core.step()[0].scheduled  # nothing to do, but to wait
    assert (core.stats.num_waiting, core.stats.num_deferred) == (1, 1)
    slow.go.set()
    finish(core)
    assert (waits.status, len(text(waits)), set(text(waits)) <= set("ab")) == (
        RequestStatus.FINISHED_STOPPED,
        5,
        True,
    )
    assert core.scheduler.kv_usage == core.stats.num_deferred == 0


def test_the_order_of_arrival_is_kept(slow: SlowCompiler) -> None:
    core = make_core(slow, max_num_seqs=1)
    core.add(make_request("first", ANYTHING, max_tokens=2))
    core.add(make_request("free", max_tokens=2))
    core.add(make_request("last", max_tokens=2))
    assert [item.request.request_id for item in core.step()[0].scheduled] == ["free"]
    slow.go.set()
    core.grammars.wait()
    core.step()
    assert [item.request.request_id for item in core.step()[0].scheduled] == ["first"]


def test_a_structure_that_cannot_be_compiled_ends_its_request_alone(compiler: LLGuidance) -> None:
    core = make_core(compiler)
    wrong = make_request("wrong", StructuredOutputsParams(regex="("))
    core.add(wrong)
    core.add(make_request("free", max_tokens=2))
    core.grammars.wait()
    _, output = core.step()
    refused = next(item for item in output.outputs if item.request_id == "wrong")
    assert refused.finish is wrong.status is RequestStatus.FINISHED_ERROR
    assert "unclosed group" in str(refused.stop_reason)
    assert [entry.reason for entry in core.stats.finished] == ["error"]
    finish(core)


def test_a_compiler_that_breaks_ends_its_request_alone() -> None:
    def broken(structure: StructuredOutputsParams) -> Grammar:
        raise RuntimeError("a bug")

    core = make_core(broken)
    request = make_request("r", ANYTHING)
    core.add(request)
    finish(core)
    assert (request.status, request.error) == (RequestStatus.FINISHED_ERROR, "RuntimeError: a bug")


def test_a_request_may_leave_while_its_grammar_is_compiled(slow: SlowCompiler) -> None:
    core = make_core(slow)
    core.add(make_request("gone", ANYTHING))
    core.step()
    core.abort(["gone"])
    assert not core.has_unfinished
    slow.go.set()
    finish(core)


def test_a_dead_end_is_told_and_emits_nothing_more(compiler: LLGuidance) -> None:
    core = make_core(compiler)
    request = make_request("r", StructuredOutputsParams(choice=["né"]))
    core.add(request)
    core.grammars.wait()
    assert core.step()[1].outputs[0].token_ids == (ord("n"),)
    _, output = core.step()
    assert [(item.token_ids, item.finish) for item in output.outputs] == [((), RequestStatus.FINISHED_ERROR)]
    assert "tokens cannot write" in str(output.outputs[0].stop_reason)
    assert not core.has_unfinished
    assert core.scheduler.kv_usage == 0


def test_only_the_structure_says_when_it_ends(compiler: LLGuidance) -> None:
    core = make_core(compiler)
    request = make_request("r", StructuredOutputsParams(choice=["ab"]), min_tokens=9, ignore_eos=True)
    core.add(request)
    finish(core)
    assert (text(request), request.status) == ("ab", RequestStatus.FINISHED_STOPPED)


def test_a_preempted_request_goes_on_in_its_structure(compiler: LLGuidance) -> None:
    """Two of them in a pool too small for both."""
    config = EngineConfig(
        num_gpu_blocks_override=9, block_size=4, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=32
    )
    core = EngineCore(config, MaskedRunner(), compiler=compiler)
    requests = [
        make_request(name, StructuredOutputsParams(regex=f"{name}([0-9]{{2}} ){{6}}")) for name in "pq"
    ]
    for request in requests:
        core.add(request)
    finish(core)
    assert sum(request.num_preemptions for request in requests) > 0
    for request in requests:
        assert [request.request_id, *map(len, text(request)[1:].split())] == [request.request_id, *[2] * 6]
        assert request.status is RequestStatus.FINISHED_STOPPED


def test_equal_forms_are_compiled_once(compiler: LLGuidance) -> None:
    asked: list[StructuredOutputsParams] = []

    def counted(structure: StructuredOutputsParams) -> Grammar:
        asked.append(structure)
        return compiler(structure)

    grammars = Grammars(counted)
    structures = [StructuredOutputsParams(json={"const": i}) for i in range(MAX_CACHED_GRAMMARS + 1)]
    requests = [make_request(str(i), structures[i % 2]) for i in range(6)]
    for request in requests:
        grammars.start(request)
    grammars.wait()
    assert sorted(str(structure.json) for structure in asked) == sorted(
        str(structure.json) for structure in structures[:2]
    )
    assert all(request.gate is not None and request.gate.ready() for request in requests)
    assert len({id(request.grammar) for request in requests}) == 6
    for structure in structures[1:]:
        grammars.start(make_request("r", structure))
    grammars.wait()
    grammars.start(make_request("r", structures[0]))  # forgotten by now
    grammars.wait()
    assert len(asked) == MAX_CACHED_GRAMMARS + 2


def test_what_failed_is_tried_again(compiler: LLGuidance) -> None:
    outcomes = iter((MemoryError("full"), compiler(ANYTHING)))

    def flaky(structure: StructuredOutputsParams) -> Grammar:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    core = make_core(flaky)
    for name, status in (("a", RequestStatus.FINISHED_ERROR), ("b", RequestStatus.FINISHED_LENGTH)):
        request = make_request(name, ANYTHING, max_tokens=1)
        core.add(request)
        finish(core)
        assert request.status is status
