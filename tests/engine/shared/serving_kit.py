"""A tiny model on disk, a runner that computes nothing, and servers started as a user would start them."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.step import StepPlan, StepResult, TokenLogprobs

VTUNE = str(Path(sys.executable).with_name("vtune"))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START_SECONDS = 240
PATIENCE_SECONDS = 120
"""Of a machine that is busy with other things."""
HTTP = httpx.Client(
    timeout=PATIENCE_SECONDS,
    trust_env=False,
    verify=False,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)
"""One for all, as it takes a while to make; every request has a connection of its own."""


def make_model(directory: Path, **overrides: Any) -> Path:
    """A Llama of a few thousand parameters whose tokens are the ASCII characters (id = code point)."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128 + len(SPECIAL),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
        **overrides,
    }
    (directory / "config.json").write_text(json.dumps(config))
    letters = bytes_to_letters()
    vocabulary = {letters[code]: code for code in range(128)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return directory


def bytes_to_letters() -> dict[int, str]:
    """How byte-level BPE writes the bytes 0..255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [code for code in range(256) if code not in plain]
    return {code: chr(code) for code in plain} | {code: chr(256 + i) for i, code in enumerate(others)}


class HashRunner:
    """Chooses every token by a hash of what came before it; position decides, so batching cannot matter."""

    weights_bytes = 1 << 20
    kv_bytes_per_token = 1 << 10
    max_model_len = 512

    def __init__(self, vocab_size: int = 1000, logprobs: bool = False) -> None:
        self._vocab_size, self._logprobs = vocab_size, logprobs

    def profile_activation(self) -> int:
        return 1 << 20

    def allocate(self, num_blocks: int) -> None:
        pass

    def allocate_host(self, num_blocks: int) -> None:
        raise NotImplementedError("these tests do not swap")

    def execute(self, plan: StepPlan) -> StepResult:
        chosen = {
            item.request.request_id: [hash_token(item.request.token_ids, self._vocab_size)]
            for item in plan.scheduled
            if item.emits
        }
        logprobs = {request_id: [TokenLogprobs(tokens[0], -0.5, 1)] for request_id, tokens in chosen.items()}
        return StepResult(chosen, logprobs=logprobs if self._logprobs else {})


def hash_token(token_ids: list[int], vocab_size: int) -> int:
    digest = hashlib.sha256(str(token_ids).encode()).digest()
    return int.from_bytes(digest[:4], "big") % vocab_size


class Server:
    """A running ``vtune serve``."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log_path = process, log
        self.url = self._wait_for_url()

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def engine_pid(self) -> int:
        match = re.search(r"\(EngineCore pid=(\d+)\)", self.log)
        assert match, self.log
        return int(match[1])

    def stop(self, signum: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(PATIENCE_SECONDS)

    def metrics(self) -> dict[str, float]:
        """Samples without their common labels: ``name{other="label"}`` -> value."""
        from prometheus_client.parser import text_string_to_metric_families

        text = HTTP.get(f"{self.url}/metrics").text
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                suffix = "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else ""
                samples[sample.name + suffix] = sample.value
        return samples

    def wait_for(self, holds: Any, what: str) -> None:
        try:
            wait_until(lambda: holds(self.metrics()), what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.metrics()}\n{self.log}") from None

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            match = re.search(r"Starting vtune server on (http://[\d.:]+)", self.log)
            if match and _healthy(match[1]):
                return match[1]
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"the server did not start:\n{self.log}")


def _healthy(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def serving(model: Path, log: Path, *flags: str, load_format: str = "dummy") -> Iterator[Server]:
    """``vtune serve MODEL --load-format dummy`` on a free port; its log goes to the file ``log``."""
    command = [VTUNE, "serve", str(model), "--port", "0", "--load-format", load_format]
    command += ["--device-memory", "256MiB", "--max-num-batched-tokens", "256", "--max-num-seqs", "16"]
    command += flags
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)
    try:
        yield Server(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(holds: Any, what: str, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {what}"
        time.sleep(0.02)


def process_alive(pid: int) -> bool:
    """Is ``pid`` running (a zombie is not)?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
