"""What int8 linear layers cost in exactness and bring in speed and memory, beside bfloat16.

    python -m benchmarks.engine.quantization [--quick] [--text FILE] [--model DIR]

perplexity   of a text (the help on topics of this Python, pydoc_data, windows of 1,024 tokens),
             teacher-forced in chunks of 64 tokens
KL           mean divergence of the next-token distributions from bfloat16's, in nats
top-1        share of positions whose most likely token is the same
weights      resident bytes of all weights, as the memory plan counts them
tokens/s     of 1 and of 16 requests of 256 + 64 tokens, greedy, in one process; alternating, the best of each
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from benchmarks.engine.teacher_forced import TeacherForced
from engine.llm import LLM
from engine.models.bundled import fetch_bundled
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer

WINDOW = 1024
METHODS = (None, "int8_per_channel")


@dataclass(frozen=True)
class Exactness:
    perplexity: float
    divergence: float
    agreement: float


def standard_text() -> str:
    """The help on Python's topics, which comes with every Python: prose about a language."""
    return "\n".join(topics[name] for name in sorted(topics))


def exactness(model: Path, windows: Sequence[Sequence[int]]) -> list[Exactness]:
    """Of bfloat16, then of int8."""
    scorers = [TeacherForced(model, int8=method is not None, length=WINDOW) for method in METHODS]
    surprise, divergence, agreement, count = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0
    for window in windows:
        start = 0
        for rows in zip(*(scorer.log_probabilities(window) for scorer in scorers), strict=True):
            known = min(len(rows[0]), len(window) - 1 - start)  # the last token's next one is not there
            wanted = torch.tensor(window[start + 1 : start + 1 + known])[:, None]
            exact = rows[0][:known]
            for i, row in enumerate(row[:known] for row in rows):
                surprise[i] -= float(row.gather(1, wanted).sum())
                divergence[i] += float((exact.exp() * (exact - row)).sum())
                agreement[i] += float((exact.argmax(-1) == row.argmax(-1)).sum())
            start += len(rows[0])
            count += known
    return [
        Exactness(float(torch.tensor(a / count).exp()), b / count, c / count)
        for a, b, c in zip(surprise, divergence, agreement, strict=True)
    ]


def speed(llm: LLM, prompts: list[list[int]], out: int) -> float:
    """Output tokens per second."""
    sampling = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, sampling)
    return len(prompts) * out / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one window of text, one round")
    parser.add_argument("--text", type=Path, help="another text")
    parser.add_argument("--model", type=Path, help="a checkpoint directory; the bundled model by default")
    given = parser.parse_args()
    model = given.model or fetch_bundled()
    text = given.text.read_text(encoding="utf-8") if given.text else standard_text()[:100_000]
    token_ids = Tokenizer.load(model).encode(text)
    windows = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - WINDOW + 1, WINDOW)]
    windows = windows[: 1 if given.quick else 8]
    found = exactness(model, windows)
    flags: dict[str, Any] = {"max_model_len": WINDOW, "enable_prefix_caching": False}
    engines = [LLM(str(model), quantization=method, **flags) for method in METHODS]
    best = [{1: 0.0, 16: 0.0} for _ in METHODS]
    for _ in range(1 if given.quick else 3):
        for concurrency in (1, 16):
            prompts = [token_ids[300 * i : 300 * i + 256] for i in range(concurrency)]
            for llm, values in zip(engines, best, strict=True):
                values[concurrency] = max(values[concurrency], speed(llm, prompts, 64))
    print(
        f"{'':<18}{'perplexity':>18}{'KL':>9}{'top-1':>8}{'weights':>10}{'1 request':>12}{'16 requests':>13}"
    )
    for method, row, llm, values in zip(METHODS, found, engines, best, strict=True):
        weights = llm.core.memory_plan.weights_bytes
        change = 100 * (row.perplexity / found[0].perplexity - 1)
        print(
            f"{method or 'bfloat16':<18}{row.perplexity:>10.3f} {change:>+6.2f}%{row.divergence:>9.4f}"
            f"{100 * row.agreement:>7.1f}%{weights / 1e6:>7.0f} MB{values[1]:>12.1f}{values[16]:>13.1f}"
        )
    print(f"{sum(map(len, windows)):,} tokens of text; the last columns in tokens/s")


if __name__ == "__main__":
    main()
