"""The HTTP endpoints: OpenAI's, and those of vLLM that tools expect beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.metrics.prometheus import CONTENT_TYPE
from engine.request import SamplingParams
from engine.server.asgi import CLIENT_GONE, EventStream, error_event, receive_body, unless_disconnected
from engine.server.frontend import Delta, Frontend
from engine.server.json_body import RequestError, parse_json, read_body
from engine.server.process import EngineDeadError
from engine.server.protocol import (
    ChatFields,
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    Generation,
    Prompt,
    TokenizeBody,
)
from engine.server.responses import ChatWriter, Choice, CompletionWriter, Tells, Writer
from engine.text.tokenizer import ChatTemplateError, NoTokenizerError, Tokenizer

T = TypeVar("T")
logger = logging.getLogger("vtune.api")
MAX_WARNED_NAMES = 100
"""The most names of unknown fields to warn about, so that a client cannot fill the log with new ones."""
LONG_INPUT_LENGTH = 20_000
"""Characters or tokens from which their conversion moves to a thread."""


class Api:
    """The endpoints of one server, over one frontend."""

    def __init__(self, frontend: Frontend, version: str, tells: Tells) -> None:
        self._frontend, self._version, self._tells = frontend, version, tells
        self._config = frontend.info.config
        self._model_name = self._config.served_name
        assert self._config.max_model_len is not None
        self._max_model_len: int = self._config.max_model_len
        self._created = int(time.time())
        self._warned: set[str] = set()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/load", self.load),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
        ]

    # ---------------------------------------------------------------- generation

    async def completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        parsed = CompletionRequest.parse(parse_json(await receive_body(request)), self._config)
        self._admit(parsed.generation)
        prompts = [await self._token_ids(prompt, parsed.add_special_tokens) for prompt in parsed.prompts]
        writer = CompletionWriter(*self._writes(parsed.generation, prompts))
        default = CompletionRequest.DEFAULT_MAX_TOKENS
        return await self._answer(request, prompts, parsed.generation, default, writer, arrival)

    async def chat(self, request: Request) -> Response:
        arrival = time.monotonic()
        parsed = ChatRequest.parse(parse_json(await receive_body(request)), self._config)
        self._admit(parsed.generation)
        text = self._render(parsed.messages, parsed.add_generation_prompt, parsed.template_variables)
        prompts = [await self._token_ids(text, parsed.add_special_tokens)]
        writer = ChatWriter(*self._writes(parsed.generation, prompts))
        return await self._answer(request, prompts, parsed.generation, None, writer, arrival)

    def _writes(
        self, generation: Generation, prompts: Sequence[list[int]]
    ) -> tuple[str, str, Tokenizer, Generation, Sequence[list[int]], Tells]:
        """What a writer is made of."""
        name = generation.body.request_id or uuid.uuid4().hex
        return (
            name,
            generation.lora_name or self._model_name,
            self._frontend.tokenizer,
            generation,
            prompts,
            self._tells,
        )

    async def _answer(
        self,
        request: Request,
        prompts: Sequence[list[int]],
        generation: Generation,
        default_max_tokens: int | None,
        writer: Writer,
        arrival: float,
    ) -> Response:
        limit = self._max_model_len
        sampled = [(ids, generation.sampling_for(len(ids), limit, default_max_tokens)) for ids in prompts]
        if generation.body.stream:
            steps = self._frontend.generate(sampled, generation, arrival)
            if generation.sampling.structured_outputs is not None:  # which the engine may refuse
                started = await unless_disconnected(request.receive, _started(steps))
                if started is None:
                    return Response(status_code=CLIENT_GONE)
                steps = started
            return EventStream(self._events(steps, writer))
        whole = self._whole(sampled, generation, writer, arrival)
        return await unless_disconnected(request.receive, whole) or Response(status_code=CLIENT_GONE)

    async def _events(
        self, steps: AsyncGenerator[list[Delta], None], writer: Writer
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error that comes after the headers is one of them."""
        try:
            async with contextlib.aclosing(steps):
                async for deltas in steps:
                    yield writer.chunks(deltas)
            yield writer.last_chunks()
        except RequestError as error:
            yield error_event(error.message, error.kind, error.status)
        except EngineDeadError as error:
            yield error_event(str(error), "EngineDeadError", 503)
        except Exception:
            logger.exception("a stream failed")
            yield error_event("internal error, see the server's log", "InternalServerError", 500)

    async def _whole(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        generation: Generation,
        writer: Writer,
        arrival: float,
    ) -> Response:
        choices = [Choice() for _ in range(len(prompts) * generation.body.n)]
        async with contextlib.aclosing(self._frontend.generate(prompts, generation, arrival)) as steps:
            async for deltas in steps:
                for delta in deltas:
                    choices[delta.index].add(delta.piece)
                    writer.note(delta)
        return JSONResponse(writer.body(choices))

    def _admit(self, generation: Generation) -> None:
        """Refuse what can never be answered, and warn once about unknown fields."""
        self._check_model(generation.body.model)
        if not self._frontend.alive:
            raise EngineDeadError("the engine process is gone")
        model, sampling = self._frontend.model, generation.sampling
        stops = {*sampling.stop_token_ids, *model.eos_token_ids}
        if sampling.min_tokens and len(stops) >= model.vocab_size:
            raise RequestError("with min_tokens, some token must be no stop token", "stop_token_ids")
        news = sorted(set(generation.unknown) - self._warned)
        if news and len(self._warned) < MAX_WARNED_NAMES:
            self._warned.update(news)
            names = (
                ", ".join(news)[:500].encode("unicode_escape").decode()
            )  # no line of the log is a client's
            logger.warning(f"fields present in a request but ignored: {names}")

    def _check_model(self, name: str | None) -> None:
        known = *self._config.served_names, *self._config.lora_names
        if name is not None and name not in known:
            has = "`, `".join((self._model_name, *self._config.lora_names))
            message = f"The model `{name}` does not exist; this server has `{has}`."
            raise RequestError(message, "model", 404, "NotFoundError")

    async def _token_ids(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        """Raises RequestError for an empty prompt, or an id outside the vocabulary."""
        if isinstance(prompt, str):
            encode = self._frontend.tokenizer.encode
            try:
                ids = await _in_thread_if_long(len(prompt), encode, prompt, add_special_tokens)
            except NoTokenizerError as error:
                raise RequestError(str(error), "prompt") from None
        else:
            ids = list(prompt)
        if not ids:
            raise RequestError("the prompt is empty", "prompt")
        vocabulary = self._frontend.model.vocab_size
        if (largest := max(ids)) >= vocabulary:
            message = f"token id {largest} is out of vocabulary (0 to {vocabulary - 1})"
            if isinstance(prompt, str):
                message += ": the server's tokenizer is not the model's; start it with another --tokenizer"
            raise RequestError(message, "prompt")
        return ids

    def _render(self, messages: Sequence[dict[str, Any]], opens: bool, variables: Mapping[str, Any]) -> str:
        try:
            return self._frontend.tokenizer.apply_chat_template(messages, opens, **variables)
        except ChatTemplateError as error:
            raise RequestError(str(error), "messages") from None
        except TypeError as error:  # a variable named like an argument
            raise RequestError(f"chat_template_kwargs: {error}", "chat_template_kwargs") from None

    # ---------------------------------------------------------------- everything else

    async def models(self, request: Request) -> Response:
        names = *self._config.served_names, *self._config.lora_names
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._check_model(name)
        return JSONResponse(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        adapter = next((module for module in self._config.lora_modules if module.name == name), None)
        root, parent = self._config.model, None
        if adapter is not None:
            root, parent = adapter.path, adapter.base_model_name or self._model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vtune",
            "root": root,
            "parent": parent,
            "max_model_len": self._max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        given = parse_json(await receive_body(request))
        body = read_body(given, TokenizeBody)
        self._check_model(body.model)
        chats = given.get("messages") is not None
        text = self._render(*read_body(given, ChatFields).chat()) if chats else body.prompt
        if text is None:
            raise RequestError("prompt is missing: give a string, or give messages", "prompt")
        special = not chats if body.add_special_tokens is None else body.add_special_tokens
        ids = await self._token_ids(text, special)
        strings = None
        if body.return_token_strs:
            strings = await _in_thread_if_long(len(ids), self._frontend.tokenizer.token_texts, ids)
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = read_body(parse_json(await receive_body(request)), DetokenizeBody)
        self._check_model(body.model)
        ids = await self._token_ids(tuple(body.tokens), False)
        text = await _in_thread_if_long(len(ids), self._frontend.tokenizer.decode, ids, False)
        return JSONResponse({"prompt": text})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._frontend.alive else 503)

    async def load(self, request: Request) -> Response:
        """How many sequences are being generated."""
        return JSONResponse({"server_load": self._frontend.num_sequences})

    async def reset_prefix_cache(self, request: Request) -> Response:
        if request.query_params.get("reset_running_requests", "false").lower() not in ("false", "0"):
            message = "reset_running_requests is not supported by this server; wait until nothing runs"
            raise RequestError(message, "reset_running_requests")
        return JSONResponse({"success": await self._frontend.reset_prefix_cache()})

    async def metrics(self, request: Request) -> Response:
        return Response(self._frontend.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version, "engine": "vtune"})


async def _started(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """``items``, once the first is there: what goes wrong before can still be answered with a status."""
    first = await anext(items)

    async def whole() -> AsyncGenerator[T, None]:
        async with contextlib.aclosing(items):
            yield first
            async for item in items:
                yield item

    return whole()


async def _in_thread_if_long(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """``work(*arguments)``: in a thread if it is long, so that the loop stays responsive."""
    if size < LONG_INPUT_LENGTH:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)
