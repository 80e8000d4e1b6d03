"""From a request's tokens to its text: detokenised, and ended by stop strings."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import RequestStatus, SamplingParams
from engine.step import RequestOutput, TokenLogprobs
from engine.text.stop_strings import StopMatcher
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one output of the engine adds; ``finish_reason`` ("stop", "length") is set on the last."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it."""


class TextStream:
    """Turns the outputs of one request into pieces of text.

    What stopped a request (EOS, a stop token, a stop string) is no part of its text unless ``include_stop``.
    Up to ``sampling.min_tokens``, stop strings are not looked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.num_tokens = 0
        """Tokens up to the end, the one that ended it included."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._stops = StopMatcher(sampling.stop, include_stop)
        self._min_tokens = sampling.min_tokens
        self._include_stop = include_stop

    def advance(self, output: RequestOutput) -> TextPiece:
        """Add an output; what the engine sent beyond a stop string is dropped."""
        tokens = output.token_ids
        stopped = output.finish is RequestStatus.FINISHED_STOPPED
        text, used = "", 0
        while used < len(tokens) and self._stops.matched is None:
            used += 1
            self.num_tokens += 1
            if self._include_stop or not (stopped and used == len(tokens)):
                text += self._checked(self._detokenizer.push(tokens[used - 1 : used]))
        if output.finish is not None and self._stops.matched is None:
            text += self._checked(self._detokenizer.finish())
        if self._stops.matched is not None:
            return TextPiece(text, tokens[:used], output.logprobs[:used], "stop", self._stops.matched)
        reason = None
        if output.finish is not None:
            text += self._stops.finish()
            reason = output.finish.value
        return TextPiece(text, tokens, output.logprobs, reason, output.stop_reason)

    def _checked(self, text: str) -> str:
        """The text that may be sent now."""
        return text if self.num_tokens <= self._min_tokens else self._stops.push(text)
