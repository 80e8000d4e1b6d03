"""The input of ``vtune explain``: a scheduler config and requests with arrival steps, read and checked."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineUserError
from engine.fields import FieldError, Integer, NaturalNumber, PositiveInteger, describe, read_fields
from engine.speculative_config import METHODS, MODEL_METHODS, Method, SpeculativeConfig

S = TypeVar("S", bound=Struct)

MAX_STEPS = 1_000_000
MAX_BLOCKS = 10_000_000
Blocks = Annotated[
    int,
    Meta(ge=2, le=MAX_BLOCKS, description=f"must be an integer of 2 to {MAX_BLOCKS} (one is the null block)"),
]
HostBlocks = Annotated[int, Meta(ge=0, le=MAX_BLOCKS, description=f"must be an integer of 0 to {MAX_BLOCKS}")]
Step = Annotated[int, Meta(ge=0, lt=MAX_STEPS, description=f"must be an integer of 0 to {MAX_STEPS - 1}")]
MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[
    int, Meta(ge=0, le=MAX_TOKEN_ID, description=f"must be a token id of 0 to {MAX_TOKEN_ID}")
]


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


class ExplainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the ``requests``: what it asks for, and the step before which it arrives."""

    request_id: str = field(name="id")
    prompt_token_ids: Annotated[
        tuple[TokenId, ...], Meta(min_length=1, description="must be a list of at least one token id")
    ]
    output_len: PositiveInteger
    arrival_step: Step = 0
    priority: Integer = 0
    lora_name: str = ""


class ExplainConfig(Struct, forbid_unknown_fields=True):
    """The ``config``. Fields that are not given have the engine's own defaults."""

    max_model_len: Integer
    num_gpu_blocks: Blocks
    block_size: Integer = 0
    max_num_seqs: Integer = 0
    max_num_batched_tokens: Integer = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: str = ""
    long_prefill_token_threshold: Integer = 0
    max_num_scheduled_tokens: Integer = 0
    max_num_partial_prefills: Integer = 0
    max_long_partial_prefills: Integer = 0
    num_speculative_tokens: NaturalNumber | None = None
    enable_lora: bool = False
    max_loras: Integer = 0
    scheduler: str = ""
    preemption_mode: str = ""
    num_host_blocks: HostBlocks = 0
    speculative_method: Annotated[Method, Meta(description=f"must be one of {', '.join(METHODS)}")] = "ngram"


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


def read_config(raw: object) -> Setup:
    """Check a ``config`` object, of which ``max_model_len`` and ``num_gpu_blocks`` are required.

    Raises ExplainError, also where a config rule is broken; but a speculative config that no server would
    start with (1 + k tokens exceed the budget) is let through, as its trouble is worth seeing.
    """
    config = _read(raw, ExplainConfig, "config")
    assert isinstance(raw, dict)
    drafts, method = config.num_speculative_tokens, config.speculative_method
    if drafts is not None and drafts >= config.max_model_len > 0:
        raise ExplainError(f"config: num_speculative_tokens must be 0 to max_model_len - 1, got {drafts}")
    flags = {flag.name for flag in fields(EngineConfig)}
    engine = EngineConfig(**{name: value for name, value in raw.items() if name in flags})
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
    return Setup(engine, config.num_gpu_blocks, drafts is not None, noticed, config.num_host_blocks)


def read_requests(raw: object, setup: Setup) -> list[ExplainRequest]:
    """Check a list of ``requests``; ``arrival_step`` and ``priority`` default to 0, ``lora_name`` to none.

    Raises ExplainError.
    """
    if not isinstance(raw, list):
        raise ExplainError(f"requests: must be a list, got {describe(raw)}")
    limit = setup.engine.max_model_len
    assert limit is not None
    places: dict[str, int] = {}
    requests = []
    for place, item in enumerate(raw):
        where = f"requests[{place}]"
        request = _read(item, ExplainRequest, where)
        length, name = len(request.prompt_token_ids), request.request_id
        if length >= limit:
            raise ExplainError(
                f"{where} ({name!r}): the prompt has {length} tokens, but with max_model_len {limit} it can "
                f"have {limit - 1} at most, as one output token must fit"
            )
        if (first := places.setdefault(name, place)) != place:
            raise ExplainError(f"{where}: id {name!r} is taken by requests[{first}]")
        if request.lora_name and not setup.engine.enable_lora:
            raise ExplainError(f"{where} ({name!r}): lora_name needs enable_lora in the config")
        requests.append(request)
    return requests


def _read(raw: object, kind: type[S], where: str) -> S:
    try:
        return read_fields(raw, kind)
    except FieldError as error:
        raise ExplainError(f"{where}: {error}") from None
