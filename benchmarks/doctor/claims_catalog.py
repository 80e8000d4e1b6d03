"""The claims, each with its experiment."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.doctor.claims_bed import Bed, Flags, Run, beside, of
from benchmarks.doctor.claims_figures import Claim, Figure
from benchmarks.engine.baselines import simulated_h100
from benchmarks.engine.phases import equal, heavy_tailed
from benchmarks.engine.phases import run as on_phase
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import SamplingParams
from engine.sim.simulated_runner import (
    ModelSize,
    SimulatedRunner,
    TimedRequest,
    VirtualClock,
    own_prompt,
    run_workload,
)
from engine.sim.step_times import StepTimes
from engine.step import StepOutput, StepPlan

BUSY = 0.9
"""Share of the lower of two capacities at which latencies are compared: queues form, and do not grow."""
CHAT = (of("chat", 1, 1000, 128, 0.5),)
MIXED = (of("short", 85, 150, 100), of("long", 15, 6000, 200))
H100_8B = Bed("8B", "h100", {"max_num_seqs": 256})
A100_70B = Bed("70B", "a100", {"tensor_parallel_size": 4, "max_num_seqs": 128})


def busy_rate(bed: Bed, a: Flags, b: Flags, classes: Any, concurrency: int = 256) -> tuple[float, Run, Run]:
    """(requests/s at which both settings are BUSY at most, both in a closed loop of ``concurrency``)."""
    runs = [bed.saturated(flags, classes, concurrency, 4 * concurrency) for flags in (a, b)]
    return BUSY * min(run.request_rate for run in runs), runs[0], runs[1]


def budgets(*values: int) -> list[dict[str, int]]:
    return [{"max_num_batched_tokens": value} for value in values]


def four_requests() -> Iterator[Figure]:
    """Answers of 3, 8, 2 and 4 tokens in one static batch, and a crowd with heavy-tailed answers."""
    answers = (3, 8, 2, 4)
    clock = VirtualClock()
    ends = {
        f"r{i}": answer + 1 for i, answer in enumerate(answers)
    }  # the token that ends it takes a slot too
    runner = SimulatedRunner(ModelSize(0, 1, 64), StepTimes(launch=1.0), clock, output_lengths=ends)
    config = EngineConfig(
        scheduler="static",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        num_gpu_blocks_override=32,
    )
    sampling = SamplingParams(max_tokens=32, temperature=0.0)
    requests = [TimedRequest(name, 0.0, own_prompt(place, 1), sampling) for place, name in enumerate(ends)]
    run_workload(EngineCore(config, runner, clock), clock, requests)
    share = sum(answers) / (len(answers) * clock())
    yield Figure("four requests", 47, 100 * share, "amount", "% of slots")
    setting = simulated_h100()
    crowd = heavy_tailed(1500, setting.rate, 1)
    static, unified = (on_phase(setting, crowd, name, scheduler=name) for name in ("static", "unified"))
    yield Figure("heavy tail, static", 40, 100 * static.utilisation, "amount", "%")
    yield Figure("heavy tail, continuous", 80, 100 * unified.utilisation, "at least", "%")


def long_prompt_beside_decodes() -> Iterator[Figure]:
    bed = replace(H100_8B, flags={"max_num_seqs": 256, "enable_prefix_caching": False})
    load = beside(60, of("long", 1, 32_768, 16, 0.0), at=1.0, output=400)
    runs = {budget: bed.run({"max_num_batched_tokens": budget}, load) for budget in (40_960, 8192, 2048)}
    for budget, claimed in ((40_960, 800), (8192, 200), (2048, 55)):
        yield Figure(f"gap at {budget:,}", claimed, runs[budget].longest_gap("stream"), "amount", "ms")
    yield Figure("TTFT of the prompt", 1.1, runs[2048].first("long") / runs[40_960].first("long"))


def double_the_budget() -> Iterator[Figure]:
    a, b = budgets(2048, 4096)
    rate, one, two = busy_rate(H100_8B, a, b, MIXED)
    before, after = (H100_8B.offered(flags, MIXED, rate) for flags in (a, b))
    yield Figure("throughput", 1.18, two.throughput / one.throughput)
    yield Figure("TTFT P95", 3.0, after.ms("ttft_p95") / before.ms("ttft_p95"))


def sixteen_thousand() -> Iterator[Figure]:
    a, b = budgets(8192, 16_384)
    rate, *_ = busy_rate(H100_8B, a, b, MIXED)
    before, after = (H100_8B.offered(flags, MIXED, rate) for flags in (a, b))
    yield Figure("TTFT P50", 1200 / 230, after.ms("ttft_p50") / before.ms("ttft_p50"))


def one_long_prompt() -> Iterator[Figure]:
    """A prompt of 20,000 tokens now and then among chats."""
    a, b = budgets(8192, 32_768)
    classes = (of("chat", 97, 200, 150), of("long", 3, 20_000, 100, 0.1))
    rate, *_ = busy_rate(H100_8B, a, b, classes)
    before, after = (H100_8B.offered(flags, classes, rate) for flags in (a, b))
    yield Figure("chat TTFT P95", 20, after.ms("ttft_p95", "chat") / before.ms("ttft_p95", "chat"))


def fewer_sequences() -> Iterator[Figure]:
    a, b = {"max_num_seqs": 256}, {"max_num_seqs": 64}
    rate, one, two = busy_rate(H100_8B, a, b, CHAT)
    before, after = (H100_8B.offered(flags, CHAT, rate) for flags in (a, b))
    yield Figure(
        "TTFT P95 at 90 % of the lower capacity", 340 / 870, after.ms("ttft_p95") / before.ms("ttft_p95")
    )
    crowded = [H100_8B.saturated(flags, CHAT, 256, 1024) for flags in (a, b)]
    yield Figure(
        "TTFT P95 with 256 clients", 340 / 870, crowded[1].ms("ttft_p95") / crowded[0].ms("ttft_p95")
    )
    yield Figure("throughput", 0.88, two.throughput / one.throughput)


def two_hundred_clients() -> Iterator[Figure]:
    bed = Bed("7B", "a100-40", {"max_model_len": 4096})
    classes = (of("chat", 1, 500, 200),)
    small, large = (bed.saturated({"max_num_seqs": seqs}, classes, 200, 1000) for seqs in (128, 512))
    yield Figure(
        "TTFT P99 with 512, more by", 380, large.ms("ttft_p99") - small.ms("ttft_p99"), "at least", "ms"
    )


def thirty_two_to_128() -> Iterator[Figure]:
    a, b = {"max_num_seqs": 32}, {"max_num_seqs": 128}
    one, two = (A100_70B.saturated(flags, CHAT, 128, 512) for flags in (a, b))
    yield Figure("throughput with 128 clients", 1.18, two.throughput / one.throughput)
    yield Figure("TTFT P99 with 128 clients", 4.0, two.ms("ttft_p99") / one.ms("ttft_p99"))


def step_time() -> Iterator[Figure]:
    bed = Bed("8B", "h100", {"max_num_seqs": 256})
    for clients, claimed in ((32, 12), (128, 28)):
        run = bed.saturated({}, CHAT, clients, 6 * clients)
        yield Figure(f"mean gap at {clients}", claimed, run.ms("itl_mean"), "amount", "ms")


def less_memory() -> Iterator[Figure]:
    """The pool of a 7B model on 40 GB is what binds."""
    bed = Bed("7B", "a100-40", {"max_model_len": 8192, "max_num_seqs": 128})
    classes = (of("chat", 80, 800, 250), of("long", 20, 3500, 400))
    flags: tuple[Flags, Flags] = ({"gpu_memory_utilization": 0.92}, {"gpu_memory_utilization": 0.85})
    rate, *_ = busy_rate(bed, *flags, classes, 128)
    spreads = []
    for side in flags:
        tails = [bed.offered(side, classes, rate, seed).ms("ttft_p99") for seed in range(10)]
        spreads.append(statistics.stdev(tails))
    yield Figure("spread of TTFT P99", 0.4, spreads[1] / spreads[0])


def template() -> Iterator[Figure]:
    """Prompts of 4,000 tokens, 1,480 of which are one template."""
    shared = (of("contract", 1, 4000, 150, 0.2, shared_prefix=1480),)
    a, b = {"enable_prefix_caching": False}, {"enable_prefix_caching": True}
    rate, *_ = busy_rate(H100_8B, a, b, shared)
    before, after = (H100_8B.offered(flags, shared, rate) for flags in (a, b))
    hits = sum(r.cached_tokens or 0 for r in after.records.requests)
    whole = sum((r.prompt_tokens or 0) + r.tokens for r in after.records.requests)
    yield Figure("blocks allocated", 0.63, 1 - hits / whole)
    yield Figure("TTFT P99", 1.1 / 1.8, after.ms("ttft_p99") / before.ms("ttft_p99"))


def system_prompt() -> Iterator[Figure]:
    """2,000 shared tokens before each question, one request at a time."""
    shared = (of("chat", 1, 2200, 100, 0.0, shared_prefix=2000),)
    for bed in (Bed("8B", "h100", {}), Bed("8B", "a100", {}), A100_70B):
        runs = [
            bed.saturated({"enable_prefix_caching": on, "max_num_batched_tokens": 2048}, shared, 1, 40)
            for on in (False, True)
        ]
        saved = runs[0].ms("ttft_p50") - runs[1].ms("ttft_p50")
        yield Figure(f"TTFT P50 saved, {bed.name}", 300, saved, "at least", "ms")


def chunks_of_4096() -> Iterator[Figure]:
    classes = (of("short", 90, 200, 100), of("long", 10, 12_000, 150, 0.05))
    bed = Bed("8B", "h100", {"max_num_seqs": 256, "max_model_len": 16_384})
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 16_384}
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 4096}
    rate, *_ = busy_rate(bed, whole, chunked, classes)
    before, after = (bed.offered(flags, classes, rate) for flags in (whole, chunked))
    yield Figure("short TTFT P95, chunked", 300, after.ms("ttft_p95", "short"), "at most", "ms")
    fair = {**chunked, "long_prefill_token_threshold": 1024}
    helped = bed.offered(fair, classes, rate)
    yield Figure("with a threshold of 1,024 too", 300, helped.ms("ttft_p95", "short"), "at most", "ms")
    yield Figure("short TTFT P95", 0.15, after.ms("ttft_p95", "short") / before.ms("ttft_p95", "short"))
    yield Figure("long TTFT P50", 1.065, after.ms("ttft_p50", "long") / before.ms("ttft_p50", "long"))


def longer_inputs() -> Iterator[Figure]:
    """70B on four A100, at 90 % of what it carries with inputs of 800 tokens."""
    short, long = (of("chat", 1, 800, 150, 0.5),), (of("chat", 1, 1300, 150, 0.5),)
    six, four = budgets(6144, 4096)
    rate = 0.6 * A100_70B.saturated(six, short, 128, 512).request_rate
    base = A100_70B.offered(six, short, rate).ms("ttft_p99")
    yield Figure("TTFT P99 at 6144", 1.8, A100_70B.offered(six, long, rate).ms("ttft_p99") / base)
    yield Figure(
        "at 4096 against before", 1.1, A100_70B.offered(four, long, rate).ms("ttft_p99") / base, "at most"
    )


def speculation() -> Iterator[Figure]:
    """Three drafts that cost nothing, each accepted with a chance of 0.7, and of 0.2."""
    on = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    few = [H100_8B.saturated(flags, CHAT, 4, 60) for flags in ({}, on)]
    yield Figure("ITL mean at 4", 0.4, few[1].ms("itl_mean") / few[0].ms("itl_mean"))
    for acceptance in (0.7, 0.2):
        bed = replace(H100_8B, acceptance=acceptance)
        many = [bed.saturated(flags, CHAT, 128, 512) for flags in ({}, on)]
        name = f"throughput at 128, {acceptance:.0%} accepted"
        yield Figure(name, 0.9, many[1].throughput / many[0].throughput)


def large_model_budget() -> Iterator[Figure]:
    a, b = budgets(8192, 2048)
    classes = (of("long", 1, 6000, 150),)
    one, two = (A100_70B.saturated(flags, classes, 64, 256) for flags in (a, b))
    yield Figure("step at 8192 (ITL P99)", 350, one.ms("itl_p99"), "amount", "ms")
    yield Figure("step at 2048 (ITL P99)", 90, two.ms("itl_p99"), "amount", "ms")
    yield Figure("step, 8192 -> 2048", 90 / 350, two.ms("itl_p99") / one.ms("itl_p99"))
    yield Figure("throughput", 0.875, two.throughput / one.throughput)


def twice_the_devices() -> Iterator[Figure]:
    for model, claimed in (("70B", 0.59), ("180B", 0.81)):
        device = "a100" if model == "70B" else "mi300x"
        bed = Bed(model, device, {"max_num_seqs": 64})
        runs = [
            bed.saturated({"tensor_parallel_size": count}, (of("one", 1, 4000, 16, 0.0),), 1, 10)
            for count in (2, 4)
        ]
        yield Figure(
            f"TTFT {model}, 2 -> 4 {device}", claimed, runs[1].ms("ttft_p50") / runs[0].ms("ttft_p50")
        )


def chunked_throughput() -> Iterator[Figure]:
    """Off with 128 sequences, on with 2,048 tokens and 256 sequences."""
    bed = Bed("8B", "h100", {"max_model_len": 16_384})
    off = {"enable_chunked_prefill": False, "max_num_batched_tokens": 16_384, "max_num_seqs": 128}
    on = {"enable_chunked_prefill": True, "max_num_batched_tokens": 2048, "max_num_seqs": 256}
    rate, one, two = busy_rate(bed, off, on, MIXED)
    before, after = (bed.offered(flags, MIXED, rate) for flags in (off, on))
    yield Figure("throughput", 0.92, two.throughput / one.throughput, "at least", "of before")
    yield Figure("TTFT P95", 0.5, after.ms("ttft_p95") / before.ms("ttft_p95"))
    yield Figure("ITL P95", 0.5, after.ms("itl_p95") / before.ms("itl_p95"))


def shared_copy() -> Iterator[Figure]:
    """Blocks in use with 50 requests of 2,000 shared tokens and 16 of their own, all decoding."""
    held = {}
    for caching in (False, True):
        clock = VirtualClock()
        size = ModelSize(0, 1, 4096)
        config = EngineConfig(
            max_model_len=4096,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            enable_prefix_caching=caching,
            num_gpu_blocks_override=10_000,
        )
        core = EngineCore(config, SimulatedRunner(size, StepTimes(launch=1.0), clock), clock)
        prompts = [[*range(2000), *range(5000 + 16 * i, 5016 + 16 * i)] for i in range(50)]
        sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        requests = [TimedRequest(f"r{i}", 0.0 if i == 0 else 2.5, p, sampling) for i, p in enumerate(prompts)]
        free: list[int] = []
        run_workload(core, clock, requests, partial(_note_free, free))
        held[caching] = 10_000 - min(free)
    whole = 2000 // 16
    yield Figure("copies without caching", 50, held[False] / (whole + 2), "amount")
    yield Figure("copies of the prefix with it", 1, (held[True] - 50 * 4) / whole, "amount")


def _note_free(free: list[int], plan: StepPlan, output: StepOutput, seconds: float) -> None:
    free.append(plan.free_blocks)


def static_offline() -> Iterator[Figure]:
    setting = simulated_h100()
    requests = equal(512, 1)
    static, unified = (on_phase(setting, requests, name, scheduler=name) for name in ("static", "unified"))
    yield Figure("throughput, static of continuous", 0.98, static.throughput / unified.throughput, "at least")


def experts() -> Iterator[Figure]:
    """Eight experts, two of them active, against a dense model of as many active parameters; ten seeds."""
    flags = {"tensor_parallel_size": 2, "max_num_seqs": 128, "max_num_batched_tokens": 2048}
    dense, sparse = Bed("13B", "a100", flags), Bed("8x7B", "a100", flags, active=13 / 47)
    rate = BUSY * min(bed.saturated({}, MIXED, 128, 512).request_rate for bed in (dense, sparse))
    spreads = []
    for bed in (dense, sparse):
        tails = [bed.offered({}, MIXED, rate, seed).ms("ttft_p99") for seed in range(10)]
        spreads.append(statistics.stdev(tails))
    yield Figure("spread of TTFT P99", 8.0, spreads[1] / spreads[0])


BUSY_8B = "8B on an H100, open loop at 90 % of the lower capacity of both settings"
CLAIMS: tuple[Claim, ...] = (
    Claim(
        "Static batching uses 30-50 % of the compute (47 % in the example of four), continuous "
        "batching 80-90 %",
        "four requests of 3, 8, 2 and 4 tokens; 8B on an H100, heavy-tailed answers",
        four_requests,
        "With a real tail static batching is worse than claimed: everybody waits for the longest answer. "
        "Continuous batching pads nothing; what is idle there is idle for want of requests.",
    ),
    Claim(
        "A 32K prompt beside 60 decodes stops them for 800 ms unchunked, 200 ms at a budget of "
        "8,192, 55 ms at "
        "2,048, and its own TTFT grows by a tenth",
        "8B on an H100",
        long_prompt_beside_decodes,
        "The last chunks attend to all the others, so that they take longer than a share of the whole: the "
        "longest gap is more than the budget's share of it.",
    ),
    Claim(
        "max_num_batched_tokens 2048 -> 4096: throughput +18 %, P95 TTFT three times as long",
        f"mixed short and long prompts; {BUSY_8B}",
        double_the_budget,
        "From some 400 tokens on an H100 computes at its peak, so twice the budget brings no throughput; and "
        "prompts are served in order, so the one behind a long prompt waits for all of it, in one "
        "chunk or two.",
    ),
    Claim(
        "8192 -> 16384: P50 TTFT from 230 ms to 1.2 s",
        f"mixed short and long prompts; {BUSY_8B}",
        sixteen_thousand,
        "As above. What a larger budget does spoil is ITL, and what it takes from the KV pool.",
    ),
    Claim(
        "8192 -> 32768, with one prompt of 20,000 tokens among chats: their TTFT from 150 ms to 3 s",
        f"3 % long prompts; {BUSY_8B}",
        one_long_prompt,
        "Chats behind the long prompt wait for it with either budget; the larger one only adds those that "
        "arrive during its one step. Seconds need a slower device or several long prompts in a row.",
    ),
    Claim(
        "max_num_seqs 256 -> 64: P95 TTFT from 870 to 340 ms, throughput -12 %",
        f"chat; {BUSY_8B}, and 256 clients",
        fewer_sequences,
        "A request that may not run waits, and waiting is TTFT. Fewer sequences lower TTFT only where more "
        "of them are preempted, for want of KV.",
    ),
    Claim(
        "max_num_seqs 512 instead of 128 at 200 clients: P99 TTFT +380 ms (CPU 62 -> 94 %)",
        "7B on an A100 with 40 GB",
        two_hundred_clients,
        "With 128, 72 clients wait outside. The host's time a sequence is an assumption of the simulator "
        "(docs/simulate.md), so that the CPU's share is not judged.",
    ),
    Claim(
        "max_num_seqs 32 -> 128: throughput +18 %, P99 TTFT four times as long",
        "70B on four A100, chat, 128 clients",
        thirty_two_to_128,
        "Throughput does grow. TTFT does not: with 32, 96 clients wait.",
    ),
    Claim(
        "From 32 to 128 concurrent requests a step takes 28 instead of 12 ms",
        "8B on an H100, chat",
        step_time,
        "The mean gap, so steps with a prompt in them count.",
    ),
    Claim(
        "gpu_memory_utilization 0.92 -> 0.85: spread of P99 TTFT -60 %",
        "7B on an A100 with 40 GB, mixed, ten seeds, 90 % of the lower capacity",
        less_memory,
        "Blocks of one size do not fragment. A smaller pool holds fewer requests, and the others queue.",
    ),
    Claim(
        "Prefix caching with a common template: block allocations -37 %, P99 TTFT from 1.8 to 1.1 s",
        f"prompts of 4,000 tokens, 1,480 of them one template; {BUSY_8B}",
        template,
        "The template's share was chosen to fit the first figure; the second then follows.",
    ),
    Claim(
        "A system prompt of 2,000 tokens, cached: TTFT 300 to 500 ms shorter",
        "one request at a time",
        system_prompt,
        "What is saved is the time to prefill 2,000 tokens: right for a model of 70B, a fraction of "
        "it for 8B.",
    ),
    Claim(
        "Chunked prefill with a budget of 4,096: TTFT of short requests from seconds to below 300 "
        "ms, that of "
        "the long ones +5 to +8 %",
        f"a tenth of 12,000-token prompts among short ones; {BUSY_8B}",
        chunks_of_4096,
        "Chunks alone do not help who waits behind a long prompt: it takes the whole budget of every "
        "step until "
        "it is done. A threshold for long prompts leaves room in each step, and does what is claimed.",
    ),
    Claim(
        "Average input 800 -> 1,300 tokens at a budget of 6,144: P99 TTFT 1.8 times as long; back to "
        "normal at "
        "4,096",
        "70B on four A100, at 60 % of the capacity with the shorter inputs",
        longer_inputs,
        "The load grows with the inputs, and the queue with it. Another budget does not make the "
        "device faster.",
    ),
    Claim(
        "Speculation: ITL 2-3 times shorter at batch 4, throughput lower at batch 128",
        "8B on an H100; three n-gram drafts that cost nothing",
        speculation,
        "Batch 128 with its drafts is 512 tokens, about where an H100 begins to be bound by compute: with "
        "good drafts it still gains, with bad ones it loses.",
    ),
    Claim(
        "70B, budget 8192 -> 2048: a step takes 80-100 instead of 300-400 ms, throughput -10 to -15 %",
        "70B on four A100, prompts of 6,000 tokens, 64 clients",
        large_model_budget,
        "The proportion is right. 8,192 tokens of a 70B model are 1.1 PFLOP, more than four A100 compute in "
        "a second: the claimed milliseconds need some sixteen. Chunks of 2,048 are large enough to "
        "lose nothing.",
    ),
    Claim(
        "Tensor parallel 2 -> 4: TTFT -41 % with 70B, -19 % with 180B",
        "a prompt of 4,000 tokens, alone; A100, and MI300X for what does not fit two A100",
        twice_the_devices,
        "By the data sheets' links the sums over devices cost the larger model no greater share. The claim's "
        "180B ran on links that are not told.",
    ),
    Claim(
        "A model with experts instead of a dense one at the same flags: spread of P99 TTFT from 300 "
        "ms to 2.4 s",
        "two A100; 13B dense, and 47B of which a token is computed with 13B; ten seeds, the same rate",
        experts,
        "As far as it can be had: the simulator knows that all weights are read and that less memory "
        "is left, "
        "and nothing of unbalanced experts.",
    ),
    Claim(
        "Chunked prefill: throughput loses at most 8 % with more sequences, P95 latency halves",
        f"off with 128 sequences, on with 2,048 tokens and 256; {BUSY_8B}",
        chunked_throughput,
        "It is the ITL that halves, not the TTFT.",
    ),
    Claim(
        "A prompt of 2,000 tokens shared by 50 requests: one copy of its blocks instead of 50",
        "block counts of the real block pool",
        shared_copy,
        "Exactly so.",
    ),
    Claim(
        "With equal lengths, offline, static batching is no slower",
        "8B on an H100, 512 requests of one length",
        static_offline,
        "Nobody waits for a longer answer then.",
    ),
)
