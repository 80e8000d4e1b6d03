"""vLLM's log, and the bundled engine's: flags, version, KV pool and periodic load lines."""

from __future__ import annotations

import ast
import calendar
import re
from collections.abc import Sequence
from itertools import starmap
from typing import Any

from servers.logs.log_facts import LogFacts, page, pairs
from servers.memory_plan import GIB, MIB, MemoryPlan

_VERSION = re.compile(r"(?:version|engine \(v|server version) ?(\d+\.\d+[\w.+]*)")
_NON_DEFAULT = re.compile(r"non-default args: (\{.*\})")
_NAMESPACE = re.compile(r"args: Namespace\((.*)\)")
_DUMP = re.compile(r"Initializing an? (?:V1 )?LLM engine .*?with config: (.*)")
_BUDGET = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_RANGES = re.compile(r"'compile_ranges_endpoints': \[([\d, ]+)\]")
"""The last of the ranges that a step's tokens are compiled for ends at the budget."""
_POOL = re.compile(r"KV cache(?: size)?: (\d[\d,]{,20}) tokens")
"""The bundled engine's has no "size"."""
_BLOCKS = re.compile(r"# \w+ blocks: (\d+), # CPU blocks: \d+")
_BLOCK_SIZE = 16
"""V0's on a GPU, where the log does not name one."""
_LENGTH = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request")
_DURATIONS = {
    "startup_seconds": re.compile(r"init engine \(.*?\) took ([\d.]+) ?s"),
    "compile_seconds": re.compile(r"torch\.compile (?:takes|took) ([\d.]+) ?s in total"),
    "load_seconds": re.compile(
        r"(?:Loading (?:model )?weights|Model loading) took (?:[\d.]+ GiB(?: memory)? and )?([\d.]+) s"
    ),
}
_BUNDLED_MEMORY = re.compile(
    r"Memory: ([\d.]+) GiB x ([\d.]+) - weights ([\d,]+) MiB - activations ([\d,]+) MiB "
    r"\(at ([\d,]+) batched tokens\) = KV ([\d,]+) MiB"
)
_GPU_MEMORY = re.compile(
    r"Free memory on device \([\d.]+/([\d.]+) GiB\) on startup\. Desired GPU memory utilization is "
    r"\(([\d.]+), [\d.]+ GiB\)\. Actual usage is ([\d.]+) GiB for consumed memory \(weights \+ non-torch\), "
    r"([\d.]+) GiB for peak activation, and ([\d.]+) GiB for CUDAGraph memory\..*"
    r"Current kv cache memory in use is ([\d.]+) GiB"
)
_CPU_MEMORY = re.compile(
    r"Auto set \(([\d.]+)/[\d.]+\) GiB for KV cache on node \d+, with ([\d.]+) GiB requested memory for the "
    r"worker\. ([\d.]+) GiB memory was consumed by non-kv usages"
)
_PINNED_MEMORY = re.compile(
    r"Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV cache|reserved ([\d.]+) GiB memory for KV Cache"
)
_SPECULATION = re.compile(r"speculative_config=SpeculativeConfig\(([^)]*)\)")
_PERIODIC = re.compile(
    r"(?P<month>\d\d)-(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d).*?"
    r"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs, (?:Swapped: (?P<swapped>\d+) reqs, )?"
    r"(?:Waiting|Pending): (?P<waiting>\d+) reqs, "
    r"(?P<between>.*?)KV cache usage: (?P<kv>[\d.]+)%(?P<after>.*)"
)
"""V0 names the swapped. V1 puts deferred requests, KV loads and preemptions, where there are any, between
queue and KV usage."""
_DEFERRED = re.compile(r"Deferred: (\d+) reqs")
"""Of those that wait, the ones that do not wait for capacity. A line without it has none."""
_BY_REASON = "vllm:num_requests_waiting_by_reason"
_PREEMPTIONS = re.compile(r"Preemptions: (\d+)")
"""V1's, of the interval. Where one line has them, the lines without had none. vLLM 0.32 sets the count back
before it prints it, so that no line has them; the bundled engine's do."""
_HALF_A_YEAR_MS = 180 * 86_400_000
_HIT_RATE = re.compile(r"(?<!External )[Pp]refix cache hit rate: (?:GPU: )?([\d.]+)%")
_DRAFTS = (
    # V1: tokens since the last line; V0: tokens since the start.
    (re.compile(r"SpecDecoding metrics: .*?Accepted: (\d+) tokens, Drafted: (\d+) tokens"), False),
    (
        re.compile(
            r"Speculative metrics: .*?Number of accepted tokens: (\d+), Number of draft tokens: (\d+)"
        ),
        True,
    ),
)
_POSITIONS = re.compile(
    r"SpecDecoding metrics: .*?Drafted: (\d+) tokens.*?Per-position acceptance rate: ([\d., ]+)"
)
"""A rate for each token of a draft: so many tokens does a draft have."""
_PREEMPTED = re.compile(r"(?:total_num_cumulative_preemption|total_cumulative_preemption_cnt)=(\d+)")
"""V0 warns with its running total."""
_DUMP_KEYS = {
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "quantization": "quantization",
    "device_config": "device",
}


def parse_log(text: str) -> LogFacts:
    """Take the facts out of a log's text; of a restarted server the last start counts."""
    flags: dict[str, Any] = {}
    complete, version, pool = False, None, None
    durations: dict[str, float] = {}
    match: re.Match[str] | None
    for line in text.splitlines():
        if match := _NON_DEFAULT.search(line):
            flags, complete = _dictionary(match[1]), True
        elif match := _NAMESPACE.search(line):
            flags, complete = _pairs(match[1]), True
        elif match := _DUMP.search(line):
            flags = {**_dumped(match[1]), **flags}  # what was typed says more than what is printed of it
        elif match := _BUDGET.search(line):
            flags["max_num_batched_tokens"] = int(match[1])
        elif match := _POOL.search(line):
            pool = int(match[1].replace(",", ""))
        elif match := _BLOCKS.search(line):
            pool = int(match[1]) * int(flags.get("block_size", _BLOCK_SIZE))
        if match := _LENGTH.search(line):
            flags.setdefault("max_model_len", int(match[1].replace(",", "")))
        if version is None and (match := _VERSION.search(line)):
            version = match[1].rstrip(".")
        for name, pattern in _DURATIONS.items():
            if match := pattern.search(line):
                durations[name] = float(match[1])
    device = flags.pop("device", None)
    scrapes = tuple(_periodic(text.splitlines()))
    return LogFacts(
        flags,
        complete,
        version,
        pool,
        str(device) if device else None,
        _memory(text, pool),
        durations,
        scrapes,
    )


def _memory(text: str, pool: int | None) -> MemoryPlan | None:
    """Of the last start; None where it does not say enough."""
    lines = "\n".join(line for line in text.splitlines() if "GiB" in line)
    if pool is None or not lines:
        return None
    if found := _last(_BUNDLED_MEMORY, lines):
        device, share, weights, activations, _, kv = found
        off = 0.005 * GIB + 2 * MIB
        parts = (weights * MIB, activations * MIB, kv * MIB)
        return MemoryPlan(device * GIB, share, *parts, pool, off, proportional=True)
    if found := _last(_GPU_MEMORY, lines):
        device, share, consumed, activations, graphs, kv = found
        parts = ((consumed + graphs) * GIB, activations * GIB, kv * GIB)
        return MemoryPlan(device * GIB, share, *parts, pool, 0.04 * GIB)
    if found := _last(_CPU_MEMORY, lines):
        kv, requested, consumed = found
        return MemoryPlan(requested * GIB, 0.0, consumed * GIB, 0.0, kv * GIB, pool, 0.03 * GIB)
    if found := _last(_PINNED_MEMORY, lines):
        return MemoryPlan(0.0, 0.0, 0.0, 0.0, max(found) * GIB, pool, 0.01 * GIB, pinned=True)
    return None


def _last(pattern: re.Pattern[str], text: str) -> tuple[float, ...] | None:
    """The figures of the last match; 0 for a group that is not in it."""
    found = [match.groups(default="0") for match in pattern.finditer(text)]
    return tuple(float(figure.replace(",", "")) for figure in found[-1]) if found else None


def _dumped(text: str) -> dict[str, Any]:
    """What the engine prints of its configuration, defaults included."""
    pairs = _pairs(text)
    flags = {ours: pairs[key] for key, ours in _DUMP_KEYS.items() if key in pairs}
    if match := _RANGES.search(text):
        flags["max_num_batched_tokens"] = max(map(int, match[1].split(",")))
    if match := _SPECULATION.search(text):
        flags["speculative_config"] = _speculation(match[1])
    return flags


def _dictionary(text: str) -> dict[str, Any]:
    """A printed dict; where an object's repr makes it no literal, the pairs that are."""
    try:
        value = ast.literal_eval(text)
        return {str(key): item for key, item in value.items() if item is not None}
    except (ValueError, SyntaxError, MemoryError, RecursionError, AttributeError):
        return _pairs(text)


def _pairs(text: str) -> dict[str, Any]:
    found = pairs(text)
    for name in ("device_config", "kv_cache_dtype"):  # printed without quotes
        if bare := re.search(rf"\b{name}=(\w+)", text):
            found.setdefault(name, bare[1])
    return found


def _speculation(text: str) -> dict[str, Any]:
    pairs = _pairs(text)
    pairs["num_speculative_tokens"] = pairs.pop("num_spec_tokens", pairs.get("num_speculative_tokens", 1))
    return pairs


def _periodic(lines: Sequence[str]) -> list[tuple[int, str]]:
    """One scrape a moment; token counters are the throughputs, summed up over the time between. An engine
    that says nothing at a moment is as it last said.

    What other lines say of preemptions is in the next scrape; what they say of drafts, in the last, whose
    interval they stand behind. They name no engine, so with several engines in one log these counters stand
    beside the first.
    """
    extras: dict[str, float] = {}
    if any(_PREEMPTIONS.search(line) for line in lines):
        extras["vllm:num_preemptions_total"] = 0.0
    if any(pattern.search(line) for pattern, _ in _DRAFTS for line in lines):
        extras |= {f"vllm:spec_decode_num_{name}_tokens_total": 0.0 for name in ("accepted", "draft")}
    if any(_POSITIONS.search(line) for line in lines):
        extras["vllm:spec_decode_num_drafts_total"] = 0.0
    deferring = any(map(_DEFERRED.search, lines))
    totals: dict[str, tuple[int, float, float]] = {}
    latest: dict[str, dict[str, float]] = {}
    pages: dict[int, dict[str, dict[str, float]]] = {}
    newest = 0
    for line in lines:
        if _note(line, extras) and latest:
            latest[min(latest)].update(extras)
        if (match := _PERIODIC.search(line)) is None:
            continue
        unix_ms = _moment(match, newest)
        if unix_ms is None:
            continue
        newest = max(newest, unix_ms)
        engine = str(int(match["engine"] or 0))
        before, prompt, generation = totals.get(engine, (unix_ms, 0.0, 0.0))
        seconds = max(0.0, (unix_ms - before) / 1000)
        prompt += float(match["prompt"]) * seconds
        generation += float(match["generation"]) * seconds
        totals[engine] = (unix_ms, prompt, generation)
        if counted := _PREEMPTIONS.search(match["between"]):
            extras["vllm:num_preemptions_total"] += float(counted[1])
        samples = {
            "vllm:num_requests_running": float(match["running"]),
            "vllm:num_requests_waiting": float(match["waiting"]),
            "vllm:prompt_tokens_total": prompt,
            "vllm:generation_tokens_total": generation,
            **(extras if engine == min(totals) else {}),
        }
        if match["swapped"] is None:
            samples["vllm:kv_cache_usage_perc"] = float(match["kv"]) / 100
        else:
            samples["vllm:gpu_cache_usage_perc"] = float(match["kv"]) / 100
            samples["vllm:num_requests_swapped"] = float(match["swapped"])
        if deferring:
            deferred = float(found[1]) if (found := _DEFERRED.search(match["between"])) else 0.0
            samples[f'{_BY_REASON}{{reason="deferred"}}'] = deferred
            samples[f'{_BY_REASON}{{reason="capacity"}}'] = float(match["waiting"]) - deferred
        if hits := _HIT_RATE.search(match["after"]):
            samples["vllm:gpu_prefix_cache_hit_rate"] = float(hits[1]) / 100
        latest[engine] = samples
        pages[unix_ms] = dict(latest)
    return [(at, "".join(starmap(page, engines.items()))) for at, engines in sorted(pages.items())]


def _moment(match: re.Match[str], newest: int) -> int | None:
    """A line's time as if it were 1970, or the year after where a log goes on over New Year. Unix ms."""
    for year in (1970, 1971):
        when = (year, *(int(match[part]) for part in ("month", "day", "h", "m", "s")))
        try:
            unix_ms = calendar.timegm((*when, 0, 0, 0)) * 1000
        except ValueError:
            return None
        if unix_ms > newest - _HALF_A_YEAR_MS:
            return unix_ms
    return None


def _note(line: str, extras: dict[str, float]) -> bool:
    """Count what a line says beside the load; whether it says it of the interval that has just ended."""
    if (match := _HIT_RATE.search(line)) and not _PERIODIC.search(line):  # V0 has a line of its own for it
        extras["vllm:gpu_prefix_cache_hit_rate"] = float(match[1]) / 100
    if match := _PREEMPTED.search(line):
        extras["vllm:num_preemptions_total"] = float(match[1])
    if match := _POSITIONS.search(line):
        extras["vllm:spec_decode_num_drafts_total"] += float(match[1]) / len(match[2].strip(" ,").split(","))
    for pattern, cumulative in _DRAFTS:
        if match := pattern.search(line):
            for name, tokens in (("accepted", match[1]), ("draft", match[2])):
                key = f"vllm:spec_decode_num_{name}_tokens_total"
                extras[key] = float(tokens) + (0.0 if cumulative else extras.get(key, 0.0))
            return True
    return False
