"""OpenAI's request bodies, as vLLM extends them: JSON in, checked dataclasses out.

Checked by hand rather than by a schema library: it costs the server a tenth of the start-up time, and every
refusal names the field, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.server.fields import Fields, RequestError, is_token_id
from engine.server.structured_params import parse_structured_outputs

Prompt = str | tuple[int, ...]
MAX_SEQUENCES = 2048
"""Most sequences (prompts x n) of one HTTP request."""
MAX_LOGPROBS = 20
MAX_STOPS = 256
"""Stop strings of a request: every one is looked for after every token, in the loop that serves everybody."""
MAX_STOP_TOKEN_IDS = 4096

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
"""Fields that vLLM has no more; it leaves the output free, which would be taken for bound."""

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
"""Fields that change nothing here: tools, beams and the like are refused where they begin."""


@dataclass(frozen=True)
class Options:
    """What both endpoints share."""

    model: str | None
    sampling: SamplingParams
    """Its ``max_tokens`` is a placeholder until :meth:`sampling_for`."""
    max_tokens: int | None
    n: int
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    cache_salt: str
    request_id: str | None
    unknown: tuple[str, ...]

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
    """Body of ``/v1/completions``."""

    DEFAULT_MAX_TOKENS = 16

    prompts: tuple[Prompt, ...]
    add_special_tokens: bool
    options: Options

    @classmethod
    def parse(cls, body: Mapping[str, Any], config: EngineConfig) -> CompletionRequest:
        """Raises RequestError."""
        fields = Fields(body)
        prompts = _prompts(fields)
        add_special_tokens = fields.boolean("add_special_tokens", True)
        logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
        options = _options(fields, config, logprobs, fields.integer("max_tokens", None, 1))
        _limit_sequences(len(prompts), options.n)
        return cls(prompts, add_special_tokens, options)


@dataclass(frozen=True)
class ChatRequest:
    """Body of ``/v1/chat/completions``."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    template_variables: Mapping[str, Any]
    add_special_tokens: bool
    options: Options

    @classmethod
    def parse(cls, body: Mapping[str, Any], config: EngineConfig) -> ChatRequest:
        """Raises RequestError."""
        fields = Fields(body)
        messages, add_generation_prompt, variables = parse_chat(fields)
        add_special_tokens = fields.boolean("add_special_tokens")
        wants_logprobs = fields.boolean("logprobs")
        top_logprobs = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
        if top_logprobs and not wants_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        older = fields.integer("max_tokens", None, 1)
        limit = fields.integer("max_completion_tokens", older, 1)
        options = _options(fields, config, top_logprobs if wants_logprobs else None, limit)
        _limit_sequences(1, options.n)
        return cls(messages, add_generation_prompt, variables, add_special_tokens, options)


def parse_chat(fields: Fields) -> tuple[tuple[dict[str, Any], ...], bool, dict[str, Any]]:
    """Messages, whether the template opens the assistant's turn, and further variables for it."""
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.refuse("messages", "must be a non-empty list of messages")
    for name in ("chat_template", "continue_final_message"):
        if fields.raw(name):
            raise RequestError(f"{name} is not supported by this server", name)
    variables = fields.raw("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise fields.refuse("chat_template_kwargs", "must be an object")
    opens = fields.boolean("add_generation_prompt", True)
    return tuple(_message(item, i) for i, item in enumerate(messages)), opens, variables


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


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(map(is_token_id, value)):
            return (tuple(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and item and all(map(is_token_id, item)) for item in value):
            return tuple(map(tuple, value))
    raise fields.refuse(
        "prompt",
        "must be a string, a list of strings, a non-empty list of token ids, or a list of such lists",
    )


def _options(fields: Fields, config: EngineConfig, logprobs: int | None, max_tokens: int | None) -> Options:
    stream_options = fields.nested("stream_options")
    stream = fields.boolean("stream")
    if fields.raw("stream_options") is not None and not stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    n = fields.integer("n", 1, 1, MAX_SEQUENCES)
    _refuse_unsupported(fields, n)
    return Options(
        model=fields.text("model"),
        sampling=replace(_sampling(fields, logprobs), structured_outputs=parse_structured_outputs(fields)),
        max_tokens=max_tokens,
        n=n,
        priority=_priority(fields, config),
        stream=stream,
        include_usage=stream_options.boolean("include_usage"),
        continuous_usage=stream_options.boolean("continuous_usage_stats"),
        include_stop=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        return_token_ids=fields.boolean("return_token_ids"),
        return_tokens_as_token_ids=fields.boolean("return_tokens_as_token_ids"),
        cache_salt=fields.text("cache_salt") or "",
        request_id=fields.text("request_id"),
        unknown=tuple(fields.unknown()),
    )


def _sampling(fields: Fields, logprobs: int | None) -> SamplingParams:
    """Limits that OpenAI's API does not have keep the sampler's arithmetic finite."""
    number = fields.number
    return SamplingParams(
        min_tokens=fields.integer("min_tokens", 0, 0),
        temperature=number("temperature", 1.0, "must lie in [0, 1000]", lambda value: 0 <= value <= 1000),
        top_k=max(fields.integer("top_k", 0, -1), 0),
        top_p=number("top_p", 1.0, "must lie in (0, 1]", lambda value: 0 < value <= 1),
        min_p=number("min_p", 0.0, "must lie in [0, 1]", lambda value: 0 <= value <= 1),
        seed=fields.integer("seed", None),
        repetition_penalty=number(
            "repetition_penalty", 1.0, "must lie in [0.01, 100]", lambda value: 0.01 <= value <= 100
        ),
        presence_penalty=number(
            "presence_penalty", 0.0, "must lie in [-2, 2]", lambda value: -2 <= value <= 2
        ),
        frequency_penalty=number(
            "frequency_penalty", 0.0, "must lie in [-2, 2]", lambda value: -2 <= value <= 2
        ),
        stop=fields.texts("stop", MAX_STOPS),
        stop_token_ids=fields.token_ids("stop_token_ids", MAX_STOP_TOKEN_IDS),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
    )


def _priority(fields: Fields, config: EngineConfig) -> int:
    priority = fields.integer("priority", 0)
    if priority and config.scheduling_policy != "priority":
        raise RequestError(
            f"priority {priority} needs a server started with --scheduling-policy priority", "priority"
        )
    return priority


def _refuse_unsupported(fields: Fields, n: int) -> None:
    for name in REFUSED:
        if fields.raw(name):
            raise RequestError(f"{name} is not supported by this server", name)
    if fields.integer("best_of", n) != n:
        raise RequestError("best_of other than n is not supported by this server", "best_of")
    for name in REMOVED:
        if fields.raw(name) is not None:
            kind = name.removeprefix("guided_")
            message = f"{name} is gone from vLLM's API: send structured_outputs: {{{kind}: ...}} instead"
            raise RequestError(message, name)
    for name in IGNORED:
        fields.raw(name)


def _limit_sequences(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(
            f"prompts x n must not exceed {MAX_SEQUENCES}, got {num_prompts} x {n}; send several requests",
            "n",
        )
