"""A soak: mixed load with everything that clients do wrong, and whether the server leaks or gets stuck.

    python -m benchmarks.engine.soak [--minutes 30] [--clients 12] [--seed 0] [--flags "..."]

The bundled model under priority scheduling and a small KV cache (so that requests are preempted), for half of
the time without and half with n-gram speculation. Clients stream, wait, hang up at every stage, ask for
structured outputs, oversized prompts and nonsense, with changing priorities. Now and then they pause: at such
a rest every block must be free, and memory and descriptors are noted. Exit code 1 for a leak, a wrong answer
or a stuck request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from benchmarks.engine.soak_verdict import MIN_RESTS, Rest, judge
from benchmarks.loadgen.own_server import OwnServer, own_server
from servers.command import parse_command

FLAGS = {
    "max_model_len": 2048,
    "num_gpu_blocks_override": 160,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "scheduling_policy": "priority",
    "disable_uvicorn_access_log": True,
}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}
RESTS = 15
"""In each half of the soak, at most; there are fewer where a rest would come sooner than REST_SECONDS."""
REST_SECONDS = 12.0
STUCK_SECONDS = 120.0
"""A request that is not answered for so long, or a server that is not at rest by then, is stuck."""
MAX_FAULTS = 20
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = "[a-z]{3,9}@[a-z]{3,9}[.](com|org)"
CHOICES = ["red", "green", "blue"]


class Clients:
    """Threads that misuse a server until they are told to pause or to stop."""

    def __init__(self, server: OwnServer, count: int, seed: int) -> None:
        self._server = server
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.stuck = 0
        self._go, self._stop = threading.Event(), threading.Event()
        self._lock = threading.Condition()
        self._busy = 0
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed * 1000 + number),), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def resume(self) -> None:
        self._go.set()

    def pause(self) -> None:
        """Start nothing new; returns when everything that was started has ended, or is stuck."""
        self._go.clear()
        with self._lock:
            self._lock.wait_for(lambda: self._busy == 0, STUCK_SECONDS)

    def close(self) -> None:
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join(STUCK_SECONDS)

    def _run(self, chooser: random.Random) -> None:
        names = list(ACTIONS)
        weights = [ACTIONS[name][1] for name in names]
        while self._go.wait() and not self._stop.is_set():
            (name,) = chooser.choices(names, weights)
            with self._lock:
                self._busy += 1
            try:
                fault = ACTIONS[name][0](self._server, chooser)
            except TimeoutError:
                self.stuck += 1
                fault = f"{name}: no answer within {STUCK_SECONDS:.0f} s"
            except Exception as error:
                fault = f"{name}: {type(error).__name__}: {error}"
            with self._lock:
                self._busy -= 1
                self.done[name] += 1
                if fault and len(self.faults) < MAX_FAULTS:
                    self.faults.append(fault)
                self._lock.notify_all()


# ---------------------------------------------------------------- what clients do; each returns its fault


def request(chooser: random.Random, **more: Any) -> dict[str, Any]:
    """A completion of any size; one in four shares its beginning with others, or repeats itself."""
    length = chooser.choice((8, 40, 200, 700))
    tokens = [chooser.randrange(100, 40_000) for _ in range(length)]
    if chooser.random() < 0.25:
        tokens = list(range(1000, 1000 + length // 2)) + tokens[: length // 2]
    if chooser.random() < 0.25:
        tokens = tokens[:20] * (length // 20 + 1)
    body: dict[str, Any] = {
        "prompt": tokens,
        "max_tokens": chooser.choice((1, 8, 40, 120)),
        "temperature": chooser.choice((0.0, 1.0)),
        "priority": chooser.randrange(-2, 3),
        "ignore_eos": chooser.random() < 0.5,
    }
    if chooser.random() < 0.2:
        body |= {"n": 3, "stop": ["e"], "logprobs": 2, "seed": chooser.randrange(9)}
    return {**body, **more}


def whole(server: OwnServer, chooser: random.Random) -> str:
    status, answer = server.post("/v1/completions", request(chooser))
    good = status == 200 and all(choice["finish_reason"] for choice in answer["choices"])
    return "" if good else f"whole: {status} {answer}"


def streamed(server: OwnServer, chooser: random.Random) -> str:
    with contextlib.closing(server.connect(STUCK_SECONDS)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(request(chooser, stream=True)))
        response = connection.getresponse()
        text = response.read().decode()
    good = response.status == 200 and text.endswith("data: [DONE]\n\n") and '"error"' not in text
    return "" if good else f"streamed: {response.status} {text[-300:]}"


def hang_up(server: OwnServer, chooser: random.Random) -> str:
    """Leave before the request is sent, before its answer, or in the middle of it; politely or not."""
    body = json.dumps(request(chooser, max_tokens=400, stream=chooser.random() < 0.7)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    data, stage = head + body, chooser.randrange(3)
    where = server.connect()
    with socket.create_connection((where.host, where.port), timeout=STUCK_SECONDS) as connection:
        connection.sendall(data[: chooser.randrange(1, len(data))] if stage == 0 else data)
        if stage == 2:
            connection.settimeout(chooser.random())
            with contextlib.suppress(TimeoutError):
                connection.recv(4000)
        if chooser.random() < 0.5:  # a reset instead of a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return ""


def structured(server: OwnServer, chooser: random.Random) -> str:
    forms: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"json": SCHEMA, "disable_any_whitespace": True}, _is_person),
        ({"regex": REGEX}, re.compile(REGEX).fullmatch),
        ({"choice": CHOICES}, CHOICES.__contains__),
        ({"json": {"const": (number := chooser.randrange(1000))}}, str(number).__eq__),
    ]
    form, holds = chooser.choice(forms)
    body = request(chooser, max_tokens=60, n=1, stop=None, structured_outputs=form)
    status, answer = server.post("/v1/completions", body)
    if status != 200:
        return f"structured: {status} {answer}"
    choice = answer["choices"][0]
    good = choice["finish_reason"] == "length" or holds(choice["text"])
    return "" if good else f"structured: {form} was answered by {choice['text']!r}"


def _is_person(text: str) -> bool:
    person = json.loads(text)
    return set(person) == {"name", "age"} and isinstance(person["age"], int)


def refused(server: OwnServer, chooser: random.Random) -> str:
    """What must be answered with a 4xx."""
    wrong: dict[str, dict[str, Any]] = {
        "oversized prompt": {"prompt": [5] * 3000},
        "oversized output": {"max_tokens": 5000},
        "wrong schema": {"structured_outputs": {"json": {"type": "nonsense"}}},
        "wrong regex": {"structured_outputs": {"regex": "("}, "stream": True},
        "unknown token": {"prompt": [10_000_000]},
        "empty prompt": {"prompt": []},
        "huge body": {"prompt": "a" * (17 << 20)},
    }
    name = chooser.choice([*wrong] if chooser.random() < 0.1 else [*wrong][:-1])
    status, answer = server.post("/v1/completions", request(chooser, **wrong[name]))
    return "" if status in (400, 413) else f"{name}: {status} {answer}"


ACTIONS: Mapping[str, tuple[Callable[[OwnServer, random.Random], str], float]] = {
    "whole": (whole, 3),
    "streamed": (streamed, 3),
    "hung up": (hang_up, 4),
    "structured": (structured, 3),
    "refused": (refused, 2),
}


# ---------------------------------------------------------------- the soak


def rest(server: OwnServer, started: float) -> Rest:
    """Wait until the server says that nothing runs, and note what it holds."""
    deadline = time.monotonic() + STUCK_SECONDS
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    metrics = server.metrics()
    while any(metrics.get(name, 1) for name in names) and time.monotonic() < deadline:
        time.sleep(0.2)
        metrics = server.metrics()
    _, answer = server.post("/reset_prefix_cache")
    engine, api = (psutil.Process(server.pid(role)) for role in ("EngineCore", "APIServer"))
    return Rest(
        at=time.monotonic() - started,
        kv_usage=metrics.get("vllm:kv_cache_usage_perc", 1.0),
        unfinished=sum(metrics.get(name, 1) for name in names[:2]),
        cache_reset=answer["success"],
        engine_mb=engine.memory_info().rss / 1e6,
        api_mb=api.memory_info().rss / 1e6,
        engine_files=engine.num_fds(),
        api_files=api.num_fds(),
    )


def soak(flags: Mapping[str, Any], seconds: float, clients: int, seed: int) -> list[str]:
    """One server under load for ``seconds``. Prints a row a rest; returns what is wrong."""
    pause_every = max(REST_SECONDS, seconds / RESTS)
    rests: list[Rest] = []
    with own_server(flags) as server:
        crowd = Clients(server, clients, seed)
        started = time.monotonic()
        print("     s  requests  engine MB  files  HTTP MB  files     KV  preempted")
        while time.monotonic() < started + seconds or len(rests) < MIN_RESTS:
            crowd.resume()
            time.sleep(pause_every)
            crowd.pause()
            rests.append(noted := rest(server, started))
            preempted = server.metrics()["vllm:num_preemptions_total"]
            print(
                f"{noted.at:>6.0f}{crowd.done.total():>10}{noted.engine_mb:>11.1f}{noted.engine_files:>7}"
                f"{noted.api_mb:>9.1f}{noted.api_files:>7}{noted.kv_usage:>7.1%}{preempted:>11.0f}",
                flush=True,
            )
        crowd.close()
        if "Traceback" in server.log:
            crowd.faults.append(f"a traceback in the server's log {server.target.log_path}")
    print("requests: " + ", ".join(f"{count} {name}" for name, count in sorted(crowd.done.items())))
    return judge(rests, crowd.faults, crowd.stuck)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long, both halves (default 30)")
    parser.add_argument("--clients", type=int, default=12, help="requests at a time (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do")
    parser.add_argument("--flags", default="", help="more flags for the server")
    options = parser.parse_args()
    flags = {**FLAGS, **parse_command(f"vtune serve bundled {options.flags}").flags}
    problems = []
    for name, more in (
        ("without speculation", {}),
        ("with speculation", {"speculative_config": SPECULATION}),
    ):
        print(f"\n{name}, {options.minutes / 2:g} minutes")
        found = soak({**flags, **more}, 30 * options.minutes, options.clients, options.seed)
        problems += [f"{name}: {problem}" for problem in found]
    print("\n" + ("\n".join(problems) if problems else "no leak, no stuck request, no wrong answer"))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
