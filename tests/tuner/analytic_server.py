"""A server as a formula: what a config would measure, without a server, a clock or noise."""

import math
from collections.abc import Mapping
from typing import Any

from tuner.result import Measurement, Reading


def measure(config: Mapping[str, Any], *, rate: float = 1.0) -> Measurement:
    """A step costs 25 ms and 0.6 ms a token; long prompts fill the budget, so that ITL P99 is a full step."""
    budget, seqs = config["max_num_batched_tokens"], config["max_num_seqs"]
    threshold = config["long_prefill_token_threshold"] or budget
    chunk = min(budget, threshold, 2000)
    itl_p99 = 0.025 + 0.0006 * chunk + 0.0005 * min(seqs, 32)
    steps = math.ceil(2000 / chunk)
    ttft_p95 = steps * itl_p99 * (1 + max(0, 8 / seqs - 0.5))
    capacity = 100 / (1 + 60 / budget) * min(1, seqs / 8)
    throughput = min(75.0 * rate, capacity)
    values = {
        "itl_p99": itl_p99,
        "ttft_p95": ttft_p95,
        "throughput": throughput,
        "goodput": throughput / 75,
        "failed": 0.0,
        "backlog": 0.0 if capacity >= 75 * rate else 3.0,
    }
    readings = {name: Reading(value, 1000, 0.97 * value, 1.03 * value) for name, value in values.items()}
    return Measurement(readings, window=20.0)
