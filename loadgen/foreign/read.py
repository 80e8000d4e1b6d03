"""Any tool's file: its kind is told by what it holds, never by its name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loadgen.foreign import aiperf, genai_bench, guidellm, inference_perf, llmperf
from loadgen.foreign.result import ForeignError, Reader, StatedResult, numbered
from loadgen.foreign.serving_benchmark import SGLANG_READER, VLLM_READER, printed_results
from servers.input_file import read_input

READERS: tuple[Reader, ...] = (
    SGLANG_READER,
    VLLM_READER,
    guidellm.READER,
    aiperf.READER,
    genai_bench.READER,
    llmperf.READER,
    inference_perf.READER,
)
_TOOLS = [reader.tool for reader in READERS]
_KNOWN = f"a result of {', '.join(_TOOLS[:-1])} or {_TOOLS[-1]}"
_SUFFIXES = (".json", ".jsonl", ".txt", ".log")


def read_results(path: Path) -> tuple[StatedResult, ...]:
    """The results in a file (JSON, appended JSON, a list, printed tables), or in a folder's files by name.

    Raises ForeignError where there is none.
    """
    if not path.is_dir():
        return _of_file(path)
    found: list[StatedResult] = []
    for file in sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES):
        try:
            found += _of_file(file)
        except _Unknown:
            continue
    if not found:
        raise ForeignError(f"{path}: no file in it holds {_KNOWN}")
    return tuple(found)


class _Unknown(ForeignError):
    """No tool's file; a folder may hold others."""


def _of_file(path: Path) -> tuple[StatedResult, ...]:
    try:
        text = read_input(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _Unknown(f"{path}: cannot be read ({error})") from None
    results: list[StatedResult] = []
    for document in _documents(text):
        reader = next((reader for reader in READERS if reader.fits(document)), None)
        if reader is None:
            keys = ", ".join(map(repr, list(document)[:5])) or "nothing"
            raise _Unknown(f"{path}: neither vtune's records nor {_KNOWN}; its keys are {keys}")
        results += reader.read(document, str(path))
    for document, reader in printed_results(text) if not results else ():
        results += reader.read(document, str(path))
    if not results:
        raise _Unknown(
            f"{path}: neither JSON nor a table that vllm bench serve or SGLang's bench_serving prints"
        )
    return tuple(numbered(results, str(path))) if len({r.origin for r in results}) == 1 else tuple(results)


def _documents(text: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of a file: one, a list of them, or one after another. None in what is no JSON."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            value, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            return
        yield from (
            item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)
        )
