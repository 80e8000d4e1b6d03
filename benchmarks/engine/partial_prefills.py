"""Short prompts behind long ones: what concurrent partial prefills do for both.

python -m benchmarks.engine.partial_prefills [--quick] [--real] [--times bundled|h100|FILE]

Now and then four long prompts arrive together, and short ones all the time. By default a step may leave any
number of prompts half-way, and the first in line takes all of the budget that decoding leaves: a request that
comes behind a long prompt waits for its end. With ``--max-num-partial-prefills N --max-long-partial-prefills
L`` (rows ``N/L``) at most N prompts are half-way, of which L are long; for N > 1 a long one gets at most 4 %
of max_model_len a step, unless ``--long-prefill-token-threshold`` says otherwise, and short ones overtake
those that have to wait.

vLLM documents both flags, but from 0.33 on they do nothing there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.engine.baselines import Setting, add_options, make_setting
from engine.core import EngineCore
from engine.request import SamplingParams
from engine.sim.simulated_runner import RequestTimeline, TimedRequest, run_workload

WAYS: dict[str, dict[str, int]] = {
    "any number (default)": {},
    "1/1": {"max_num_partial_prefills": 1},
    "2/1": {"max_num_partial_prefills": 2},
    "4/1": {"max_num_partial_prefills": 4},
    "4/2": {"max_num_partial_prefills": 4, "max_long_partial_prefills": 2},
    "4/4": {"max_num_partial_prefills": 4, "max_long_partial_prefills": 4},
}
VOCABULARY = 49_000
LONG_AT_ONCE = 4
SHORT_A_LONG = 24
"""Short prompts for every long one; fewer in real time, for the sake of it."""
REAL_SHORT_A_LONG = 6


def workload(setting: Setting, num_bursts: int, short_a_long: int, seed: int) -> list[TimedRequest]:
    """Bursts of long prompts, evenly spaced, and short ones at the setting's rate."""
    rng = np.random.default_rng(seed)
    limit = setting.config.max_model_len
    assert limit is not None
    burst_every = short_a_long * LONG_AT_ONCE / setting.rate
    bursts = [place * burst_every for place in range(num_bursts)]
    long = [
        request(f"long-{i}-{j}", at, 3 * limit // 4, 16, rng)
        for i, at in enumerate(bursts)
        for j in range(LONG_AT_ONCE)
    ]
    short: list[TimedRequest] = []
    now = 0.0
    while now < burst_every * len(bursts):
        short.append(request(f"short-{len(short)}", now, limit // 64, 32, rng))
        now += rng.exponential(1 / setting.rate)
    return [*long, *short]


def request(name: str, arrival: float, prompt: int, output: int, rng: np.random.Generator) -> TimedRequest:
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return TimedRequest(name, arrival, rng.integers(100, VOCABULARY, prompt).tolist(), sampling)


def run(setting: Setting, requests: Sequence[TimedRequest], flags: dict[str, Any]) -> list[RequestTimeline]:
    runner, clock = setting.make()
    return run_workload(EngineCore(replace(setting.config, **flags), runner, clock), clock, requests)


def cells(timelines: Sequence[RequestTimeline]) -> Iterator[float]:
    """TTFT of the short and of the long, P50 and P99, and the P99 of all gaps. Milliseconds."""
    for kind in ("short", "long"):
        ttft = [t.ttft for t in timelines if t.request.request_id.startswith(kind)]
        yield from np.percentile(ttft, (50, 99)) * 1e3
    gaps = np.concatenate([timeline.itl for timeline in timelines])
    yield float(np.percentile(gaps, 99)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = parser.parse_args()
    setting = make_setting(options)
    bursts = 1 if options.real else 3 if options.quick else 30
    short_a_long = REAL_SHORT_A_LONG if options.real else SHORT_A_LONG
    requests = workload(setting, bursts, short_a_long, options.seed)
    config = setting.config
    num_long = sum(item.request_id.startswith("long") for item in requests)
    limit = config.max_model_len or 0
    print(
        f"{setting.name}; budget {config.max_num_batched_tokens:,} tokens\n"
        f"{num_long} prompts of {3 * limit // 4:,} tokens, {LONG_AT_ONCE} at once; "
        f"{len(requests) - num_long} of {limit // 64}, {setting.rate:g} a second\n"
        f"{'partial/long':<22}{'short TTFT P50':>15}{'P99':>9}{'long TTFT P50':>15}{'P99':>9}"
        f"{'ITL P99':>9}   ms"
    )
    for label, flags in WAYS.items():
        timelines = run(setting, requests, flags)
        row = "".join(f"{v:>{w}.0f}" for v, w in zip(cells(timelines), (15, 9, 15, 9, 9), strict=True))
        print(f"{label:<22}{row}", flush=True)


if __name__ == "__main__":
    main()
