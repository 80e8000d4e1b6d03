"""What the scheduler costs: ours, and the real vLLM Scheduler on the same requests, alternating in one run.

    python -m benchmarks.engine.scheduler --vllm VENV/bin/python [--trace azure23_conv.csv] [--quick]

Without ``--vllm`` ours alone is measured. No model is involved: each request gets one token a step.

- *steady*: N requests decode, in all phases of their blocks, so that a step enters and fills N / 16 blocks.
  Medians over steps of ``schedule()`` and of ``update()``, what they report to the outside included (vLLM:
  an EngineCoreOutput a request; ours: columns of ids and tokens, which is what the HTTP process is sent).
- *replay*: a whole trace of arrivals. A virtual clock gives every step a time, and requests arrive by it; so
  both sides make the same steps, which is checked. The sum over making the requests, adding
  them, ``schedule()`` and ``update()``: hashing, admission, taking and evicting blocks, finishing.

What is left out on both sides: making prompts, and what a runner would do. vLLM runs with its own Python and
``log_stats=False``, its cheapest. Both sides freeze what they have imported out of the garbage collector's
sight, as both servers do.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 16
MAX_MODEL_LEN = 16384
EOS, TOKEN = 2, 7
clock = time.perf_counter


# -- the two sides ------------------------------------------------------------------------------


class Side(ABC):
    """A scheduler, driven from outside. ``plan`` is its own type of plan."""

    name: str
    num_alive: int = 0

    @abstractmethod
    def start(self, max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int) -> None:
        """A fresh scheduler."""

    @abstractmethod
    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Make a request and queue it."""

    @abstractmethod
    def schedule(self) -> Any: ...

    @abstractmethod
    def execute(self, plan: Any) -> Any:
        """The result of a runner: a token for each request that is not mid-prefill. Not measured."""

    @abstractmethod
    def update(self, plan: Any, result: Any) -> Any: ...

    @abstractmethod
    def num_tokens(self, plan: Any) -> int:
        """How many tokens the step computes."""

    @abstractmethod
    def num_running(self) -> int: ...

    @abstractmethod
    def num_unfinished(self) -> int: ...


class Ours(Side):
    def __init__(self) -> None:
        from engine.config import EngineConfig
        from engine.request import Request, SamplingParams
        from engine.scheduling.scheduler import UnifiedScheduler
        from engine.step import OneEach, StepResult

        self.name = "vtune"
        self._config, self._scheduler_type = EngineConfig, UnifiedScheduler
        self._request, self._sampling = Request, SamplingParams
        self._one_each, self._result = OneEach, StepResult

    def start(self, max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int) -> None:
        config = self._config(
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self._scheduler = self._scheduler_type(config, num_blocks)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = self._sampling(max_tokens=max_tokens)
        self._scheduler.add(self._request(request_id, prompt, sampling, eos_token_ids=(EOS,)))

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def execute(self, plan: Any) -> Any:
        emitting = plan.rows.emitting
        return self._result(self._one_each(emitting, [TOKEN] * len(emitting)))

    def update(self, plan: Any, result: Any) -> Any:
        return self._scheduler.update(plan, result)

    def num_tokens(self, plan: Any) -> int:
        return int(plan.num_scheduled_tokens)

    def num_running(self) -> int:
        return self._scheduler.num_running

    def num_unfinished(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_waiting


MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": MAX_MODEL_LEN,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


class Vllm(Side):
    """The Scheduler class that vLLM's engine core runs, constructed as it does, without the rest."""

    def __init__(self) -> None:
        os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
        import torch
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1 import kv_cache_interface, outputs
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        self.name = f"vLLM {vllm.__version__}"
        hash_function = get_hash_fn_by_name("sha256")  # vLLM's default
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._sampling, self._request, self._output = SamplingParams, Request, outputs.ModelRunnerOutput
        self._scheduler_type, self._grammars = Scheduler, StructuredOutputManager
        spec = kv_cache_interface.FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self._groups = [kv_cache_interface.KVCacheGroupSpec(["layer"], spec)]
        self._kv_config = kv_cache_interface.KVCacheConfig

    def start(self, max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int) -> None:
        from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            model = ModelConfig(
                model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN
            )
            scheduling = SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=MAX_MODEL_LEN,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            )
            cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
            config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
        cache.num_gpu_blocks = num_blocks
        self._scheduler = self._scheduler_type(
            vllm_config=config,
            kv_cache_config=self._kv_config(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=self._groups
            ),
            structured_output_manager=self._grammars(config),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = self._sampling(max_tokens=max_tokens, temperature=0.0)
        sampling.update_from_generation_config({}, EOS)
        request = self._request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def execute(self, plan: Any) -> Any:
        ids = list(plan.num_scheduled_tokens)
        requests = self._scheduler.requests
        ready = [requests[i].num_computed_tokens >= requests[i].num_tokens for i in ids]
        sampled = [[TOKEN] if emits else [] for emits in ready]
        index = {request_id: row for row, request_id in enumerate(ids)}
        return self._output(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)

    def update(self, plan: Any, result: Any) -> Any:
        return self._scheduler.update_from_output(plan, result)

    def num_tokens(self, plan: Any) -> int:
        return int(plan.total_num_scheduled_tokens)

    def num_running(self) -> int:
        return len(self._scheduler.running)

    def num_unfinished(self) -> int:
        return int(self._scheduler.get_num_unfinished_requests())


# -- the two measurements -----------------------------------------------------------------------


def steady(side: Side, running: int, steps: int) -> dict[str, float]:
    """Median seconds of schedule and update with ``running`` requests that all decode."""
    blocks_each = 8 + (steps + 80) // BLOCK_SIZE
    side.start(running, max(2048, running), 1 + running * blocks_each)
    for i in range(running):
        prompt = [1000 + i, *range(100, 100 + 63 + i % BLOCK_SIZE)]
        side.add(str(i), prompt, max_tokens=1 << 12)
    planned: list[float] = []
    updated: list[float] = []
    gc.collect()
    while len(planned) < steps:
        begun = clock()
        plan = side.schedule()
        between = clock()
        result = side.execute(plan)
        resumed = clock()
        side.update(plan, result)
        ended = clock()
        if side.num_tokens(plan) == running == side.num_running():
            planned.append(between - begun)
            updated.append(ended - resumed)
    warm = BLOCK_SIZE
    return {
        "schedule": statistics.median(planned[warm:]),
        "update": statistics.median(updated[warm:]),
    }


@dataclass(frozen=True)
class Arrival:
    at: float
    """Seconds since the first."""
    prompt: int
    output: int


def read_trace(path: Path, limit: int | None) -> list[Arrival]:
    """A file of the columns TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open() as lines:
        rows = [
            (_seconds(r["TIMESTAMP"]), int(r["ContextTokens"]), int(r["GeneratedTokens"]))
            for r in csv.DictReader(lines)
        ]
    rows.sort()
    return [Arrival(at - rows[0][0], max(1, prompt), max(1, output)) for at, prompt, output in rows[:limit]]


def _seconds(stamp: str) -> float:
    """``%f`` takes six digits, and these files have seven."""
    whole, _, fraction = stamp.partition(".")
    return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")


@dataclass(frozen=True)
class Pace:
    """The virtual time of a step: that of a large model on a few GPUs."""

    fixed: float = 0.025
    per_token: float = 0.00002


def replay(
    side: Side, trace: Sequence[Arrival], speedup: float, max_num_seqs: int, pace: Pace
) -> dict[str, float]:
    """Seconds spent in the scheduler over a whole trace, by what was called."""
    side.start(max_num_seqs, 4096, 1 + 160_000 // BLOCK_SIZE)
    chance = random.Random(0)
    words = [chance.randrange(100, 900) for _ in range(2 * MAX_MODEL_LEN)]
    seconds = dict.fromkeys(("add", "schedule", "update"), 0.0)
    now, steps, tokens, seats = 0.0, 0, 0, 0
    coming = deque(enumerate(trace))
    gc.collect()
    while coming or side.num_unfinished():
        if coming and not side.num_unfinished():
            now = max(now, coming[0][1].at / speedup)
        while coming and coming[0][1].at / speedup <= now:
            place, arrival = coming.popleft()
            begin = chance.randrange(MAX_MODEL_LEN)
            prompt = [place, *words[begin : begin + arrival.prompt - 1]]
            begun = clock()
            side.add(str(place), prompt, arrival.output)
            seconds["add"] += clock() - begun
        begun = clock()
        plan = side.schedule()
        between = clock()
        result = side.execute(plan)
        resumed = clock()
        side.update(plan, result)
        ended = clock()
        seconds["schedule"] += between - begun
        seconds["update"] += ended - resumed
        count = side.num_tokens(plan)
        steps, tokens, seats = steps + 1, tokens + count, seats + side.num_running()
        now += pace.fixed + pace.per_token * count
    return {**seconds, "steps": steps, "tokens": tokens, "running": seats / max(steps, 1)}


# -- the child, and the conversation with it ----------------------------------------------------


def serve(side: Side) -> None:
    """Answer each line of stdin, ``[function, arguments]``, with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed meanwhile is no answer
    gc.collect()
    gc.freeze()
    print(json.dumps(f"{side.name}, Python {platform.python_version()}"), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "steady":
            answer = steady(side, *arguments)
        else:
            path, limit, speedup, max_num_seqs = arguments
            answer = replay(side, read_trace(Path(path), limit), speedup, max_num_seqs, Pace())
        print(json.dumps(answer), file=answers, flush=True)


class Child:
    """One side in a process of its own."""

    def __init__(self, python: str, side: str) -> None:
        self._command = [python, "-m", "benchmarks.engine.scheduler", "--serve", side]
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise SystemExit(f"{python}: {error.strerror}") from None
        self.name = str(self._answer())

    def ask(self, *question: Any) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer: dict[str, float] = self._answer()
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(
                f"{' '.join(self._command)} ended with exit code {code}: run it by hand to see why"
            )
        return json.loads(line)


@contextlib.contextmanager
def children(vllm: str | None) -> Iterator[list[Child]]:
    started = []
    try:
        started.append(Child(sys.executable, "ours"))
        if vllm is not None:
            started.append(Child(vllm, "vllm"))
        yield started
    finally:
        for child in started:
            child.close()


# -- tables -------------------------------------------------------------------------------------


def median_of(answers: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(answer[key] for answer in answers) for key in answers[0]}


def report_steady(sides: Sequence[Child], sizes: Sequence[int], steps: int, repeats: int) -> None:
    print("\nsteady decode step, ms             schedule    update       sum     ratio")
    for running in sizes:
        answers: list[list[dict[str, float]]] = [[] for _ in sides]
        for _ in range(repeats):
            for side, found in zip(sides, answers, strict=True):
                found.append(side.ask("steady", running, steps))
        ours = 0.0
        for side, found in zip(sides, answers, strict=True):
            cost = median_of(found)
            total = cost["schedule"] + cost["update"]
            ours = ours or total
            figures = "".join(
                f"{1e3 * seconds:10.3f}" for seconds in (cost["schedule"], cost["update"], total)
            )
            print(f"{running:5} running  {side.name.split(',')[0]:14}  {figures}{total / ours:9.1f}x")


def report_replay(
    sides: Sequence[Child], trace: Path, limit: int | None, speedup: float, seqs: int, repeats: int
) -> None:
    answers: list[list[dict[str, float]]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, found in zip(sides, answers, strict=True):
            found.append(side.ask("replay", str(trace), limit, speedup, seqs))
    shape = [{key: found[0][key] for key in ("steps", "tokens", "running")} for found in answers]
    if any(other != shape[0] for other in shape):
        raise SystemExit(f"the sides did not make the same steps: {shape}")
    print(
        f"\nreplay of {trace.name} at {speedup:g}x its rate, s: {shape[0]['steps']:,.0f} steps, "
        f"{shape[0]['tokens']:,.0f} tokens, {shape[0]['running']:.0f} running on average"
    )
    print("                            add  schedule    update       sum     ratio")
    ours = 0.0
    for side, found in zip(sides, answers, strict=True):
        cost = median_of(found)
        parts = [cost[key] for key in ("add", "schedule", "update")]
        ours = ours or sum(parts)
        figures = "".join(f"{seconds:10.2f}" for seconds in (*parts, sum(parts)))
        print(f"  {side.name.split(',')[0]:16}  {figures}{sum(parts) / ours:9.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment that has vLLM")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[64, 256, 1024], help="running requests (default 64 256 1024)"
    )
    parser.add_argument("--trace", type=Path, help="replay this file, too")
    parser.add_argument("--limit", type=int, help="... only its first so many requests")
    parser.add_argument(
        "--speedup", type=float, default=1.0, help="... its arrivals so many times as fast (default 1)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, help="... (default 256)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each measurement; medians are shown (default 3)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer steps, one repeat, 1,000 requests of the trace"
    )
    parser.add_argument("--serve", choices=("ours", "vllm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Ours() if options.serve == "ours" else Vllm())
        return
    steps, repeats, limit = (
        (64, 1, options.limit or 1000) if options.quick else (208, options.repeats, options.limit)
    )
    with children(options.vllm) as sides:
        for side in sides:
            print(side.name)
        if options.vllm is None:
            print("vLLM was not measured: give --vllm the Python of its environment")
        if options.sizes:
            report_steady(sides, options.sizes, steps, repeats)
        if options.trace is not None:
            report_replay(sides, options.trace, limit, options.speedup, options.max_num_seqs, repeats)


if __name__ == "__main__":
    main()
