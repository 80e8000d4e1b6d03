"""How load generators are told to make a load, and where they write what they measured."""

from __future__ import annotations

import argparse
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.loadgen.mock_llm import MODEL
from loadgen.measure.record import Records
from loadgen.measure.stats import Summary
from loadgen.wire.driver import drive
from loadgen.wire.http1 import build_request, decode
from loadgen.wire.messages import Endpoint, Exchange, WirePlan, WireRequest
from loadgen.wire.sse import events

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Load:
    """``requests`` of ``tokens`` each, either ``concurrency`` at a time or ``rate`` a second."""

    requests: int
    tokens: int
    concurrency: int | None = None
    rate: float | None = None
    arrival: str = "constant"
    burstiness: float = 1.0


class Tool(ABC):
    """A load generator in the environment ``venv``. ``fine``: exit codes that are no failure."""

    name: ClassVar[str]
    arrivals: ClassVar[tuple[str, ...]] = ("constant", "poisson", "gamma")
    fine: ClassVar[tuple[int, ...]] = (0,)
    environment: ClassVar[Mapping[str, str]] = {}
    stamps: ClassVar[str] = "tokens"
    """What it gives a time of."""

    def __init__(self, venv: Path, tokenizer: Path) -> None:
        self.bin, self.tokenizer = venv.resolve() / "bin", str(tokenizer.resolve())

    @abstractmethod
    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        """What to run. It writes into ``folder``."""

    def stamps_command(self, url: str, load: Load, folder: Path) -> list[str]:
        """The same, where another command is needed to get at its times."""
        return self.command(url, load, folder)

    @abstractmethod
    def stamp_errors(self, folder: Path) -> list[float]:
        """Its time of a token less the server's, seconds."""

    @abstractmethod
    def p99_ttft(self, folder: Path) -> float:
        """Seconds."""

    def loop_cpu(self, folder: Path) -> float | None:
        """CPU seconds while the load ran, where the tool tells them apart from what follows."""
        return None


class Vtune(Tool):
    """This package."""

    name = "vtune"
    fine = (0, 3)  # 3: it does not believe its own measurement, e.g. on a busy machine

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        words = [
            str(self.bin / "vtune"),
            "bench",
            "run",
            "--url",
            url,
            "--warmup",
            "0",
            "--workload",
            "random",
        ]
        words += ["--num-requests", str(load.requests), "--input-len", "8", "--output-len", str(load.tokens)]
        if load.rate is None:
            words += ["--concurrency", str(load.concurrency)]
        else:
            words += ["--rate", str(load.rate), "--arrival", load.arrival]
        if load.arrival == "gamma":
            words += ["--burstiness", str(load.burstiness)]
        return [*words, "--json", str(folder / "records.json")]

    def stamps_command(self, url: str, load: Load, folder: Path) -> list[str]:
        """Its client with the raw bytes kept: records have no text, and times relative to their start."""
        words = [
            sys.executable,
            "-m",
            "benchmarks.peers.rival_tools",
            url,
            str(load.requests),
            str(load.tokens),
        ]
        return [*words, str(folder / "errors.json")]

    def stamp_errors(self, folder: Path) -> list[float]:
        return list(json.loads((folder / "errors.json").read_text()))

    def p99_ttft(self, folder: Path) -> float:
        return Summary(Records.load(folder / "records.json")).value("ttft_p99")

    def loop_cpu(self, folder: Path) -> float:
        return Records.load(folder / "records.json").client.cpu


class VllmBench(Tool):
    """``vllm bench serve``."""

    name = "vllm"
    environment: ClassVar[Mapping[str, str]] = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        words = [str(self.bin / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url]
        words += ["--model", MODEL, "--tokenizer", self.tokenizer, "--ready-check-timeout-sec", "0"]
        words += ["--dataset-name", "random", "--random-input-len", "8", "--ignore-eos", "--disable-tqdm"]
        words += ["--random-output-len", str(load.tokens), "--num-prompts", str(load.requests)]
        if load.concurrency is not None:
            words += ["--max-concurrency", str(load.concurrency)]
        if load.rate is not None:
            # It has gamma arrivals only; with a burstiness of a million they are even.
            shape = {"constant": 1e6, "poisson": 1.0, "gamma": load.burstiness}[load.arrival]
            words += ["--request-rate", str(load.rate), "--burstiness", str(shape)]
        words += ["--save-result", "--save-detailed", "--percentile-metrics", "ttft"]
        return [*words, "--result-dir", str(folder), "--result-filename", "result.json"]

    def stamp_errors(self, folder: Path) -> list[float]:
        """Its clock is ``perf_counter``, on Linux the monotonic one."""
        result = self._result(folder)
        errors = []
        for start, ttft, gaps, text in zip(
            *(result[key] for key in ("start_times", "ttfts", "itls", "generated_texts")), strict=True
        ):
            stamps = start + np.cumsum([ttft, *gaps])
            errors += list(stamps - np.array(text.split(), dtype=float) / 1e9)
        return errors

    def p99_ttft(self, folder: Path) -> float:
        return float(self._result(folder)["p99_ttft_ms"]) / 1e3

    def _result(self, folder: Path) -> Any:
        return json.loads((folder / "result.json").read_text())


class GuideLlm(Tool):
    """GuideLLM 0.8, with one worker process. It keeps the times of the first and the last token only."""

    name = "guidellm"
    arrivals = ("constant", "poisson")
    stamps = "first and last tokens"
    environment: ClassVar[Mapping[str, str]] = {
        "HF_HUB_OFFLINE": "1",
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
        "GUIDELLM__MAX_CONCURRENCY": "4096",
    }

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        profile = f"kind={load.arrival},rate={load.rate}"
        if load.rate is None:
            profile = f"kind=concurrent,streams={load.concurrency}"
        backend = f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions"
        data = f"kind=synthetic_text,prompt_tokens=8,output_tokens={load.tokens}"
        words = [str(self.bin / "guidellm"), "run", "--backend", backend, "--profile", profile]
        words += ["--constraint", f"kind=max_requests,count={load.requests}", "--data", data]
        words += ["--tokenizer", f"kind=huggingface_auto,model={self.tokenizer}", "--disable-console"]
        return [*words, "--output", f"kind=json,path={folder / 'result.json'}"]

    def stamp_errors(self, folder: Path) -> list[float]:
        """Its clock is the wall's; both are read here to bring them together."""
        wall = time.time() - time.monotonic()
        errors = []
        for request in self._result(folder)["requests"]["successful"]:
            sent = [int(word) / 1e9 for word in request["output"].split()]
            timings = request["info"]["timings"]
            errors.append(timings["first_token_iteration"] - wall - sent[0])
            errors.append(timings["last_token_iteration"] - wall - sent[-1])
        return errors

    def p99_ttft(self, folder: Path) -> float:
        ttft = self._result(folder)["metrics"]["time_to_first_token_ms"]
        return float(ttft["successful"]["percentiles"]["p99"]) / 1e3

    def _result(self, folder: Path) -> Any:
        return json.loads((folder / "result.json").read_text())["benchmarks"][0]


class AiPerf(Tool):
    """AIPerf 0.13, with one worker process and one that processes records."""

    name = "aiperf"

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        words = [str(self.bin / "aiperf"), "profile", "--model", MODEL, "--url", url, "--streaming"]
        words += ["--endpoint-type", "completions", "--tokenizer", self.tokenizer, "--ui", "none"]
        words += ["--request-count", str(load.requests), "--isl", "8", "--osl", str(load.tokens)]
        words += ["--use-server-token-count", "--use-legacy-max-tokens", "--export-level", "raw"]
        words += ["--workers-max", "1", "--record-processor-service-count", "1"]
        if load.concurrency is not None:
            words += ["--concurrency", str(load.concurrency)]
        if load.rate is not None:
            words += ["--request-rate", str(load.rate), "--arrival-pattern", load.arrival]
        if load.arrival == "gamma":
            words += ["--arrival-smoothness", str(load.burstiness)]
        return [*words, "--artifact-dir", str(folder)]

    def stamp_errors(self, folder: Path) -> list[float]:
        errors = []
        for line in (folder / "profile_export_raw.jsonl").read_text().splitlines():
            for response in json.loads(line)["responses"]:
                for packet in response["packets"]:
                    body = {} if packet["value"] == "[DONE]" else json.loads(packet["value"])
                    sent = [int(choice["text"]) for choice in body.get("choices", ())]
                    errors += [(response["perf_ns"] - at) / 1e9 for at in sent]
        return errors

    def p99_ttft(self, folder: Path) -> float:
        result = json.loads((folder / "profile_export_aiperf.json").read_text())
        return float(result["time_to_first_token"]["p99"]) / 1e3


TOOLS: dict[str, type[Tool]] = {tool.name: tool for tool in (Vtune, VllmBench, GuideLlm, AiPerf)}


@dataclass(frozen=True)
class Streams:
    """``requests`` of ``tokens`` each, their starts ``spacing_ns`` apart."""

    requests: int
    tokens: int
    spacing_ns: int


@dataclass(frozen=True)
class Token:
    """When its request was due, when the mock wrote it and when the client stamped it. Seconds."""

    intended: float
    written: float
    at: float


def stamped(url: str, load: Streams) -> list[list[Token]]:
    """The tokens of each stream, by the client of this package."""
    host, _, port = url.removeprefix("http://").partition(":")
    payload = build_request("/v1/completions", host, json.dumps({"max_tokens": load.tokens}).encode(), {})
    plan = WirePlan(
        endpoint=Endpoint(host, int(port)),
        requests=tuple(WireRequest(i, i * load.spacing_ns, payload) for i in range(load.requests)),
        closed=False,
        concurrency=None,
        duration_ns=None,
        timeout_ns=600 * SECOND,
        connect_timeout_ns=10 * SECOND,
        drain_ns=600 * SECOND,
    )
    return [_tokens(exchange) for exchange in drive(plan).exchanges]


def _tokens(exchange: Exchange) -> list[Token]:
    found = []
    response = decode(exchange.parts, exchange.stamps)
    for data, at_ns in events(response.parts, response.stamps):
        choices = [] if data == b"[DONE]" else json.loads(data)["choices"]
        times = [(exchange.intended_ns, int(choice["text"]), at_ns) for choice in choices]
        found += [Token(*(time / 1e9 for time in each)) for each in times]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stamp tokens with the client of this package.")
    for word, kind in (("url", str), ("requests", int), ("tokens", int), ("out", Path)):
        parser.add_argument(word, type=kind)
    given = parser.parse_args()
    found = stamped(given.url, Streams(given.requests, given.tokens, 20_000_000 // given.requests))
    given.out.write_text(json.dumps([token.at - token.written for stream in found for token in stream]))
