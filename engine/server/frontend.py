"""Between HTTP and the engine process: prompts and parameters in, pieces of text out, metrics on the way."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from engine.metrics.log import LOG_INTERVAL_SECONDS, StatLogger
from engine.metrics.prometheus import PrometheusMetrics
from engine.metrics.stats import FinishedStats
from engine.models.model_config import ModelConfig
from engine.request import Request, RequestStatus, SamplingParams
from engine.server.json_body import RequestError
from engine.server.process import EngineDeadError, EngineInfo, EngineProcess
from engine.server.protocol import Generation
from engine.step import RequestOutput
from engine.text.text_stream import TextPiece, TextStream
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step brought to one choice of an HTTP request."""

    index: int
    piece: TextPiece
    cached_tokens: int = 0
    """Tokens of its prompt that were found in the prefix cache."""
    timing: FinishedStats | None = None
    """How long the engine took for it, with the last delta (not of one that ended at a stop string)."""


class Frontend:
    """Submits to one engine process and hands its output to the coroutines that wait for it."""

    def __init__(
        self,
        process: EngineProcess,
        info: EngineInfo,
        model: ModelConfig,
        tokenizer: Tokenizer,
        metrics: PrometheusMetrics,
        stat_logger: StatLogger,
    ) -> None:
        self.info, self.model, self.tokenizer, self.metrics = info, model, tokenizer, metrics
        self._process, self._stat_logger = process, stat_logger
        self._mailboxes: dict[str, _Mailbox] = {}
        self._resets: deque[asyncio.Future[bool]] = deque()
        self._ids = itertools.count()

    @property
    def alive(self) -> bool:
        return self._process.alive

    @property
    def num_sequences(self) -> int:
        """Sequences in flight."""
        return len(self._mailboxes)

    async def run(self) -> None:
        """Hand output on until the engine is gone; then every waiting coroutine gets EngineDeadError."""
        logging_task = asyncio.create_task(self._log_forever())
        try:
            async for step in self._process.steps():
                self.metrics.record(step.stats)
                self._stat_logger.record(step.stats)
                if step.prefix_cache_reset is not None and not (reset := self._resets.popleft()).done():
                    reset.set_result(step.prefix_cache_reset)
                for request_id, cached in step.admitted.items():
                    mailbox = self._mailboxes.get(request_id)
                    if mailbox is not None:
                        mailbox.cached.setdefault(request_id, cached)  # when it is resumed, the first counts
                for finished in step.stats.finished:
                    mailbox = self._mailboxes.get(finished.request_id)
                    if mailbox is not None:
                        mailbox.finished[finished.request_id] = finished
                for output in step.outputs:
                    mailbox = self._mailboxes.get(output.request_id)
                    if mailbox is not None:
                        mailbox.put(output)
        finally:
            logging_task.cancel()
            self.fail_all(EngineDeadError(f"the engine process is gone ({self._process.exit_reason()})"))

    def fail_all(self, error: Exception) -> None:
        """End everything that waits for the engine with ``error``."""
        for reset in self._resets:
            if not reset.done():
                reset.set_exception(error)
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)

    async def reset_prefix_cache(self) -> bool:
        """Whether cached prefixes are forgotten; they are not while requests hold blocks.

        Raises EngineDeadError.
        """
        self._process.reset_prefix_cache()
        reset: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append(reset)
        return await reset

    def close(self) -> None:
        """Stop the engine process."""
        self._process.close()

    async def generate(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], generation: Generation, arrival: float
    ) -> AsyncGenerator[list[Delta], None]:
        """Run ``n`` sequences of each prompt; yields what came since the last time, once per step.

        Choice ``i * n + j`` is sequence j of prompt i. Close the iterator (``contextlib.aclosing``) to abort
        what is unfinished. Raises EngineDeadError, or RequestError for what the engine refuses.
        """
        groups = [
            [
                self._sequence(i * generation.body.n + j, ids, sampling, j, generation, arrival)
                for j in range(generation.body.n)
            ]
            for i, (ids, sampling) in enumerate(prompts)
        ]
        open_sequences = {sequence.request_id: sequence for group in groups for sequence in group}
        mailbox = _Mailbox()
        self._mailboxes.update(dict.fromkeys(open_sequences, mailbox))
        try:
            self._process.submit([sequence.request for sequence in open_sequences.values()])
            while open_sequences:
                deltas = []
                for output in await mailbox.take():
                    sequence = open_sequences.get(output.request_id)
                    if sequence is None:
                        continue  # it met a stop string while this was on its way
                    if output.finish is RequestStatus.FINISHED_ERROR:
                        raise RequestError(str(output.stop_reason))
                    cached = mailbox.cached.get(output.request_id, 0)
                    timing = mailbox.finished.get(output.request_id)
                    deltas.append(delta := sequence.advance(output, cached, timing))
                    if sequence.finished:
                        self._finished(sequence, output, groups[delta.index // generation.body.n])
                        del open_sequences[output.request_id]
                yield deltas
        finally:
            for request_id in open_sequences:
                self._mailboxes.pop(request_id, None)
            if open_sequences and self.alive:
                self._process.abort(open_sequences)

    def _sequence(
        self,
        index: int,
        ids: list[int],
        sampling: SamplingParams,
        j: int,
        generation: Generation,
        arrival: float,
    ) -> _ServedSequence:
        if j and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + j)  # or all n would be the same
        request = Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=ids,
            sampling=sampling,
            eos_token_ids=self.model.eos_token_ids,
            priority=generation.body.priority,
            arrival_time=arrival,
            cache_salt=generation.body.cache_salt,
            lora_name=generation.lora_name,
        )
        text = TextStream(
            self.tokenizer,
            sampling,
            skip_special_tokens=generation.body.skip_special_tokens,
            include_stop=generation.body.include_stop_str_in_output,
        )
        return _ServedSequence(index, request, text)

    def _finished(
        self, sequence: _ServedSequence, output: RequestOutput, group: list[_ServedSequence]
    ) -> None:
        self._mailboxes.pop(sequence.request_id, None)
        if output.finish is None:  # a stop string ended it, which the engine cannot see
            self._process.abort((sequence.request_id,), RequestStatus.FINISHED_STOPPED)
        if all(member.finished for member in group):
            self.metrics.record_group(len(group), max(member.text.num_tokens for member in group))

    async def _log_forever(self) -> None:
        while True:
            await asyncio.sleep(LOG_INTERVAL_SECONDS)
            self._stat_logger.log()


class _ServedSequence:
    """One choice of an answer, while it is generated."""

    __slots__ = ("finished", "index", "request", "text")

    def __init__(self, index: int, request: Request, text: TextStream) -> None:
        self.index, self.request, self.text = index, request, text
        self.finished = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def advance(self, output: RequestOutput, cached_tokens: int, timing: FinishedStats | None) -> Delta:
        piece = self.text.advance(output)
        self.finished = piece.finish_reason is not None
        return Delta(self.index, piece, cached_tokens, timing)


class _Mailbox:
    """Output for one request's coroutine, which is woken once per step."""

    __slots__ = ("_error", "_outputs", "_waiter", "cached", "finished")

    def __init__(self) -> None:
        self.cached: dict[str, int] = {}
        """Prefix-hit tokens of the requests that were admitted."""
        self.finished: dict[str, FinishedStats] = {}
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """Everything since the last time, at least one output. Raises what :meth:`fail` was given."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
