"""The other side of benchmarks/engine/simulator.py, for an interpreter with sched-sim. Requests on stdin."""

import json
import sys
import time

from sched_sim.core.event_engine import Simulator
from sched_sim.core.request import Request
from sched_sim.hardware.presets import PRESETS
from sched_sim.schedulers.factory import create_scheduler


def main() -> None:
    given = json.load(sys.stdin)
    model = PRESETS["a100"].model_dump()  # its preset of an 8B, on its preset of an H100
    shape = ["model_name", "parameter_count_billions", "num_layers", "hidden_size", "num_heads"]
    shape += ["num_kv_heads", "head_dim", "dtype_bytes"]
    hardware = PRESETS["h100"].model_copy(update={name: model[name] for name in shape})
    requests = [
        Request(
            request_id=f"r{number}",
            arrived_at=arrival,
            prompt_tokens=len(prompt),
            output_tokens=output,
            prompt_token_ids=prompt,
        )
        for number, (arrival, prompt, output) in enumerate(given["requests"])
    ]
    wall, cpu = time.perf_counter(), time.process_time()
    scheduler = create_scheduler(
        "chunked",
        hardware,
        token_budget=given["budget"],
        max_batch_size=given["sequences"],
        enable_prefix_caching=given["prefix_caching"],
    )
    simulator = Simulator(hardware, scheduler)
    simulator.submit_workload(requests)
    metrics = simulator.run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert metrics.completed_requests == len(requests), metrics
    tokens = sum(request.decoded_tokens for request in requests)
    json.dump({"simulated": simulator.current_time, "cpu": cpu, "wall": wall, "tokens": tokens}, sys.stdout)


if __name__ == "__main__":
    main()
