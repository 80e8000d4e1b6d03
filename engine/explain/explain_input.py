"""The input of ``vtune explain``: a scheduler config and requests with arrival steps, read and checked."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import METHODS, MODEL_METHODS, ConfigError, EngineConfig, SpeculativeConfig
from engine.errors import EngineUserError

MAX_STEPS = 1_000_000
MAX_BLOCKS = 10_000_000
MAX_TOKEN_ID = 2**31 - 1


class ExplainError(EngineUserError):
    """The input cannot be explained. The message says where, what is wrong, and what would do."""


@dataclass(frozen=True)
class Setup:
    """A scheduler's config, and the size of its block pool."""

    engine: EngineConfig
    num_gpu_blocks: int
    """Null block included."""
    speculative: bool
    """Whether ``num_speculative_tokens`` was given: rows then tell drafts and emitted tokens."""
    warnings: tuple[str, ...] = ()
    num_host_blocks: int = 0
    """The swap space of ``preemption_mode`` "swap"."""


@dataclass(frozen=True)
class Arrival:
    """A request and the step before which it arrives."""

    request_id: str
    arrival_step: int
    prompt_token_ids: tuple[int, ...]
    output_len: int
    priority: int


def load(source: str) -> object:
    """The object in a JSON file, a YAML file (by its name), or standard input (``-``, JSON).

    Raises ExplainError.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ExplainError(f"{source}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ExplainError(f"{source}: is not UTF-8 text (byte {error.start})") from None
    if source.endswith((".yaml", ".yml")):
        return _load_yaml(source, text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExplainError(f"{source}: is not JSON ({error})") from None


def _load_yaml(source: str, text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ExplainError(f"{source}: is not YAML ({error})") from None


_CONFIG_KEYS: dict[str, type] = {
    "block_size": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "max_model_len": int,
    "enable_chunked_prefill": bool,
    "enable_prefix_caching": bool,
    "num_gpu_blocks": int,
    "scheduling_policy": str,
    "long_prefill_token_threshold": int,
    "max_num_scheduled_tokens": int,
    "max_num_partial_prefills": int,
    "max_long_partial_prefills": int,
    "num_speculative_tokens": int,
    "scheduler": str,
    "preemption_mode": str,
    "num_host_blocks": int,
    "speculative_method": str,
}
_REQUEST_KEYS: dict[str, type] = {
    "id": str,
    "arrival_step": int,
    "prompt_token_ids": list,
    "output_len": int,
    "priority": int,
}
_TYPE_NAMES = {int: "an integer", bool: "true or false", str: "a string", list: "a list"}


def read_config(raw: object) -> Setup:
    """Check a ``config`` object, of which ``max_model_len`` and ``num_gpu_blocks`` are required.

    Raises ExplainError, also where a config rule is broken; but a speculative config that no server would
    start with (1 + k tokens exceed the budget) is let through, as its trouble is worth seeing.
    """
    given = _checked(raw, "config", _CONFIG_KEYS, required=("max_model_len", "num_gpu_blocks"))
    num_blocks = given.pop("num_gpu_blocks")
    num_host_blocks = given.pop("num_host_blocks", 0)
    drafts = given.pop("num_speculative_tokens", None)
    method = given.pop("speculative_method", "ngram")
    if not 2 <= num_blocks <= MAX_BLOCKS:
        raise ExplainError(
            f"config: num_gpu_blocks is {num_blocks}, must be 2 to {MAX_BLOCKS} (one is the null block)"
        )
    if not 0 <= num_host_blocks <= MAX_BLOCKS:
        raise ExplainError(f"config: num_host_blocks is {num_host_blocks}, must be 0 to {MAX_BLOCKS}")
    if drafts is not None and not 0 <= drafts < given["max_model_len"]:
        raise ExplainError(f"config: num_speculative_tokens is {drafts}, must be 0 to max_model_len - 1")
    if method not in METHODS:
        raise ExplainError(f"config: speculative_method must be one of {', '.join(METHODS)}")
    engine = EngineConfig(**given)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.validate()
    except ConfigError as error:
        raise ExplainError(f"config: {error}") from None
    if drafts and engine.scheduler != "unified":
        raise ExplainError(f"config: the {engine.scheduler} scheduler has no num_speculative_tokens")
    if drafts:
        model = "draft" if method in MODEL_METHODS else None  # never loaded
        speculative = SpeculativeConfig(method=method, num_speculative_tokens=drafts, model=model)
        engine = replace(engine, speculative_config=speculative)
    noticed = tuple(str(item.message) for item in caught)
    return Setup(engine, num_blocks, drafts is not None, noticed, num_host_blocks)


def read_requests(raw: object, setup: Setup) -> list[Arrival]:
    """Check a list of ``requests``; ``arrival_step`` and ``priority`` default to 0. Raises ExplainError."""
    if not isinstance(raw, list):
        raise ExplainError(f"requests: must be a list, is {_name_type(raw)}")
    arrivals: list[Arrival] = []
    places: dict[str, int] = {}
    for place, item in enumerate(raw):
        where = f"requests[{place}]"
        arrival = _read_request(item, where, setup)
        if arrival.request_id in places:
            first = places[arrival.request_id]
            raise ExplainError(f"{where}: id {arrival.request_id!r} is taken by requests[{first}]")
        places[arrival.request_id] = place
        arrivals.append(arrival)
    return arrivals


def _read_request(item: object, where: str, setup: Setup) -> Arrival:
    given = _checked(item, where, _REQUEST_KEYS, required=("id", "prompt_token_ids", "output_len"))
    where = f"{where} ({given['id']!r})"
    prompt, limit = given["prompt_token_ids"], setup.engine.max_model_len
    assert limit is not None
    for position, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise ExplainError(
                f"{where}: prompt_token_ids[{position}] must be a token id from 0 to {MAX_TOKEN_ID}, "
                f"is {_shorten(token)}"
            )
    if not prompt:
        raise ExplainError(f"{where}: prompt_token_ids is empty, at least one token is needed")
    if len(prompt) >= limit:
        raise ExplainError(
            f"{where}: the prompt has {len(prompt)} tokens, but with max_model_len {limit} it can have "
            f"{limit - 1} at most, as one output token must fit"
        )
    if given["output_len"] < 1:
        raise ExplainError(f"{where}: output_len is {given['output_len']}, must be at least 1")
    arrival_step = given.get("arrival_step", 0)
    if not 0 <= arrival_step < MAX_STEPS:
        raise ExplainError(f"{where}: arrival_step is {arrival_step}, must be 0 to {MAX_STEPS - 1}")
    return Arrival(given["id"], arrival_step, tuple(prompt), given["output_len"], given.get("priority", 0))


def _checked(raw: object, where: str, keys: Mapping[str, type], required: Sequence[str]) -> dict[str, Any]:
    """``raw`` as a dict that has only known keys, of the right types, and all that are required."""
    if not isinstance(raw, dict):
        raise ExplainError(f"{where}: must be an object, is {_name_type(raw)}")
    for key, value in raw.items():
        if key not in keys:
            raise ExplainError(f"{where}: unknown key {_shorten(key)}; known are {', '.join(keys)}")
        if type(value) is not keys[key]:
            raise ExplainError(f"{where}: {key} must be {_TYPE_NAMES[keys[key]]}, is {_shorten(value)}")
    for key in required:
        if key not in raw:
            raise ExplainError(f"{where}: {key} is missing")
    return dict(raw)


def _name_type(value: object) -> str:
    return {"dict": "an object", "NoneType": "null"}.get(type(value).__name__, _shorten(value))


def _shorten(value: object, limit: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
