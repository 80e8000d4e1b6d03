"""A fake OpenAI server for tests: vLLM's flags, endpoints and metrics around a toy scheduler. Stdlib only.

    python tests/fake_server.py bundled --port 8000 --max-num-seqs 8 --fault die-mid-run:5

A step serves up to ``max_num_seqs`` requests and ``max_num_batched_tokens`` tokens and lasts

    scale * (2 + 0.1 n + 0.01 n^2 + 0.02 prefill tokens) ms      for n requests that decode,

so inter-token latency grows with both flags, decode throughput is best near n = 14, and 30 requests of 16
tokens take about half a second. The KV pool shrinks as the token budget grows; too large a budget does
not start. Nothing is random: the same requests in the same order get the same steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

FAULTS = """
exit[:STATUS]       ends at once with this status (3)
oom                 ends at once with a CUDA out-of-memory trace
oom-above:TOKENS    the same, if max_num_batched_tokens is above TOKENS
port                ends at once, saying that the port is taken
hang-start          never listens
unhealthy           /health answers 503 for ever
health-then-hang    healthy, completions are never answered
error-500           completions answer HTTP 500
error-in-stream     completions break off with an in-band error
die-mid-run[:N]     out of memory when the Nth completion (8) arrives
killed-mid-run[:N]  SIGKILL when the Nth completion (8) arrives
hang-mid-run[:N]    no token from the Nth completion (8) on
ill-mid-run[:N]     HTTP 500 for the Nth completion (8) and all later ones, and 503 for /health
errors-mid-run[:N]  HTTP 500 for the same, while /health stays well
ignore-term         says that it ignores SIGTERM, and does
orphan              leaves a child in a session of its own that ignores SIGTERM
no-metrics          /metrics answers 404
flood               prints a line of 1,000 characters for every step
"""
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ..."
)
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0)
INTERVALS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 80.0)
LATENCIES = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 7680.0)


@dataclass
class Histogram:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[sum(bound < value for bound in self.bounds)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        counts = self.counts or [0] * (len(self.bounds) + 1)
        sums = [sum(counts[: index + 1]) for index in range(len(counts))]
        bounds = [*map(str, self.bounds), "+Inf"]
        return [
            f"# TYPE {name} histogram",
            *(f'{name}_bucket{{{labels},le="{b}"}} {n}' for b, n in zip(bounds, sums, strict=True)),
            f"{name}_count{{{labels}}} {sums[-1]}",
            f"{name}_sum{{{labels}}} {self.total}",
        ]


@dataclass(eq=False)
class Sequence:
    prompt: int
    output: int
    arrived: float
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    computed: int = 0
    emitted: int = 0
    last: float = 0.0
    gone: bool = False


class Engine:
    """The toy scheduler and its metrics."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.kv_tokens = int(100_000 * flags.gpu_memory_utilization) - 8 * flags.max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.work = asyncio.Event()
        self.hung = False
        self.counters = {"prompt_tokens": 0, "generation_tokens": 0, "num_preemptions": 0}
        self.counters |= {"prefix_cache_queries": 0, "prefix_cache_hits": 0}
        self.success = {"length": 0, "abort": 0}
        self.histograms = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(INTERVALS),
            "request_time_per_output_token_seconds": Histogram(INTERVALS),
            "e2e_request_latency_seconds": Histogram(LATENCIES),
            "request_queue_time_seconds": Histogram(LATENCIES),
            "request_prefill_time_seconds": Histogram(LATENCIES),
        }

    def add(self, prompt: int, output: int) -> Sequence:
        sequence = Sequence(prompt, output, time.monotonic())
        self.waiting.append(sequence)
        self.work.set()
        return sequence

    async def run(self) -> None:
        while True:
            await self.work.wait()
            if self.hung:
                return
            self.admit()
            decoding = [s for s in self.running if s.computed >= s.prompt]
            budget = max(0, self.flags.max_num_batched_tokens - len(decoding))
            prefill = 0
            for sequence in self.running:
                if sequence.computed < sequence.prompt:
                    chunk = min(sequence.prompt - sequence.computed, budget - prefill)
                    sequence.computed += chunk
                    prefill += chunk
            n = len(decoding)
            await asyncio.sleep(self.flags.time_scale * (2 + 0.1 * n + 0.01 * n * n + 0.02 * prefill) / 1000)
            if "flood" in self.flags.fault:
                print("x" * 1000, flush=True)
            self.emit()
            if not self.running and not self.waiting:
                self.work.clear()

    def admit(self) -> None:
        used = self.kv_used()
        while self.waiting and len(self.running) < self.flags.max_num_seqs:
            size = self.waiting[0].prompt + self.waiting[0].output
            if used + size > self.kv_tokens:
                return
            used += size
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            self.histograms["request_queue_time_seconds"].observe(time.monotonic() - sequence.arrived)
            self.counters["prefix_cache_queries"] += sequence.prompt

    def emit(self) -> None:
        now = time.monotonic()
        for sequence in list(self.running):
            if sequence.gone:
                self.finish(sequence, now, "abort")
            elif sequence.computed >= sequence.prompt:
                first = sequence.emitted == 0
                sequence.emitted += 1
                if first:
                    self.counters["prompt_tokens"] += sequence.prompt
                    self.histograms["time_to_first_token_seconds"].observe(now - sequence.arrived)
                else:
                    self.histograms["inter_token_latency_seconds"].observe(now - sequence.last)
                self.counters["generation_tokens"] += 1
                sequence.last = now
                sequence.tokens.put_nowait(sequence.emitted)
                if sequence.emitted == sequence.output:
                    self.finish(sequence, now, "length")

    def finish(self, sequence: Sequence, now: float, reason: str) -> None:
        self.running.remove(sequence)
        self.success[reason] += 1
        self.histograms["e2e_request_latency_seconds"].observe(now - sequence.arrived)

    def kv_used(self) -> int:
        return sum(s.prompt + s.output for s in self.running)

    def metrics(self) -> str:
        labels = f'engine="0",model_name="{self.flags.model}"'
        lines = []
        gauges = {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "kv_cache_usage_perc": self.kv_used() / self.kv_tokens,
        }
        for name, value in gauges.items():
            lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{labels}}} {value}"]
        config = (
            f'block_size="16",num_gpu_blocks="{self.kv_tokens // 16}",'
            f'gpu_memory_utilization="{self.flags.gpu_memory_utilization}",'
            f'enable_prefix_caching="{self.flags.enable_prefix_caching}"'
        )
        lines += ["# TYPE vllm:cache_config_info gauge", f'vllm:cache_config_info{{engine="0",{config}}} 1']
        for name, value in self.counters.items():
            lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{labels}}} {value}"]
        lines.append("# TYPE vllm:request_success counter")
        for reason, value in self.success.items():
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {value}')
        for name, histogram in self.histograms.items():
            lines += histogram.lines(f"vllm:{name}", labels)
        return "\n".join(lines) + "\n"


class Server:
    """HTTP/1.1 with keep-alive, just enough of it."""

    def __init__(self, engine: Engine, flags: argparse.Namespace) -> None:
        self.engine, self.flags = engine, flags
        self.completions = 0
        self.ill = "unhealthy" in flags.fault
        self.refusing = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *headers = head.decode().split("\r\n")
                fields = {k.lower(): v.strip() for k, _, v in (h.partition(":") for h in headers)}
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = request.split(" ", 2)
                if self.lets_in(fields):
                    await self.answer(method, path, body, writer)
                else:
                    said = {"error": {"message": f"no entry with {fields}", "code": 401}}
                    self.reply(writer, 401, json.dumps(said))
                    await writer.drain()
                if fields.get("connection", "").lower() == "close":
                    break
        writer.close()

    def lets_in(self, fields: dict[str, str]) -> bool:
        name, _, value = (self.flags.need_header or "").partition(": ")
        key = self.flags.api_key
        known = key is None or fields.get("authorization") == f"Bearer {key}"
        return known and (not name or fields.get(name.lower()) == value)

    async def answer(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            self.reply(writer, 503 if self.ill else 200, "")
        elif path == "/metrics" and "no-metrics" not in self.flags.fault:
            self.reply(writer, 200, self.engine.metrics())
        elif path == "/v1/models":
            model = {"id": self.flags.model, "object": "model", "max_model_len": self.flags.max_model_len}
            self.reply(writer, 200, json.dumps({"object": "list", "data": [model]}))
        elif method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            await self.complete(json.loads(body), "chat" in path, writer)
        else:
            self.reply(writer, 404, json.dumps({"error": {"message": "Not Found", "code": 404}}))
        await writer.drain()

    async def complete(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        self.completions += 1
        self.misbehave()
        if self.ill or self.refusing or "error-500" in self.flags.fault:
            self.reply(writer, 500, json.dumps({"error": {"message": "engine error", "code": 500}}))
            return
        if priority := body.get("priority"):
            print(f"priority {priority}", flush=True)
            if self.flags.scheduling_policy != "priority":
                message = "Got priority, but Priority scheduling is not enabled."
                self.reply(writer, 400, json.dumps({"error": {"message": message, "code": 400}}))
                return
        prompt = body.get("prompt") or " ".join(str(m["content"]) for m in body.get("messages", []))
        length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        output = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        if length + output > self.flags.max_model_len:
            message = f"maximum context length is {self.flags.max_model_len} tokens"
            self.reply(writer, 400, json.dumps({"error": {"message": message, "code": 400}}))
            return
        sequence = self.engine.add(length, output)
        usage = {"prompt_tokens": length, "completion_tokens": output, "total_tokens": length + output}
        if not body.get("stream"):
            for _ in range(output):
                await sequence.tokens.get()
            self.reply(writer, 200, json.dumps(self.chunk(chat, " a" * output, "length") | {"usage": usage}))
            return
        include_usage = (body.get("stream_options") or {}).get("include_usage")
        try:
            await self.stream(sequence, chat, usage if include_usage else None, writer)
        except ConnectionError:
            sequence.gone = True
            raise

    async def stream(
        self, sequence: Sequence, chat: bool, usage: dict[str, int] | None, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        while sequence.emitted < sequence.output or not sequence.tokens.empty():
            number = await sequence.tokens.get()
            if writer.is_closing():
                raise ConnectionError
            if "error-in-stream" in self.flags.fault and number == 2:
                self.event(writer, json.dumps({"error": {"message": "engine died", "code": 500}}))
                break
            self.event(
                writer, json.dumps(self.chunk(chat, " a", "length" if number == sequence.output else None))
            )
            await writer.drain()
        else:
            if usage:
                self.event(writer, json.dumps(self.chunk(chat, "", None) | {"choices": [], "usage": usage}))
            self.event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    def chunk(self, chat: bool, text: str, finish: str | None) -> dict[str, Any]:
        content = {"delta": {"content": text}} if chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": finish}
        return {"id": "x", "object": "chunk", "model": self.flags.model, "choices": [choice]}

    def misbehave(self) -> None:
        """Apply the faults that come with the Nth completion (the start-up probe counts)."""
        for name, number in self.flags.fault.items():
            if not name.endswith("-mid-run") or self.completions < int(number or 8):
                continue
            if name == "killed-mid-run":
                os.kill(os.getpid(), signal.SIGKILL)
            elif name == "die-mid-run":
                print(OUT_OF_MEMORY, flush=True)
                os._exit(1)
            elif name == "ill-mid-run":
                self.ill = True
            elif name == "errors-mid-run":
                self.refusing = True
            else:
                self.engine.hung = True

    @staticmethod
    def event(writer: asyncio.StreamWriter, data: str) -> None:
        payload = f"data: {data}\n\n".encode()
        writer.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")

    @staticmethod
    def reply(writer: asyncio.StreamWriter, status: int, body: str) -> None:
        data = body.encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\ncontent-type: text/plain\r\n\r\n".encode()
        )
        writer.write(data)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=FAULTS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="fake")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--long-prefill-token-threshold", type=int, default=0)
    parser.add_argument("--scheduling-policy", default="fcfs")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speculative-config", type=json.loads)
    for switch in ("--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling"):
        parser.add_argument(switch, action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY"), help="asked for on every path")
    parser.add_argument("--need-header", help="'Name: value', asked for on every path")
    parser.add_argument("--tls-cert", help="PEM; its key is in it")
    parser.add_argument("--start-delay", type=float, default=0.0, help="seconds before it listens")
    parser.add_argument("--time-scale", type=float, default=1.0, help="factor on the length of a step")
    parser.add_argument("--fault", action="append", default=[], help="see below; may be repeated")
    flags = parser.parse_args(arguments)
    flags.fault = {name: value for name, _, value in (fault.partition(":") for fault in flags.fault)}
    return flags


def fail_at_start(flags: argparse.Namespace, engine: Engine) -> None:
    fault = flags.fault
    if "exit" in fault:
        print("the fake server was told to exit", flush=True)
        sys.exit(int(fault["exit"] or 3))
    if "oom" in fault or flags.max_num_batched_tokens > int(fault.get("oom-above", 1 << 40)):
        sys.exit(OUT_OF_MEMORY)
    if "port" in fault:
        sys.exit(
            f"OSError: [Errno 98] error while attempting to bind on port {flags.port}: address already in use"
        )
    if engine.kv_tokens < flags.max_model_len:
        sys.exit(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
        )
    if "ignore-term" in fault:
        signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM is ignored", flush=True))
    if "orphan" in fault:
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        subprocess.Popen([sys.executable, "-S", "-c", stubborn], start_new_session=True)
    if "hang-start" in fault:
        print("loading for ever", flush=True)
        time.sleep(3600)


async def main(flags: argparse.Namespace) -> None:
    engine = Engine(flags)
    fail_at_start(flags, engine)
    await asyncio.sleep(flags.start_delay)
    tls = None
    if flags.tls_cert:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(flags.tls_cert)
    serve = Server(engine, flags).serve
    server = await asyncio.start_server(serve, "127.0.0.1", flags.port, limit=1 << 22, ssl=tls)
    shown = {name: value for name, value in vars(flags).items() if name not in ("api_key", "need_header")}
    print(f"fake server on port {flags.port}: {shown}", flush=True)
    stop = asyncio.Event()
    if "ignore-term" not in flags.fault:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if "health-then-hang" not in flags.fault:
        steps = asyncio.create_task(engine.run())
    await stop.wait()
    if "health-then-hang" not in flags.fault:
        steps.cancel()
    server.close()


if __name__ == "__main__":
    asyncio.run(main(parse()))
