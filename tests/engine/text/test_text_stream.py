"""Tokens to text: where it ends, what counts, what is silent. The tokens are ASCII characters."""

from __future__ import annotations

import pytest
from serving_kit import EOS, make_model

from engine.request import RequestStatus, SamplingParams
from engine.step import RequestOutput, TokenLogprobs
from engine.text.text_stream import TextPiece, TextStream
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_model(tmp_path_factory.mktemp("model")))


def output(text: str, finish: RequestStatus | None = None, stop_reason: int | None = None) -> RequestOutput:
    ids = tuple(map(ord, text)) + (
        (EOS,) if finish is RequestStatus.FINISHED_STOPPED and not stop_reason else ()
    )
    logprobs = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in ids)
    return RequestOutput("r", ids, finish, stop_reason, logprobs)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_length_ends_with_all_of_the_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("xyz",)))
    assert stream.advance(output("abx")).text == "ab"  # x may begin the stop string
    last = stream.advance(output("y", RequestStatus.FINISHED_LENGTH))
    assert (last.text, last.finish_reason, last.stop_reason) == ("xy", "length", None)
    assert stream.num_tokens == 4


def test_several_tokens_at_once_end_at_the_stop_string(tokenizer: Tokenizer) -> None:
    """With speculation an output brings several tokens; those behind the stop string do not count."""
    stream = TextStream(tokenizer, SamplingParams(stop=("cd",)))
    piece = stream.advance(output("abcdef"))
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("ab", ids("abcd"), "stop")
    assert piece.stop_reason == "cd"
    assert len(piece.logprobs) == stream.num_tokens == 4


def test_a_stop_string_wins_over_the_length_reached_with_it(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("b",)))
    assert stream.advance(output("ab", RequestStatus.FINISHED_LENGTH)).finish_reason == "stop"


def test_eos_is_silent_also_when_special_tokens_are_shown(tokenizer: Tokenizer) -> None:
    shown = TextStream(tokenizer, SamplingParams(), skip_special_tokens=False)
    assert shown.advance(output("ab", RequestStatus.FINISHED_STOPPED)).text == "ab"
    included = TextStream(tokenizer, SamplingParams(), skip_special_tokens=False, include_stop=True)
    assert included.advance(output("ab", RequestStatus.FINISHED_STOPPED)).text == "ab<|endoftext|>"


def test_a_stop_token_is_silent_unless_included(tokenizer: Tokenizer) -> None:
    end = output("ab", RequestStatus.FINISHED_STOPPED, ord("b"))
    silent = TextStream(tokenizer, SamplingParams(stop_token_ids=(ord("b"),)))
    assert silent.advance(end) == TextPiece("a", ids("ab"), end.logprobs, "stop", ord("b"))
    included = TextStream(tokenizer, SamplingParams(stop_token_ids=(ord("b"),)), include_stop=True)
    assert included.advance(end).text == "ab"


def test_min_tokens_hold_off_stop_strings(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("a",), min_tokens=2))
    piece = stream.advance(output("aaab"))
    assert (piece.text, piece.token_ids) == ("aa", ids("aaa"))
