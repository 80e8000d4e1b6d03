"""Structured output: what is asked for, compiled to a grammar, and which tokens the grammar allows next.

Compiling takes from a millisecond to a second and happens in threads, in which llguidance releases the
interpreter's lock. The request waits meanwhile; others run.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.models.checkpoint import load_model_config
from engine.models.model_error import ModelError
from engine.models.weights import resolve_model
from engine.request import Gate, GateError, Request, RequestStatus, StructuredOutputsParams
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Compiler = Callable[[StructuredOutputsParams], "Grammar"]
"""Raises GrammarError."""
MAX_COMPILE_THREADS = 2
MAX_CACHED_GRAMMARS = 32
"""Compiled grammars kept for requests to come."""
MAX_LEXER_STATES = 50_000
"""Of one grammar, 1-2 kB each. llguidance's other limits bound the time of compiling and of each mask."""
MAX_REASON_CHARACTERS = 500
"""Characters of llguidance's messages that are passed on: they can repeat the whole grammar."""


class GrammarError(ValueError):
    """The structure cannot be compiled. The message is for the client."""


class Grammar:
    """How far one request's output has come in its grammar.

    The state is a function of the request's output and of nothing else, so preemptions, rejected drafts and
    dropped tokens need no special care. Not thread-safe.
    """

    __slots__ = ("_consumed", "_matcher", "_stops", "_vocab_size", "error")

    def __init__(self, matcher: LLMatcher, stops: Sequence[int], vocab_size: int) -> None:
        """``stops`` are the tokens that end an output, ``vocab_size`` is the model's."""
        self._matcher, self._stops, self._vocab_size = matcher, tuple(stops), vocab_size
        self._consumed: list[int] = []
        self.error = ""
        """Why the output cannot go on, if it cannot: nothing more is masked then."""

    def copy(self) -> Grammar:
        """One for another request, at the same place."""
        grammar = Grammar(self._matcher.deep_copy(), self._stops, self._vocab_size)
        grammar._consumed = list(self._consumed)
        return grammar

    def allowed(
        self, output: Sequence[int], drafts: Sequence[int] = ()
    ) -> list[npt.NDArray[np.bool_] | None]:
        """What may follow ``output``, and each of ``drafts`` after it: 1 + len(drafts) rows [vocab].

        A row is None where it does not matter what is chosen: behind a draft that is refused or ends the
        output, and once there is an :attr:`error`.
        """
        self._advance(output)
        rows = [self._row()]
        taken = 0
        for draft in drafts:
            if self.error or draft in self._stops or not self._matcher.validate_tokens([draft]):
                break
            self._matcher.consume_token(draft)
            taken += 1
            rows.append(self._row())
        self._matcher.rollback(taken)
        return rows + [None] * (1 + len(drafts) - len(rows))

    def keep_valid(self, output: Sequence[int], drafts: list[int]) -> list[int]:
        """As many of ``drafts`` as may follow ``output``: none, where a stop token has ended it."""
        if self.error or not set(self._stops).isdisjoint(output):
            return []
        self._advance(output)
        return [] if self.error else drafts[: self._matcher.validate_tokens(drafts)]

    def _advance(self, output: Sequence[int]) -> None:
        """Bring the matcher to where ``output`` ends."""
        consumed = self._consumed
        known = list(output[: len(consumed)])
        if known != consumed:
            pairs = zip(known, consumed, strict=False)
            same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(known))
            self._matcher.rollback(len(consumed) - same)
            del consumed[same:]
        new = list(output[len(consumed) :])
        if self._matcher.try_consume_tokens(new) < len(new):
            self.error = "the output does not match what structured_outputs asks for"
        consumed += new

    def _row(self) -> npt.NDArray[np.bool_] | None:
        if self.error:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        row = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        # Where nothing can follow, the mask has only the stop tokens, be the grammar complete or not.
        ends = row[list(self._stops)].any() and not self._matcher.is_accepting()
        if ends or not row.any():
            reason = self._matcher.stop_reason()
            self.error = (
                f"the grammar is too complex to continue ({reason})"
                if reason.endswith("TooComplex")
                else "the model's tokens cannot write what the grammar asks for next"
            )
            return None
        return row


def grammar_text(params: StructuredOutputsParams) -> str:
    """``params`` in llguidance's own notation. Raises GrammarError."""
    from llguidance import LLMatcher, grammar_from

    try:
        if params.json is not None or params.json_object:
            schema = params.json or '{"type": "object"}'
            assert isinstance(schema, str)
            flexible, pattern = not params.disable_any_whitespace, params.whitespace_pattern
            if pattern is None:
                return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": flexible})
            return LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_flexible": flexible, "whitespace_pattern": pattern}
            )
        if params.regex is not None:
            return grammar_from("regex", params.regex)
        if params.choice is not None:
            return grammar_from("choice", json.dumps(params.choice))
        assert params.grammar is not None
        return grammar_from("grammar", params.grammar)
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from None


class LLGuidance:
    """Compiles for one model. Its view of the tokenizer, 30 MB, is made with the first grammar."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._loaded: tuple[LLTokenizer, int] | None = None

    def __call__(self, params: StructuredOutputsParams) -> Grammar:
        """Raises GrammarError, or ModelError for a tokenizer that cannot be read."""
        from llguidance import LLMatcher, LLParserLimits

        settings = self._config.structured_outputs_config
        if settings is not None and settings.disable_any_whitespace:
            params = replace(params, disable_any_whitespace=True)
        text = grammar_text(params)
        with self._lock:
            self._loaded = self._loaded or self._load()
            tokenizer, vocab_size = self._loaded
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return Grammar(matcher, tokenizer.eos_tokens, vocab_size)

    def _load(self) -> tuple[LLTokenizer, int]:
        """The tokenizer, and the size of the model's vocabulary."""
        from llguidance import LLTokenizer

        config = self._config
        path = resolve_model(config.model)
        model = load_model_config(path, config.load_format)
        if not model.eos_token_ids:
            raise GrammarError("this model has no end-of-sequence token, so structured output could not end")
        tokenizer = Tokenizer.load(resolve_model(config.tokenizer) if config.tokenizer else path)
        size = max(model.vocab_size, tokenizer.vocab_size)
        stops = list(model.eos_token_ids)
        return LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=stops), model.vocab_size


class GrammarGate(Gate):
    """Open once the request's grammar is compiled; the request has it from then on."""

    status = RequestStatus.WAITING_FOR_GRAMMAR

    def __init__(
        self, request: Request, compiled: Future[Grammar], on_open: Callable[[Request], None]
    ) -> None:
        self._request, self._compiled, self._on_open = request, compiled, on_open

    def ready(self) -> bool:
        if not self._compiled.done():
            return False
        error = self._compiled.exception()
        if error is not None:
            known = isinstance(error, GrammarError | ModelError)
            raise GateError(str(error) if known else f"{type(error).__name__}: {error}") from error
        self._request.grammar = self._compiled.result().copy()
        self._on_open(self._request)
        return True


class Grammars:
    """Compiles what an engine's requests ask for, each of them once as long as it is cached."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(MAX_COMPILE_THREADS, "grammar")
        self._kept: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()
        self._users: list[Request] = []
        """Requests with an open gate, until they end."""

    def start(self, request: Request) -> None:
        """Give the request a gate that opens when its grammar is compiled, and no other end than the
        grammar's."""
        params = request.sampling.structured_outputs
        assert params is not None
        request.sampling = replace(request.sampling, min_tokens=0, ignore_eos=False)
        future = self._kept.get(params)
        if future is None or (future.done() and future.exception() is not None):
            future = self._kept[params] = self._pool.submit(self._compiler, params)
            if len(self._kept) > MAX_CACHED_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(params)
        request.gate = GrammarGate(request, future, self._users.append)

    def stuck(self) -> list[Request]:
        """Requests whose output can no longer be completed, with their ``error``; each is named once."""
        alive = [(request, request.grammar) for request in self._users if not request.status.finished]
        self._users[:] = [request for request, grammar in alive if grammar and not grammar.error]
        found = [(request, grammar.error) for request, grammar in alive if grammar and grammar.error]
        for request, error in found:
            request.error = error
        return [request for request, _ in found]

    def wait(self) -> None:
        """Until everything that was started is compiled, or has failed."""
        wait(self._kept.values())


def _reason(message: str) -> str:
    """llguidance's message on one line, without the picture of the grammar under it."""
    line = " ".join(message.split())
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS]}..."
