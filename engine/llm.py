"""The engine without a server: prompts in, completions out, arrivals by step where asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig, StructuredOutputsConfig
from engine.core import EngineCore
from engine.errors import EngineUserError
from engine.models.checkpoint import load_model_config
from engine.models.weights import resolve_model
from engine.request import Request, RequestStatus, SamplingParams
from engine.speculative_config import SpeculativeConfig
from engine.step import RequestOutput, StepOutput, StepPlan, TokenLogprobs
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.core import Runner

Prompt = str | Sequence[int]
Observer = Callable[[StepPlan, StepOutput], None]


class PromptError(EngineUserError):
    """A prompt that the engine cannot complete."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer. ``finish_reason`` is "stop" or "length", as in OpenAI's API."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class _OfflineSequence:
    """An unfinished request, and its text so far."""

    request: Request
    stream: TextStream
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, output: RequestOutput) -> bool:
        """Book an output; True if a stop string ended the text, so that the request is to be dropped.

        Raises PromptError for a request that the engine has refused.
        """
        if output.finish is RequestStatus.FINISHED_ERROR:
            raise PromptError(str(output.stop_reason))
        piece = self.stream.advance(output)
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        return piece.finish_reason is not None and output.finish is None

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self.token_ids,
            text=self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.request.sampling.logprobs is None else self.logprobs,
            num_cached_tokens=self.request.num_cached_tokens,
            num_preemptions=self.request.num_preemptions,
        )


class LLM:
    """``LLM("bundled", max_num_seqs=16).generate(["Hello"], SamplingParams(max_tokens=8))``.

    Flags are EngineConfig's; ``speculative_config`` may be a mapping. Raises ConfigError, ModelError or
    FetchError.
    """

    def __init__(self, model: str = "bundled", *, runner: Runner | None = None, **flags: Any) -> None:
        speculative = flags.get("speculative_config")
        if isinstance(speculative, str | Mapping):
            flags["speculative_config"] = SpeculativeConfig.parse(speculative)
        structure = flags.get("structured_outputs_config")
        if isinstance(structure, str | Mapping):
            flags["structured_outputs_config"] = StructuredOutputsConfig.parse(structure)
        config = EngineConfig(model=model, **flags)
        path = resolve_model(model)
        tokenizer = resolve_model(config.tokenizer) if config.tokenizer else path
        self.tokenizer = Tokenizer.load(tokenizer, config.load_format)
        self._model = load_model_config(path, config.load_format)
        self.core = EngineCore(config, runner)
        self._num_requests = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        arrivals: Sequence[int] | None = None,
        priorities: Sequence[int] | None = None,
        lora_names: Sequence[str] | None = None,
        observe: Observer | None = None,
    ) -> list[Completion]:
        """Complete every prompt (each text or token ids); answers in the prompts' order.

        ``arrivals[i]`` is the step before which request i is added (0 for all by default), so that a
        workload is exactly repeatable. ``lora_names``: of the adapter of each, "" for none. ``observe`` sees
        every step. Raises PromptError for a bad prompt or an unknown adapter, and ValueError for lists of
        different lengths.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a list; for one prompt give a list of one")
        count = len(prompts)
        each = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
        at = list(arrivals) if arrivals is not None else [0] * count
        ranks = list(priorities) if priorities is not None else [0] * count
        adapters = list(lora_names) if lora_names is not None else [""] * count
        lists: dict[str, Sequence[object]] = {
            "sampling": each,
            "arrivals": at,
            "priorities": ranks,
            "lora_names": adapters,
        }
        for name, values in lists.items():
            if len(values) != count:
                raise ValueError(f"{name}: {len(values)} given for {count} prompts")
        sequences = [self._sequence(*item) for item in zip(prompts, each, ranks, adapters, strict=True)]
        try:
            self._run(sequences, at, observe)
        except BaseException:
            self.core.abort([sequence.request.request_id for sequence in sequences])
            raise
        return [sequence.completion() for sequence in sequences]

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forget the KV of earlier prompts (and, on demand, what is offloaded of it), so that the next ones
        are computed anew. True: it was done."""
        return self.core.reset_prefix_cache(reset_connector)

    def _run(
        self, sequences: list[_OfflineSequence], arrivals: Sequence[int], observe: Observer | None
    ) -> None:
        by_id = {sequence.request.request_id: sequence for sequence in sequences}
        # Within a step requests are added in the order of the prompts.
        pending = sorted(range(len(sequences)), key=lambda i: arrivals[i])
        step = added = 0
        while added < len(pending) or self.core.has_unfinished:
            while added < len(pending) and arrivals[pending[added]] <= step:
                request = sequences[pending[added]].request
                self.core.add(request)
                if request.gate is not None:
                    self.core.grammars.wait()  # in a thread's own time, steps would not be repeatable
                added += 1
            plan, output = self.core.step()
            stopped = [item.request_id for item in output.outputs if by_id[item.request_id].take(item)]
            if stopped:
                self.core.abort(stopped, RequestStatus.FINISHED_STOPPED)
            if observe is not None:
                observe(plan, output)
            step += 1

    def _sequence(
        self, prompt: Prompt, sampling: SamplingParams, priority: int, lora_name: str
    ) -> _OfflineSequence:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        limit = self.core.config.max_model_len
        assert limit is not None
        if not token_ids:
            raise PromptError("a prompt must hold at least one token")
        if len(token_ids) >= limit:
            raise PromptError(
                f"a prompt of {len(token_ids)} tokens leaves no room below max_model_len {limit}"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self._model.vocab_size:
            raise PromptError(
                f"token ids must lie in 0 to {self._model.vocab_size - 1}, the model's vocabulary"
            )
        known = self.core.config.lora_names
        if lora_name and lora_name not in known:
            raise PromptError(f"no adapter is named {lora_name!r}; there are: {', '.join(known) or 'none'}")
        self._num_requests += 1
        request = Request(
            request_id=f"offline-{self._num_requests}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            eos_token_ids=self._model.eos_token_ids,
            priority=priority,
            arrival_time=float(self._num_requests),
            lora_name=lora_name,
        )
        return _OfflineSequence(request, TextStream(self.tokenizer, sampling))
