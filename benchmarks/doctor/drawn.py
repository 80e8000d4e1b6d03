"""Is the doctor right on loads whose kind and severity are drawn?

    python -m benchmarks.doctor.drawn [--loads 500] [--every N]

Every load is healthy or sick in one of twenty ways, on the scheduler and the metrics of the bundled engine in
virtual time (``benchmarks/loadgen/virtual_server.py``), on a device of a drawn speed. Rules may be tuned on
the even seeds; the odd ones are reported beside them. A cause counts as found where it is the first or the
second finding; of every other ten seeds the flags are not known. Prints the shares and the confusion matrix.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from random import Random

from benchmarks.doctor.loads import HEALTHY, Case, arrivals, beside_long, clients, each
from benchmarks.doctor.matrix import Exhibit, Verdict, confusion, of_doctor, table
from benchmarks.loadgen.virtual_server import CPU, GPU, Pace, VirtualServer
from doctor.diagnosis.diagnose import Diagnosis
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import Scrapes
from servers.reading import Number

SECONDS = 60.0
Draw = Callable[[Random], Case]


def rate(pace: Pace, prompt: int, output: int) -> float:
    """Requests per second that fill a device whose batch is 64 wide."""
    decode = pace.decode_token + pace.decode_pair * (prompt + output / 2) + pace.fixed / 64
    return 1 / (prompt * pace.per_token + output * decode)


def cpu(chance: Random, low: float = 0.7, high: float = 1.4) -> Pace:
    return CPU.times(chance.uniform(low, high))


def steady(chance: Random) -> Case:
    pace, prompt, output = cpu(chance), chance.randrange(32, 400), chance.randrange(24, 128)
    load = arrivals(chance.uniform(0.1, 0.4) * rate(pace, prompt, output), each(prompt, output))
    return Case("steady", HEALTHY, load, pace=pace)


def busy_gpu(chance: Random) -> Case:
    prompt, output = chance.randrange(100, 400), chance.randrange(50, 150)
    load = arrivals(chance.uniform(0.1, 0.3) * rate(GPU, prompt, output), each(prompt, output), 30.0)
    return Case("busy GPU", HEALTHY, load, pace=GPU)


def few_clients(chance: Random) -> Case:
    job = each(chance.randrange(32, 200), chance.randrange(32, 128))
    return Case("few clients", HEALTHY, clients(chance.randrange(1, 8), job, 60), pace=cpu(chance))


def prefix_hits(chance: Random) -> Case:
    shared = chance.randrange(6, 10) * 128
    load = arrivals(chance.uniform(0.2, 0.5), each(shared + 50, 24, shared=shared))
    return Case("prefix hits", HEALTHY, load, assume={"shared_prefix": float(shared)})


def drafts_pay(chance: Random) -> Case:
    drafts = chance.randrange(2, 6)
    load = clients(chance.randrange(2, 6), each(150, 128), 24)
    return Case("drafts pay", HEALTHY, load, {"num_speculative_tokens": drafts}, acceptance=0.85)


def capped(chance: Random, pace: Pace, least: int = 1) -> Case:
    seqs = chance.randrange(least, 9)
    job = each(chance.randrange(32, 128), chance.randrange(48, 128))
    load = clients(seqs * chance.randrange(3, 7), job, 4000)
    return Case("capped", "seq-cap", load, {"max_num_seqs": seqs}, pace=pace, until=SECONDS)


def capped_arrivals(chance: Random) -> Case:
    seqs, prompt, output = chance.randrange(1, 5), chance.randrange(32, 96), chance.randrange(48, 96)
    served = seqs / (CPU.fixed * output * 1.3 + CPU.per_token * prompt)
    load = arrivals(chance.uniform(1.3, 2.0) * served, each(prompt, output))
    return Case("capped, arrivals", "seq-cap", load, {"max_num_seqs": seqs}, until=SECONDS)


def overloaded(chance: Random, low: float, high: float, prompts: tuple[int, int], pace: Pace) -> Case:
    prompt, output = chance.randrange(*prompts), chance.randrange(48, 128)
    load = arrivals(chance.uniform(low, high) * rate(pace, prompt, output), each(prompt, output), 90.0)
    also = frozenset({"prefill-slow"})
    return Case("overloaded", "overload", load, pace=pace, until=90.0, also=also)


def small_pool(chance: Random) -> Case:
    blocks, output = chance.randrange(33, 48), chance.randrange(300, 500)
    load = clients(chance.randrange(14, 24), each(chance.randrange(100, 256), output), 40)
    return Case("small pool", "kv-pressure", load, {"num_gpu_blocks_override": blocks})


def pool_arrivals(chance: Random) -> Case:
    load = arrivals(chance.uniform(0.7, 1.0), each(300, 300))
    return Case("small pool, arrivals", "kv-pressure", load, {"num_gpu_blocks_override": 34})


def long_prompts(chance: Random, budget: int) -> Case:
    load = beside_long(chance.randrange(1800, 3800), chance.uniform(6, 16), chance.randrange(6, 16))
    flags = {"max_num_batched_tokens": budget}
    return Case("long prompts", "itl-spikes-long-prefill", load, flags, also=frozenset({"overload"}))


def small_budget(chance: Random) -> Case:
    budget = chance.choice([8, 16, 32, 48])
    load = clients(1, each(chance.randrange(2000, 3500), 24), 6)
    flags = {"max_num_batched_tokens": budget, "max_num_seqs": 8}
    return Case("small budget", "prefill-slow", load, flags)


def long_prefill(chance: Random) -> Case:
    return Case("long prefill", "prefill-slow", clients(1, each(chance.randrange(2500, 3900), 24), 8))


def header(chance: Random) -> Case:
    shared = chance.randrange(600, 1100)
    job = each(shared + 60, 24, header=chance.randrange(10, 60), shared=shared)
    load = arrivals(chance.uniform(0.2, 0.35), job)
    return Case("header", "prefix-misses", load, assume={"shared_prefix": float(shared)})


def cache_off(chance: Random) -> Case:
    shared = chance.randrange(600, 1100)
    load = arrivals(chance.uniform(0.2, 0.35), each(shared + 60, 24, shared=shared))
    flags = {"enable_prefix_caching": False}
    return Case("cache off", "prefix-misses", load, flags, assume={"shared_prefix": float(shared)})


def drafts_lose(chance: Random, low: int, high: int) -> Case:
    load = clients(chance.randrange(low, high), each(150, 96), 2 * high)
    flags = {"num_speculative_tokens": chance.randrange(3, 8)}
    return Case("drafts lose", "speculation-loses", load, flags, acceptance=chance.uniform(0.0, 0.08))


def hang_up(chance: Random) -> Case:
    job = each(128, 128, patience=chance.randrange(30, 80))
    return Case("hang up", "client-disconnects", clients(chance.randrange(4, 10), job, 60))


def slow_device(chance: Random) -> Case:
    load = clients(chance.randrange(1, 4), each(64, 64), 2000)
    return Case("slow device", "slow-steps", load, pace=cpu(chance, 9.0, 14.0), until=90.0)


def wide_batch(chance: Random) -> Case:
    load = clients(chance.randrange(24, 48), each(64, chance.randrange(150, 250)), 200)
    also = frozenset({"overload"})
    return Case("wide batch", "itl-flat-high", load, also=also, slo="itl_p99<38ms", until=SECONDS)


HEALTHY_WAYS: tuple[Draw, ...] = (steady, busy_gpu, few_clients, prefix_hits, drafts_pay)
SICK_WAYS: tuple[Draw, ...] = (
    lambda c: capped(c, cpu(c)),
    lambda c: capped(c, cpu(c, 6.0, 10.0)),
    lambda c: capped(c, GPU, 2),
    capped_arrivals,
    lambda c: overloaded(c, 1.3, 1.6, (128, 300), cpu(c)),
    lambda c: overloaded(c, 2.0, 4.0, (128, 300), cpu(c)),
    lambda c: overloaded(c, 1.5, 2.5, (500, 1000), cpu(c)),
    lambda c: overloaded(c, 1.5, 3.0, (64, 200), cpu(c, 2.0, 4.0)),
    small_pool,
    pool_arrivals,
    lambda c: long_prompts(c, 4096),
    lambda c: long_prompts(c, 512),
    small_budget,
    long_prefill,
    header,
    cache_off,
    lambda c: drafts_lose(c, 8, 16),
    lambda c: drafts_lose(c, 20, 32),
    hang_up,
    slow_device,
    wide_batch,
)


def drawn(seed: int, every: int = 1) -> Exhibit:
    """One load in five is healthy."""
    chance = Random(seed)
    ways = HEALTHY_WAYS if seed // 2 % 5 == 0 else SICK_WAYS
    case = chance.choice(ways)(chance)
    server = VirtualServer(
        seed=seed, acceptance=case.acceptance, pace=case.pace, scrape_every=2.0, **case.flags
    )
    case.load(server)
    half = "tuned on" if seed % 2 == 0 else "reported"
    scrapes = server.run(case.until)[::every]
    return Exhibit(
        half, f"{seed} {case.name}", case.truth, scrapes, server.flags, case.assume, case.also, case.slo
    )


def missed(exhibit: Exhibit, diagnosis: Diagnosis) -> bool:
    """Whether a server that is called healthy missed one of its objectives."""
    if not diagnosis.healthy:
        return False
    evaluator = Scrapes(exhibit.scrapes).observe(None, diagnosis.slo.values).evaluator
    bounds = {"itl_p99": "slo_itl_p99", "ttft_p95": "slo_ttft_p95"}
    return any(
        isinstance(reading, Number) and reading.low > diagnosis.slo.values[bound]
        for name, bound in bounds.items()
        for reading in evaluator.read(SIGNALS[name]).values()
    )


def report(exhibits: Sequence[Exhibit], verdicts: Sequence[Verdict]) -> Iterator[str]:
    for half in ("tuned on", "reported"):
        pairs = [(e, v) for e, v in zip(exhibits, verdicts, strict=True) if e.group == half]
        sick = [v.right for e, v in pairs if e.truth != HEALTHY]
        well = [not v.right for e, v in pairs if e.truth == HEALTHY]
        yield f"\n{half}: cause first or second {sum(sick)} of {len(sick)}, "
        yield f"false alarms {sum(well)} of {len(well)}\n"
        own = [e for e, _ in pairs]
        yield from table(own, {"vtune doctor": [v for _, v in pairs]})
        yield ""
        yield from confusion(own, [v for _, v in pairs])
        yield ""
        yield "wrong: " + "; ".join(f"{e.name} ({e.truth}): {v.first}" for e, v in pairs if not v.right)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", type=int, default=500)
    parser.add_argument("--every", type=int, default=1, help="keep every n-th scrape (they are 2 s apart)")
    options = parser.parse_args()
    exhibits = [drawn(seed, options.every) for seed in range(options.loads)]
    known = [seed // 10 % 2 == 0 for seed in range(options.loads)]
    verdicts = [of_doctor(exhibit, flags) for exhibit, flags in zip(exhibits, known, strict=True)]
    print("\n".join(report(exhibits, verdicts)))
    wrong = [e.name for e, flags in zip(exhibits, known, strict=True) if missed(e, e.diagnosis(flags))]
    print(f"\nhealthy with a missed objective: {len(wrong)} {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
