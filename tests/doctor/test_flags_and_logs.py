"""Where flags are known from, what a log tells, and which flags a server has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recordings import TRUTH, log_path, needs_recordings
from synthetic_server import Server

from doctor.diagnosis.diagnose import diagnose
from doctor.metrics.log_source import LogSource
from doctor.metrics.sources import Scrapes
from servers import known_flags
from servers.errors import SourceError
from servers.kinds import KINDS, LABELS, VLLM, find_family
from servers.logs.log_facts import LogFacts
from servers.server_log import parse_log, read_log

V1_LOG = "\n".join(
    [
        "INFO 11-29 11:44:20 [api_utils.py:347]  version 0.32.0",
        "INFO 11-29 11:44:20 [api_utils.py:286] non-default args: "
        "{'model': 'm', 'max_num_seqs': 2, 'max_model_len': 4096}",
        "INFO 11-29 11:44:20 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=4096.",
        "INFO 11-29 11:44:28 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', "
        "speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=5), "
        "max_seq_len=4096, tensor_parallel_size=1, kv_cache_dtype=auto, device_config=cpu, "
        "enable_prefix_caching=True",
        "INFO 11-29 11:44:52 [kv_cache_utils.py:2327] GPU KV cache size: 93,184 tokens",
        "INFO 11-29 11:45:46 [loggers.py:335] Engine 000: Avg prompt throughput: 551.9 tokens/s, "
        "Avg generation throughput: 110.2 tokens/s, Running: 11 reqs, Waiting: 3 reqs, "
        "GPU KV cache usage: 1.7%, Prefix cache hit rate: 0.0%",
        "INFO 11-29 11:45:56 [loggers.py:335] Engine 000: Avg prompt throughput: 295.1 tokens/s, "
        "Avg generation throughput: 112.0 tokens/s, Running: 12 reqs, Waiting: 0 reqs, "
        "GPU KV cache usage: 1.8%, Prefix cache hit rate: 0.0%",
    ]
)
V0_LOAD = (
    "metrics.py:351] Avg prompt throughput: 4.8 tokens/s, Avg generation throughput: 6.3 tokens/s, "
    "Running: 5 reqs, Swapped: 0 reqs, Pending: 2 reqs, GPU KV cache usage: 40.5%, CPU KV cache usage: 0.0%."
)
V0_LOG = "\n".join(
    [
        "INFO 09-10 06:01:00 api_server.py:495] vLLM API server version 0.6.0",
        "INFO 09-10 06:01:00 api_server.py:496] args: Namespace(model='m', max_num_seqs=64, "
        "max_num_batched_tokens=None, gpu_memory_utilization=0.85, enable_prefix_caching=False)",
        f"INFO 09-10 06:05:33 {V0_LOAD}",
        f"INFO 09-10 06:05:43 {V0_LOAD}",
    ]
)


def test_a_log_of_the_new_kind() -> None:
    facts = parse_log(V1_LOG)
    assert facts.complete
    assert (facts.version, facts.kv_cache_tokens, facts.device) == ("0.32.0", 93184, "cpu")
    wanted: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 4096,
        "max_model_len": 4096,
        "enable_prefix_caching": True,
    }
    assert {name: facts.flags[name] for name in wanted} == wanted
    assert facts.flags["speculative_config"]["num_speculative_tokens"] == 5
    (first, page), (second, _) = facts.scrapes
    assert second - first == 10_000
    assert 'vllm:num_requests_waiting{engine="0"} 3' in page


def test_a_log_of_the_old_kind() -> None:
    facts = parse_log(V0_LOG)
    assert facts.complete
    assert facts.version == "0.6.0"
    assert facts.flags == {
        "model": "m",
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
    }
    assert len(facts.scrapes) == 2


def test_arguments_that_are_no_literal_lose_only_what_is_none() -> None:
    line = "non-default args: {'max_num_seqs': 8, 'speculative_config': <object at 0x7f>, 'seed': 3}"
    assert parse_log(line).flags == {"max_num_seqs": 8, "seed": 3}


@needs_recordings
@pytest.mark.parametrize("name", TRUTH)
def test_real_logs_are_read(name: str) -> None:
    facts = read_log(log_path(name))
    assert facts.complete
    assert facts.version == "0.32.0"
    assert facts.device == "cpu"
    assert facts.kv_cache_tokens
    assert len(facts.scrapes) >= 3


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("nothing of interest\n")
    with pytest.raises(SourceError, match=f"no line of a {LABELS} log"):
        read_log(path)
    path.write_text("version 0.30.0\n")
    with pytest.raises(SourceError, match="fewer than two periodic load lines"):
        diagnose(LogSource(path))
    with pytest.raises(SourceError, match="cannot be read"):
        read_log(tmp_path / "absent.log")


def origin(name: str, **known: Any) -> tuple[Any, str]:
    arguments: dict[str, Any] = {"given": None, "log": None, "cache_config": None, **known}
    flag = known_flags.resolve(**arguments, kind=VLLM, version=None).known[name]
    return flag.value, flag.origin


def test_the_user_beats_the_log_and_the_log_beats_the_metrics() -> None:
    log = parse_log(V1_LOG)
    metrics = {"block_size": "16", "gpu_memory_utilization": "0.8", "enable_prefix_caching": "False"}
    assert origin("max_num_seqs", given={"max_num_seqs": 7}, log=log) == (7, "given")
    assert origin("max_num_seqs", log=log) == (2, "log")
    assert origin("gpu_memory_utilization", log=log, cache_config=metrics) == (0.8, "metrics")
    assert origin("max_num_seqs", given={}) == (256, "guessed")
    assert origin("long_prefill_token_threshold", given={}) == (0, "default")
    assert origin("max_num_seqs") == (256, "guessed")
    assert origin("num_speculative_tokens", log=log) == (5, "log")


def test_what_cache_config_info_gives_away() -> None:
    labels = {
        "block_size": "128",
        "num_gpu_blocks": "33",
        "num_gpu_blocks_override": "None",
        "kv_cache_size_tokens": "93184",
        "kv_cache_max_concurrency": "22.75",
    }
    known = known_flags.resolve(None, None, labels, kind=VLLM, version=None).known
    assert known["kv_cache_tokens"].value == 32 * 128  # one block is the null block
    assert known["max_model_len"].value == 4096
    override = known["num_gpu_blocks_override"]
    assert (override.value, override.origin) == (0, "metrics")


CPU_METRICS = {"block_size": "128", "user_specified_block_size": "False"}


@pytest.mark.parametrize(
    ("engine", "device", "given", "seqs", "tokens"),
    [
        ("vllm", "cpu", {}, (128, "default"), (2048, "default")),
        ("vllm", "cpu", {"tensor_parallel_size": 2}, (256, "default"), (4096, "default")),
        ("vllm", "cpu", {"max_num_batched_tokens": 16}, (16, "default"), (16, "given")),
        ("vllm", "cpu", {"max_num_seqs": 4}, (4, "given"), (2048, "default")),
        ("vllm", "cuda", {}, (256, "guessed"), (2048, "guessed")),
        ("vllm", None, {}, (256, "guessed"), (2048, "guessed")),
        ("vllm", None, {"max_num_batched_tokens": 100}, (100, "guessed"), (100, "given")),
        ("bundled", None, {}, (128, "default"), (2048, "default")),
    ],
)
def test_a_default_is_the_platforms_or_a_guess(
    engine: Any, device: str | None, given: dict[str, Any], seqs: tuple[int, str], tokens: tuple[int, str]
) -> None:
    log = LogFacts(complete=True, version="0.32.0", device=device)
    known = known_flags.resolve(given, log, None, kind=KINDS[engine], version=None).known
    assert (known["max_num_seqs"].value, known["max_num_seqs"].origin) == seqs
    assert (known["max_num_batched_tokens"].value, known["max_num_batched_tokens"].origin) == tokens


def test_metrics_that_look_like_a_cpu_shift_the_guess_and_no_more() -> None:
    known = known_flags.resolve({}, None, CPU_METRICS, kind=VLLM, version="0.32.0").known
    assert (known["max_num_seqs"].value, known["max_num_seqs"].origin) == (128, "guessed")
    assert known["max_num_seqs"].number.high >= 1024
    old = LogFacts(complete=True, version="0.9.1", device="cpu")
    assert (
        known_flags.resolve({}, old, None, kind=VLLM, version=None).known["max_num_seqs"].origin == "guessed"
    )


def test_no_cap_is_inferred_below_every_default() -> None:
    """Ten run while others wait, but a server that was started without the flag allows at least 128."""
    waiting = replace(Server(), running=10, waiting=3, kv=0.02)
    seen = diagnose(Scrapes(waiting.scrapes()), {})
    assert "seq-cap" not in [finding.id for finding in seen.findings]
    unknown = diagnose(Scrapes(waiting.scrapes()))
    assert unknown.findings[0].flags["max_num_seqs"].origin == "inferred"


def test_a_budget_without_chunked_prefill_holds_a_whole_prompt() -> None:
    given = {"enable_chunked_prefill": False, "max_model_len": 8192}
    tokens = known_flags.resolve(given, None, None, kind=VLLM, version=None).known["max_num_batched_tokens"]
    assert (tokens.value, tokens.number.low) == (8192, 8192)


SPIKES = replace(
    Server(),
    histograms={
        "itl": {0.03: 970, 1.5: 30},
        "prefill_length": {100.0: 9, 4000.0: 1},
        "prompt_length": {100.0: 9, 4000.0: 1},
        "prefill_time": {0.1: 9, 1.5: 1},
    },
)


@pytest.mark.parametrize(
    ("engine", "version", "threshold"),
    [("vllm", "0.32.0", True), ("vllm", "0.6.3", False), ("bundled", None, True), ("sglang", None, False)],
)
def test_only_flags_that_the_server_has_are_prescribed(
    engine: Any, version: str | None, threshold: bool
) -> None:
    log = parse_log(f"version {version}") if version else None
    found = diagnose(Scrapes(SPIKES.scrapes()), {"max_num_seqs": 64}, log=log, kind=KINDS[engine])
    (finding,) = [finding for finding in found.findings if finding.id == "itl-spikes-long-prefill"]
    given = " ".join(prescription.args for prescription in finding.prescriptions)
    assert ("--long-prefill-token-threshold" in given) == threshold
    assert ("--chunked-prefill-size" if engine == "sglang" else "--max-num-batched-tokens") in given


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["vllm:num_requests_running", "vllm:num_requests_swapped", "vllm:gpu_cache_usage_perc"], "V0"),
        (["vllm:num_requests_running", "vllm:gpu_cache_usage_perc"], "0.8 to 0.9.1"),
        (["vllm:kv_cache_usage_perc"], "0.9.2 or later"),
        (["vllm:inter_token_latency_seconds_count"], "0.10.2 or later"),
        (["vllm_num_requests_running"], "vLLM"),
        (["sglang:num_running_reqs"], "SGLang"),
    ],
)
def test_the_names_tell_the_version(names: list[str], label: str) -> None:
    found = find_family(names)
    assert found is not None
    assert label in found[1]
    assert find_family(["up", "go_threads"]) is None


OLD_NAMES = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_": "vllm:gpu_prefix_cache_",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}


def test_the_old_names_are_read_as_the_new_ones() -> None:
    pages = SPIKES.scrapes()
    old = [(t, page) for t, page in pages]
    for new, before in OLD_NAMES.items():
        old = [(t, page.replace(new, before)) for t, page in old]
    assert old != pages
    renamed, current = (diagnose(Scrapes(those), {}) for those in (old, pages))
    assert [f.id for f in renamed.findings] == [f.id for f in current.findings]
    assert "vllm:time_per_output_token_seconds" in renamed.findings[0].evidence[0].query


def test_of_two_names_at_once_the_new_one_counts() -> None:
    """For two releases a server exposes both."""
    alone = SPIKES.scrapes()
    both = [(t, page + page.replace("inter_token_latency", "time_per_output_token")) for t, page in alone]
    first, second = (diagnose(Scrapes(pages), {}).findings for pages in (alone, both))
    assert [e.value for f in first for e in f.evidence] == [e.value for f in second for e in f.evidence]


def test_sglang_is_read_and_what_it_lacks_is_named() -> None:
    def page(number: int) -> str:
        labels = '{model_name="m"}'
        return (
            f"sglang:num_running_reqs{labels} 4\nsglang:num_queue_reqs{labels} 0\n"
            f"sglang:token_usage{labels} 0.99\nsglang:cache_hit_rate{labels} 0.1\n"
            f"sglang:generation_tokens_total{labels} {100 * number}\n"
        )

    found = diagnose(Scrapes([(1000 * n, page(n)) for n in range(1, 12)]))
    assert found.family == "SGLang"
    assert "preemptions" in {m.name for item in found.cannot_tell for m in item.missing}
    assert not found.healthy


def test_a_shorter_draft_is_written_into_the_speculative_config() -> None:
    drafting = replace(
        Server(),
        running=64,
        counters={"drafts": 1000, "draft_tokens": 4000, "accepted_tokens": 1200},
    )
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    found = diagnose(Scrapes(drafting.scrapes()), {"speculative_config": config})
    (finding,) = [finding for finding in found.findings if finding.id == "speculation-loses"]
    off, shorter, _ = finding.prescriptions
    assert off.args == "drop --speculative-config"
    assert shorter.changes == {"speculative_config": {**config, "num_speculative_tokens": 2}}
    assert '"num_speculative_tokens": 2' in shorter.args


def test_sglang_without_our_speculation_metrics_is_not_said_to_speculate_or_not() -> None:
    labels = '{model_name="m"}'
    pages = [
        (1000 * n, f"sglang:num_running_reqs{labels} 4\nsglang:gen_throughput{labels} {n}\n")
        for n in range(1, 9)
    ]
    undecided = {item.id for item in diagnose(Scrapes(pages)).cannot_tell}
    assert "speculation-loses" in undecided


def test_engines_are_named_by_what_tells_them_apart() -> None:
    def page(number: int) -> str:
        return "".join(
            Server(labels={"engine": engine, "model_name": model, "instance": "host:1"}).page(number, 0)
            for engine in "01"
            for model in ("small", "large")
        )

    found = diagnose(Scrapes([(1000 * n, page(n)) for n in range(1, 5)]), {})
    assert found.engines[0] == "host:1 large engine 0"
    assert len(set(found.engines)) == 4


def test_few_requests_are_said_to_be_few() -> None:
    found = diagnose(Scrapes(Server().scrapes(count=2)), {})
    assert found.notes == ("scrapes: only 10 requests, so percentiles are rough",)
