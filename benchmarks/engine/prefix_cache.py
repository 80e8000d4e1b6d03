"""What a prefix-cache hit saves: TTFT of prompts whose beginning was computed before, against new ones.

    python -m benchmarks.engine.prefix_cache [--rounds 9] [--prefix 1000 ...] [--quick]

A real server with the bundled model. Each round sends a prompt of a new random prefix and a short tail
(cold), then one of the same prefix and another tail (hit), so that both see the same machine. Medians are
reported.
Bar: a shared prefix of 1,000 tokens is answered in at most 0.15 of the cold time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys

from benchmarks.loadgen.own_server import OwnServer, own_server

TAIL = 16
"""Tokens of a prompt behind the shared prefix."""
VOCABULARY = 40_000
BAR = 0.15
FLAGS = {"max_model_len": 8192, "enable_prompt_tokens_details": True, "disable_uvicorn_access_log": True}


def measure(server: OwnServer, prefix: int, rounds: int, seed: int) -> tuple[list[float], list[float]]:
    """Cold and hit TTFT of each round, in seconds."""
    chooser = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chooser.randrange(100, VOCABULARY) for _ in range(count)]

    cold: list[float] = []
    hit: list[float] = []
    for _ in range(rounds):
        shared = tokens(prefix)
        for times in (cold, hit):
            times.append(server.ttft({"prompt": shared + tokens(TAIL), "max_tokens": 1}))
    return cold, hit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="cold and hit requests of each size (default 9)"
    )
    parser.add_argument("--prefix", type=int, nargs="+", default=[250, 1000, 4000], help="tokens shared")
    parser.add_argument("--quick", action="store_true", help="5 rounds of 1,000 tokens only")
    options = parser.parse_args()
    prefixes, rounds = ([1000], 5) if options.quick else (options.prefix, options.rounds)
    missed = []
    with own_server(FLAGS) as server:
        measure(server, 64, 3, seed=1)  # first requests make buffers
        print(f"{'prefix':>8}{'cold ms':>10}{'hit ms':>10}{'ratio':>8}   (medians of {rounds})")
        for prefix in prefixes:
            cold, hit = map(statistics.median, measure(server, prefix, rounds, seed=prefix))
            print(f"{prefix:>8}{1000 * cold:>10.1f}{1000 * hit:>10.1f}{hit / cold:>8.3f}", flush=True)
            if prefix == 1000 and hit > BAR * cold:
                missed.append(prefix)
        metrics = server.metrics()
    hits = metrics["vllm:prefix_cache_hits_total"] / metrics["vllm:prefix_cache_queries_total"]
    print(f"the server's own count: {hits:.1%} of all prompt tokens were hits")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
