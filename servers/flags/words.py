"""Flags as words of a command line: read, typed by what a flag takes, and written back.

Names are vLLM's in snake case (``max_num_seqs``), values are typed (``12``, ``0.9``, ``True``, parsed JSON).
``None`` stands for "not given". No shell is involved: words are split as a POSIX shell splits them, and
nothing is expanded.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from servers.connection import masked
from servers.errors import UserError

Kind = Literal["switch", "int", "size", "float", "json", "text", "many"]


class FlagError(UserError):
    """A command line that cannot be read. The message says which word, why, and what to write."""


def _kinds(**names: str) -> dict[str, Kind]:
    return {name: kind for kind, text in names.items() for name in text.split()}  # type: ignore[misc]


KINDS = _kinds(
    switch="""
        enable_prefix_caching enable_chunked_prefill enforce_eager async_scheduling enable_lora
        trust_remote_code enable_expert_parallel disable_log_requests enable_log_requests disable_log_stats
        enable_auto_tool_choice disable_custom_all_reduce disable_cascade_attn enable_sleep_mode
        skip_tokenizer_init calculate_kv_scales disable_hybrid_kv_cache_manager disable_uvicorn_access_log
        enable_eplb enable_dbo headless enable_prompt_tokens_details enable_server_load_tracking
        disable_sliding_window disable_frontend_multiprocessing fully_sharded_loras
    """,
    int="""
        max_num_seqs block_size long_prefill_token_threshold max_num_partial_prefills
        max_long_partial_prefills num_gpu_blocks_override tensor_parallel_size pipeline_parallel_size
        data_parallel_size decode_context_parallel_size api_server_count seed port max_seq_len_to_capture
        max_loras max_lora_rank max_logprobs max_cudagraph_capture_size stream_interval optimization_level
        device_memory
    """,
    size="max_model_len max_num_batched_tokens kv_cache_memory_bytes",
    float="gpu_memory_utilization swap_space cpu_offload_gb kv_offloading_size rope_theta",
    json="""
        speculative_config compilation_config kv_transfer_config kv_events_config hf_overrides rope_scaling
        override_generation_config model_loader_extra_config additional_config mm_processor_kwargs
        limit_mm_per_prompt structured_outputs_config attention_config default_chat_template_kwargs
    """,
    text="""
        model tokenizer host api_key revision tokenizer_revision code_revision dtype quantization load_format
        kv_cache_dtype scheduling_policy chat_template download_dir config hf_token root_path
        uvicorn_log_level distributed_executor_backend tool_call_parser reasoning_parser attention_backend
        tokenizer_mode config_format prefix_caching_hash_algo generation_config
    """,
    many="""
        served_model_name cuda_graph_sizes cudagraph_capture_sizes lora_modules allowed_origins
        allowed_methods allowed_headers middleware ignore_patterns
    """,
)
"""What a flag's value is. A flag that is not here is guessed from its text, never refused."""

SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
    "ep": "enable_expert_parallel",
    "asc": "api_server_count",
    "q": "quantization",
    "O": "compilation_config",
    "cc": "compilation_config",
    "sc": "speculative_config",
}

_SUFFIX = dict(
    zip("kmgtKMGT", [10**3, 10**6, 10**9, 10**12, 1 << 10, 1 << 20, 1 << 30, 1 << 40], strict=True)
)
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_ENV = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHELL_STOP = re.compile(r"\|\|?|&&?|;|[\d&]*>.*")
_CONTINUATION = re.compile(r"\\[ \t]*\r?\n")


def render(flags: Mapping[str, Any], many: Collection[str] = ()) -> list[str]:
    """The flags as words for an argument vector, in the mapping's order.

    True becomes ``--flag``, False ``--no-flag``, None nothing, a mapping or list JSON (for a flag that takes
    several words, vLLM's or one of ``many``: those words). ``parse_command`` of the result gives them back.
    """
    words: list[str] = []
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(option if value else "--no-" + option[2:])
        elif (name in many or KINDS.get(name) == "many") and isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        elif isinstance(value, (Mapping, list, tuple)):
            words += [option, json.dumps(value)]
        else:
            item = str(value)
            joined = not item or _is_flag(item) or _SHELL_STOP.fullmatch(item)
            words += [f"{option}={item}"] if joined else [option, item]
    return words


def split_words(text: str) -> tuple[dict[str, str], list[str]]:
    """Split as a POSIX shell splits, without expanding anything; leading ``VAR=value`` words come apart.

    Words from the first shell operator on (``|``, ``>``, ``&&``, ``;``, ``&``) are dropped. Raises FlagError.
    """
    joined = _CONTINUATION.sub(" ", text).strip().removeprefix("$ ")
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise FlagError(f"the command's quotes do not match ({error}): {masked(joined)[:200]}") from None
    for position, word in enumerate(words):
        if _SHELL_STOP.fullmatch(word):
            words = words[:position]
            break
    env: dict[str, str] = {}
    while words and (words[0] == "env" or (match := _ENV.fullmatch(words[0]))):
        if words[0] != "env" and match:
            env[match[1]] = match[2]
        words = words[1:]
    return env, words


def parse_flags(words: Sequence[str], many: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """(flags by name, words that belong to no flag). ``many``: more flags that take several words.

    Raises FlagError.
    """
    flags: dict[str, Any] = {}
    positional: list[str] = []
    pending = iter(_Words(words))
    for word in pending:
        if word[:1] in "–—" and len(word) > 1:
            raise FlagError(f"{word!r} begins with a typographic dash: write '--{word.lstrip('–—-')}'")
        if not _is_flag(word):
            positional.append(word)
            continue
        if re.fullmatch(r"-O\d", word):
            word = f"--optimization-level={word[2:]}"
        written, has_value, text = word.partition("=")
        name, keys = _name(written)
        if name.startswith("no_"):
            if has_value:
                raise FlagError(f"{word}: takes no value. Write {written}")
            _store(flags, name[3:], keys, False)
            continue
        kind: Kind | None = "many" if name in many else KINDS.get(name) if not keys else None
        values = [text] if has_value else pending.values(kind)
        _store(flags, name, keys, _value(written, kind, values))
    return flags, positional


class _Words(Iterator[str]):
    """The words of a command line, of which a flag may take the following ones as its values."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._at = 0

    def __next__(self) -> str:
        if self._at >= len(self._words):
            raise StopIteration
        self._at += 1
        return self._words[self._at - 1]

    def __iter__(self) -> _Words:
        return self

    def values(self, kind: Kind | None) -> list[str]:
        """Take the words that are a flag's values: none, one, or for ``many`` all up to the next flag."""
        taken: list[str] = []
        while self._at < len(self._words) and not _is_flag(self._words[self._at]):
            word = self._words[self._at]
            if taken and kind != "many":
                break
            if kind == "switch" and word.lower() not in ("true", "false"):
                break
            taken.append(word)
            self._at += 1
        return taken


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not _NUMBER.fullmatch(word)


def _name(written: str) -> tuple[str, list[str]]:
    """``--speculative-config.method`` -> ("speculative_config", ["method"])."""
    if written.startswith("--"):
        name, *keys = written[2:].split(".")
        return name.replace("-", "_"), keys
    short, *keys = written[1:].split(".")
    if short not in SHORT:
        raise FlagError(f"{written}: no such short flag. Write its long form; known: -{', -'.join(SHORT)}")
    return SHORT[short], keys


def _value(written: str, kind: Kind | None, texts: list[str]) -> Any:
    """The typed value of a flag from the words given to it."""
    if not texts:
        if kind in (None, "switch"):
            return True
        raise FlagError(f"{written} needs a value: write '{written} VALUE'")
    if kind == "many":
        return [_guess(written, text) for text in texts]
    text = texts[0]
    if re.fullmatch(r"\$\{?\w+\}?", text):
        raise FlagError(f"{written} {text}: shell variables are not expanded here. Write the value itself")
    match kind:
        case "switch":
            if text.lower() not in ("true", "false"):
                raise FlagError(f"{written}={text}: is a switch. Write {written} or --no-{written[2:]}")
            return text.lower() == "true"
        case "int" | "size":
            return _integer(written, text, kind)
        case "float":
            if not _NUMBER.fullmatch(text):
                raise FlagError(f"{written} {text}: must be a number")
            return float(text)
        case "text":
            return text
        case _:
            return _guess(written, text)


def _integer(written: str, text: str, kind: Kind) -> int | str:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if kind == "size":  # vLLM's human-readable integers: 16k is 16,000 and 16K is 16,384
        if text == "auto":
            return text
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text):
            return int(float(match[1]) * _SUFFIX[match[2]])
    raise FlagError(f"{written} {text}: must be a whole number")


def _guess(written: str, text: str) -> Any:
    """JSON for what looks like JSON, numbers for what looks like numbers, else the text."""
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise FlagError(
                f"{written} {text}: is not JSON ({error}). Put it in single quotes, with double quotes "
                f"inside: {written} '{{\"key\": 1}}'"
            ) from None
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _store(flags: dict[str, Any], name: str, keys: Sequence[str], value: Any) -> None:
    """Set ``flags[name]``, or the item of its JSON object that ``keys`` lead to."""
    if not keys:
        flags.pop(name, None)  # the last one wins, and stands where it was written
        flags[name] = value
        return
    node = flags[name] = dict(flags[name]) if isinstance(flags.get(name), dict) else {}
    for key in keys[:-1]:
        inner = node.get(key)
        node[key] = dict(inner) if isinstance(inner, dict) else {}
        node = node[key]
    node[keys[-1]] = value


def stray(word: str) -> FlagError:
    return FlagError(f"{word!r} belongs to no flag: is a quote, a dash or a trailing backslash missing?")
