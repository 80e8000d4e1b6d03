"""OpenAI's request bodies, as vLLM extends them: JSON in, checked dataclasses out.

Refusals name the field, its value and the rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from engine.config import EngineConfig
from engine.fields import INT64, FieldError, Integer, NaturalNumber, PositiveInteger
from engine.request import SamplingParams
from engine.server.json_body import RequestError, read_body
from engine.server.structured_params import StructureFields, parse_structured_outputs

Prompt = str | tuple[int, ...]
MAX_SEQUENCES = 2048
"""Most sequences (prompts x n) of one HTTP request."""
MAX_LOGPROBS = 20
MAX_STOPS = 256
"""Stop strings of a request: each is looked for after every token, in the loop that serves all requests."""
MAX_STOP_TOKEN_IDS = 4096
MAX_UNKNOWN_NAMES = 20
"""Names of unknown fields that a request's warning lists."""

REFUSED = (
    "allowed_token_ids",
    "audio",
    "bad_words",
    "documents",
    "echo",
    "functions",
    "kv_transfer_params",
    "logit_bias",
    "logprob_token_ids",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_detection",
    "suffix",
    "thinking_token_budget",
    "tools",
    "truncate_prompt_tokens",
    "use_beam_search",
)
"""Fields that would change the answer and that this engine does not have: refused unless empty or false."""

REMOVED = ("guided_choice", "guided_grammar", "guided_json", "guided_regex")
"""Fields that vLLM has removed. It ignores them, and the client would take the output for constrained."""

IGNORED = (
    "include_reasoning",
    "length_penalty",
    "metadata",
    "parallel_tool_calls",
    "reasoning_effort",
    "service_tier",
    "session_id",
    "spaces_between_special_tokens",
    "store",
    "stream_interval",
    "tool_choice",
    "user",
)
"""Fields that change nothing here, as what they belong to (tools, beams) is refused."""
Logprobs = Annotated[
    int, Meta(ge=0, le=MAX_LOGPROBS, description=f"must be an integer of 0 to {MAX_LOGPROBS}")
]
TokenId = Annotated[int, Meta(ge=0, le=INT64 - 1, description="must be a token id")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="must be a number in [-2, 2]")]
TokenIds = tuple[TokenId, ...]
PROMPTS: Mapping[type, Any] = {
    str: tuple[str, ...],
    int: TokenIds,
    list: tuple[Annotated[TokenIds, Meta(min_length=1)], ...],
}
"""By the type of its first item, what a list of prompts, or of a prompt's tokens, must be."""
StopString = Annotated[str, Meta(min_length=1, description="must be a non-empty string")]


class StreamOptions(Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(StructureFields, kw_only=True):
    """The fields that both endpoints share.

    Limits that OpenAI's API does not have keep the sampler's arithmetic finite.
    """

    KNOWN_BESIDE: ClassVar = frozenset((*REFUSED, *REMOVED, *IGNORED))
    """Names of known fields that are not read as fields of this object."""

    model: str | None = None
    max_tokens: PositiveInteger | None = None
    n: Annotated[
        int, Meta(ge=1, le=MAX_SEQUENCES, description=f"must be an integer of 1 to {MAX_SEQUENCES}")
    ] = 1
    best_of: Integer | None = None
    priority: Integer = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    cache_salt: str = ""
    request_id: str | None = None
    min_tokens: NaturalNumber = 0
    temperature: Annotated[float, Meta(ge=0, le=1000, description="must be a number in [0, 1000]")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=INT64 - 1, description="must be an integer of at least -1")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, description="must be a number in (0, 1]")] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1, description="must be a number in [0, 1]")] = 0.0
    seed: Integer | None = None
    repetition_penalty: Annotated[
        float, Meta(ge=0.01, le=100, description="must be a number in [0.01, 100]")
    ] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: Annotated[
        StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)],
        Meta(description=f"must be a non-empty string or a list of at most {MAX_STOPS} of them"),
    ] = msgspec.field(default_factory=list)
    stop_token_ids: Annotated[
        list[TokenId],
        Meta(
            max_length=MAX_STOP_TOKEN_IDS,
            description=f"must be a list of at most {MAX_STOP_TOKEN_IDS} token ids",
        ),
    ] = msgspec.field(default_factory=list)
    ignore_eos: bool = False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """All but ``max_tokens``, see :meth:`Generation.sampling_for`. Raises RequestError."""
        return SamplingParams(
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            structured_outputs=parse_structured_outputs(self),
        )


class CompletionBody(GenerationBody, kw_only=True):
    """Body of ``/v1/completions``."""

    prompt: Any = None
    add_special_tokens: bool = True
    logprobs: Logprobs | None = None


class ChatFields(Struct, kw_only=True):
    """The fields that a chat is rendered from."""

    messages: Any = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    chat_template: Any = None
    continue_final_message: Any = None

    def chat(self) -> tuple[tuple[dict[str, Any], ...], bool, dict[str, Any]]:
        """Messages, whether the template opens the assistant's turn, and further variables for it.

        Raises RequestError.
        """
        if not isinstance(self.messages, list) or not self.messages:
            error = FieldError.of("messages", "must be a non-empty list of messages", self.messages)
            raise RequestError(str(error), error.path)
        for name in ("chat_template", "continue_final_message"):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported by this server", name)
        messages = tuple(_message(item, i) for i, item in enumerate(self.messages))
        return messages, self.add_generation_prompt, self.chat_template_kwargs


class ChatBody(GenerationBody, kw_only=True):
    """Body of ``/v1/chat/completions``, beside :class:`ChatFields`."""

    KNOWN_BESIDE: ClassVar = GenerationBody.KNOWN_BESIDE.union(ChatFields.__struct_fields__)

    max_completion_tokens: PositiveInteger | None = None
    add_special_tokens: bool = False
    logprobs: bool = False
    top_logprobs: Logprobs = 0


class TokenizeBody(Struct):
    """Body of ``/tokenize``: a prompt here, or messages in :class:`ChatFields`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(Struct):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(description="must be a list of token ids")] = msgspec.field(
        default_factory=list
    )


@dataclass(frozen=True)
class Generation:
    """What both endpoints ask of the engine."""

    body: GenerationBody
    sampling: SamplingParams
    """Its ``max_tokens`` is a placeholder until :meth:`sampling_for`."""
    max_tokens: int | None
    unknown: tuple[str, ...]
    """Names of fields that the server does not know, the first :data:`MAX_UNKNOWN_NAMES`."""
    lora_name: str = ""
    """The adapter that is asked for as ``model``; "": none."""

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        body: GenerationBody,
        config: EngineConfig,
        logprobs: int | None,
        max_tokens: int | None,
    ) -> Generation:
        """Raises RequestError for a combination of fields that does not work."""
        _refuse_unsupported(given, body.n if body.best_of is None else body.best_of, body.n)
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        if body.priority and config.scheduling_policy != "priority":
            raise RequestError(
                f"priority {body.priority} needs a server started with --scheduling-policy priority",
                "priority",
            )
        known = body.KNOWN_BESIDE.union(body.__struct_fields__)
        names = tuple(sorted(islice((name for name in given if name not in known), MAX_UNKNOWN_NAMES)))
        adapter = body.model if body.model in config.lora_names else None
        return cls(body, body.sampling(logprobs), max_tokens, names, adapter or "")

    def sampling_for(self, num_prompt_tokens: int, max_model_len: int, default: int | None) -> SamplingParams:
        """The parameters for one prompt. ``default``: max_tokens where the client names none; None: the rest.

        Raises RequestError when prompt and output do not fit into ``max_model_len`` tokens.
        """
        room = max_model_len - num_prompt_tokens
        wanted = self.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            output = "at least 1 token" if wanted is None else f"{wanted} tokens"
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens. However, you requested "
                f"{output} of output and the prompt has {num_prompt_tokens} tokens. "
                "Shorten the prompt or lower max_tokens.",
                "prompt" if room < 1 else "max_tokens",
            )
        limit = wanted if wanted is not None else min(default or room, room)
        if self.sampling.min_tokens > limit:
            raise RequestError(
                f"min_tokens must not exceed max_tokens ({limit}), got {self.sampling.min_tokens}",
                "min_tokens",
            )
        return replace(self.sampling, max_tokens=limit)


@dataclass(frozen=True)
class CompletionRequest:
    """A request to ``/v1/completions``."""

    DEFAULT_MAX_TOKENS: ClassVar = 16

    prompts: tuple[Prompt, ...]
    add_special_tokens: bool
    generation: Generation

    @classmethod
    def parse(cls, given: Mapping[str, Any], config: EngineConfig) -> CompletionRequest:
        """Raises RequestError."""
        body = read_body(given, CompletionBody)
        prompts = _prompts(body.prompt)
        generation = Generation.of(given, body, config, body.logprobs, body.max_tokens)
        _limit_sequences(len(prompts), body.n)
        return cls(prompts, body.add_special_tokens, generation)


@dataclass(frozen=True)
class ChatRequest:
    """A request to ``/v1/chat/completions``."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    template_variables: Mapping[str, Any]
    add_special_tokens: bool
    generation: Generation

    @classmethod
    def parse(cls, given: Mapping[str, Any], config: EngineConfig) -> ChatRequest:
        """Raises RequestError."""
        body = read_body(given, ChatBody)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = body.top_logprobs if body.logprobs else None
        generation = Generation.of(given, body, config, logprobs, limit)
        return cls(*read_body(given, ChatFields).chat(), body.add_special_tokens, generation)


def _message(message: Any, position: int) -> dict[str, Any]:
    """A chat message whose content is one string, as templates expect it."""
    name = f"messages[{position}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name} must be an object with a role", name)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_part(part, f"{name}.content") for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"{name}.content must be a string or a list of text parts", f"{name}.content")
    return {**message, "content": content or ""}


def _text_part(part: Any, name: str) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise RequestError(f"{name}: only text parts are supported", name)
    return text


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists. Raises RequestError."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        kind = PROMPTS.get(type(value[0]))
        with contextlib.suppress(msgspec.ValidationError):
            prompts = msgspec.convert(value, kind)
            return (prompts,) if kind is TokenIds else prompts
    rule = "must be a string, a list of strings, a non-empty list of token ids, or a list of such lists"
    raise RequestError(str(FieldError.of("prompt", rule, value)), "prompt")


def _refuse_unsupported(given: Mapping[str, Any], best_of: int, n: int) -> None:
    for name in REFUSED:
        if given.get(name):
            raise RequestError(f"{name} is not supported by this server", name)
    if best_of != n:
        raise RequestError("best_of other than n is not supported by this server", "best_of")
    for name in REMOVED:
        if given.get(name) is not None:
            kind = name.removeprefix("guided_")
            message = f"{name} is gone from vLLM's API: send structured_outputs: {{{kind}: ...}} instead"
            raise RequestError(message, name)


def _limit_sequences(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(
            f"prompts x n must not exceed {MAX_SEQUENCES}, got {num_prompts} x {n}; send several requests",
            "n",
        )
