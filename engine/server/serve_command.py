"""The command ``vtune serve``: vLLM's flags, as far as this engine has them. Light to import."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

import typer

from engine.config import EngineConfig, KVCacheDtype, StructuredOutputsConfig
from engine.errors import ConfigError
from engine.lora_config import LoRAModule
from engine.server.serve_arguments import normalize
from engine.server.unsupported_flags import UNSUPPORTED_FLAGS
from engine.speculative_config import SpeculativeConfig

HELP = """Serve a model over OpenAI's HTTP API, with vLLM's flags and vLLM's metrics.

MODEL is "bundled" (a small real model, fetched once), a Hugging Face checkpoint directory, a .gguf file, or \
a hub id. Flags may be written with - or _; numbers of tokens as 8k (8,000) or 8K (8,192).

GET /health answers 200 when the server is ready. Exit codes: 0 stopped by SIGTERM, 130 by Ctrl-C, 1 the \
engine died (after 5 s of answering 503), 2 wrong flag, port in use, or no such model.

Examples:

  vtune serve

  vtune serve bundled --port 8001 --max-num-seqs 16 --max-num-batched-tokens 512

  vtune serve ./model --dtype float32 --no-enable-prefix-caching --scheduling-policy priority

  vtune serve bundled --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'

  vtune serve ./model --enable-lora --max-loras 2 --lora-modules sql=./sql-adapter chat=./chat-adapter

  vtune serve bundled --served-model-name small default --speculative-config.method ngram
"""
UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """``2GiB``, ``512 MiB``, ``1.5GB``, or bytes. Raises BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(text).strip())
    if match is None or match[2].lower() not in UNIT_BYTES:
        raise typer.BadParameter(f"{text!r} is not a size; write e.g. 2GiB or 512MiB")
    size = float(match[1]) * UNIT_BYTES[match[2].lower()]
    if size == math.inf:
        raise typer.BadParameter(f"{text[:40]!r}... is larger than any machine")
    return int(size)


def parse_count(text: str) -> int:
    """``8192``, ``8k`` (8,000) or ``8K`` (8,192), as vLLM has it. Raises BadParameter."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", str(text).strip())
    value = float(match[1]) * COUNT_SUFFIXES[match[2]] if match else 0.5
    if not value.is_integer():
        raise typer.BadParameter(f"{text!r} is not a whole number; write e.g. 8192, 8k or 8K")
    return int(value)


def parse_speculation(text: str) -> SpeculativeConfig:
    """Raises BadParameter."""
    try:
        return SpeculativeConfig.parse(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def parse_structure(text: str) -> StructuredOutputsConfig:
    """Raises BadParameter."""
    try:
        return StructuredOutputsConfig.parse(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def parse_adapter(text: str) -> LoRAModule:
    """Raises BadParameter."""
    try:
        return LoRAModule.parse(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _flag(text: str, **options: Any) -> Any:
    return typer.Option(help=text, **options)


def _count(text: str) -> Any:
    return typer.Option(help=text, parser=parse_count, metavar="N")


def serve(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help='What to serve; "bundled" by default.')
    ] = None,
    host: Annotated[str, _flag("Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _flag("Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        _flag("Key that clients must send as bearer token; may be repeated.", envvar="VLLM_API_KEY"),
    ] = None,
    disable_uvicorn_access_log: Annotated[
        bool, typer.Option("--disable-uvicorn-access-log", help="Do not log every HTTP request.")
    ] = False,
    enable_prompt_tokens_details: Annotated[
        bool,
        typer.Option(
            "--enable-prompt-tokens-details", help="Tell in usage how many tokens of the prompt were cached."
        ),
    ] = False,
    enable_per_request_metrics: Annotated[
        bool,
        typer.Option(
            "--enable-per-request-metrics", help="Tell with the usage how long the engine took for a request."
        ),
    ] = False,
    model: Annotated[str, _flag("The same as MODEL.")] = "bundled",
    tokenizer: Annotated[str | None, _flag("Where the tokenizer is, if not with the model.")] = None,
    served_model_name: Annotated[
        list[str] | None, _flag("Names clients may use, one or several; MODEL by default.", metavar="NAME...")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], _flag("What to compute in; auto: as the checkpoint.")
    ] = "auto",
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        _flag("Format of the weights; dummy: random ones for the model's config.json."),
    ] = "auto",
    kv_cache_dtype: Annotated[
        KVCacheDtype, _flag("What keys and values are stored in; auto: what the model computes in.")
    ] = "auto",
    quantization: Annotated[
        Literal["int8_per_channel"] | None,
        _flag("Linear layers in int8: weights per output channel, activations per token."),
    ] = None,
    seed: Annotated[int, _flag("Seed of requests that bring none.")] = 0,
    max_model_len: Annotated[
        int | None, _count("Most tokens of prompt and output together; the model's limit by default.")
    ] = None,
    block_size: Annotated[int, _count("Tokens in a KV-cache block.")] = 16,
    gpu_memory_utilization: Annotated[
        float, _flag("Share of the device's memory for weights, activations and KV cache.")
    ] = 0.92,
    device_memory: Annotated[
        int | None,
        _flag(
            "What the engine takes for its device's memory; by default all of a GPU, on the CPU the larger "
            "of 1GiB and twice the weights.",
            parser=parse_bytes,
            metavar="SIZE",
        ),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, _count("KV blocks, whatever the memory plan says.")
    ] = None,
    max_num_batched_tokens: Annotated[int, _count("Token budget of a step.")] = 2048,
    max_num_seqs: Annotated[int, _count("Most requests that run at once.")] = 128,
    enable_chunked_prefill: Annotated[bool, _flag("Split long prompts over several steps.")] = True,
    enable_prefix_caching: Annotated[bool, _flag("Reuse the KV of common beginnings of prompts.")] = True,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], _flag("Order of the waiting requests: by arrival, or by their priority.")
    ] = "fcfs",
    long_prefill_token_threshold: Annotated[
        int, _count("Most tokens of one request in a step beside others; 0: no limit of its own.")
    ] = 0,
    max_num_scheduled_tokens: Annotated[
        int | None, _count("Tokens scheduled in a step, where these are to be fewer than the budget.")
    ] = None,
    max_num_partial_prefills: Annotated[
        int | None,
        _count("Most prompts left half-way by a step; short ones pass long ones. No limit by default."),
    ] = None,
    max_long_partial_prefills: Annotated[
        int, _count("Of these, most that are longer than the threshold (then 4 % of --max-model-len).")
    ] = 1,
    enforce_eager: Annotated[bool, _flag("Record no CUDA graphs of decode steps.")] = False,
    cudagraph_capture_sizes: Annotated[
        list[int] | None,
        _flag("Batch sizes to record CUDA graphs of. No effect on the CPU.", metavar="N...", min=1),
    ] = None,
    max_cudagraph_capture_size: Annotated[
        int | None, _count("The largest of these sizes; twice --max-num-seqs by default, at most 512.")
    ] = None,
    kv_offloading_size: Annotated[
        float | None, _flag("GiB of host memory for KV blocks that the pool evicts.", metavar="GIB")
    ] = None,
    kv_offloading_backend: Annotated[Literal["native"], _flag("What offloads.")] = "native",
    async_scheduling: Annotated[bool, _flag("Plan a step while the one before it computes.")] = False,
    speculative_config: Annotated[
        Any,
        _flag(
            "Speculation as a JSON object: method (ngram, suffix, draft_model, eagle), "
            "num_speculative_tokens, model (of draft_model and eagle), each method's own keys, "
            "and disable_by_batch_size, which vLLM does not have.",
            parser=parse_speculation,
            metavar="JSON",
        ),
    ] = None,
    structured_outputs_config: Annotated[
        Any,
        _flag(
            "Structured output as a JSON object: backend (auto, guidance), disable_any_whitespace.",
            parser=parse_structure,
            metavar="JSON",
        ),
    ] = None,
    enable_lora: Annotated[bool, _flag("Let requests name one of --lora-modules as their model.")] = False,
    max_loras: Annotated[int, _count("Most adapters of a step; requests of others wait.")] = 1,
    max_lora_rank: Annotated[int, _count("Highest rank of an adapter: 1, 8, 16, 32, 64 up to 512.")] = 16,
    lora_modules: Annotated[
        list[Any] | None,
        _flag(
            "Adapters in PEFT's format, as name=path or as a JSON object with both.",
            parser=parse_adapter,
            metavar="NAME=PATH...",
        ),
    ] = None,
    scheduler: Annotated[
        Literal["unified", "static", "two-track"],
        _flag(
            "Scheduler: unified (vLLM V1), or for comparison static batching, or two-track: prefill and "
            "decode in turn (vLLM V0). Not a flag of vLLM."
        ),
    ] = "unified",
    preemption_mode: Annotated[
        Literal["recompute", "swap"], _flag("What two-track does to whom it preempts.")
    ] = "recompute",
    swap_space: Annotated[float, _flag("GiB of host memory for --preemption-mode swap.")] = 4,
) -> None:
    """Start the server; every parameter but the first eight is the field of EngineConfig of the same name."""
    from engine.server.options import ServerOptions
    from engine.server.server import run_server

    given = dict(context.params)
    try:
        given["model"] = _model(given.pop("arguments") or [], model)
        given["served_model_name"] = tuple(served_model_name or ()) or None
        given["lora_modules"] = tuple(lora_modules or ())
        given["cudagraph_capture_sizes"] = tuple(cudagraph_capture_sizes or ()) or None
        names = {field.name for field in fields(EngineConfig)}
        config = EngineConfig(**{name: value for name, value in given.items() if name in names})
        config.validate()
        options = ServerOptions(
            host,
            port,
            tuple(api_key or ()),
            not disable_uvicorn_access_log,
            enable_prompt_tokens_details,
            enable_per_request_metrics,
        )
        code = run_server(config, options, _non_default(context, given))
    except KeyboardInterrupt:  # before the server has taken over the signals
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def _model(arguments: list[str], option: str) -> str:
    """The one argument that is no flag. Raises BadParameter for unknown flags, and for more arguments."""
    for argument in arguments:
        if argument.startswith("-"):
            raise typer.BadParameter(_unknown_flag(argument.partition("=")[0]))
    if len(arguments) > 1:
        raise typer.BadParameter(f"one MODEL is served, got {' '.join(arguments)}")
    return arguments[0] if arguments else option


def _unknown_flag(flag: str) -> str:
    name = normalize(flag).lstrip("-").removeprefix("no-")
    if name in UNSUPPORTED_FLAGS or not flag.startswith("--"):
        return (
            f"{flag} is a flag of vLLM that this engine does not have; vtune serve --help lists those it has"
        )
    known = [normalize(field.name) for field in fields(EngineConfig)] + ["host", "port", "api-key"]
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean --{close[0]}?" if close else "vtune serve --help lists the flags"
    return f"no such flag: {flag}; {hint}"


def _non_default(context: typer.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was set on the command line, as vLLM logs it; keys are not for logs."""
    defaults = {parameter.name: parameter.default for parameter in context.command.params}
    shown = {name: value for name, value in given.items() if value not in (defaults.get(name), ())}
    if shown.get("api_key"):
        shown["api_key"] = "***"
    if isinstance(speculation := shown.get("speculative_config"), SpeculativeConfig):
        shown["speculative_config"] = {
            field.name: getattr(speculation, field.name) for field in fields(speculation)
        }
    return shown
