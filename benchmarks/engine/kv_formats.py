"""What storing keys and values in a byte a number costs and brings: exactness, room, speed.

    python -m benchmarks.engine.kv_formats [--quick] [--text FILE] [--model DIR]

perplexity   of a text (README.md and ARCHITECTURE.md of the checkout, 4,096 tokens in windows of 1,024),
             teacher-forced in chunks of 64 tokens, which see what came before through the cache
KL           mean divergence of the next-token distributions from those with an unquantised cache, in nats
top-1        share of positions whose most likely token is the same
tokens       that the memory plan finds room for, with the same device memory
decode       tokens/s of 16 sequences of 256 + 32 tokens, greedy, all in one run
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from benchmarks.engine.teacher_forced import TeacherForced
from engine.config import KVCacheDtype
from engine.llm import LLM
from engine.models.bundled import fetch_bundled
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer

FORMATS = tuple(name for name in get_args(KVCacheDtype) if name not in ("bfloat16", "fp8"))
ROOT = Path(__file__).parents[2]
WINDOW = 1024


@dataclass(frozen=True)
class Exactness:
    perplexity: float
    divergence: float
    agreement: float
    kv_bytes: int


def exactness(model: Path, windows: Sequence[Sequence[int]]) -> dict[str, Exactness]:
    scorers = {name: TeacherForced(model, kv_cache_dtype=name, length=WINDOW) for name in FORMATS}
    surprise, divergence, agreement = (dict.fromkeys(FORMATS, 0.0) for _ in range(3))
    count = 0
    for window in windows:
        targets = torch.tensor([*window[1:], window[0]])
        chunks = zip(*(scorer.log_probabilities(window) for scorer in scorers.values()), strict=True)
        start = 0
        for rows in chunks:
            exact = rows[0]
            # The last row of a window predicts a token that is not there.
            known = min(len(exact), len(window) - 1 - start)
            wanted = targets[start : start + known, None]
            for name, row in zip(FORMATS, rows, strict=True):
                surprise[name] -= float(row[:known].gather(1, wanted).sum())
                difference = exact[:known].exp() * (exact[:known] - row[:known])
                divergence[name] += float(difference.sum())
                agreement[name] += float((exact[:known].argmax(-1) == row[:known].argmax(-1)).sum())
            start += len(exact)
            count += known
    return {
        name: Exactness(
            float(torch.tensor(surprise[name] / count).exp()),
            divergence[name] / count,
            agreement[name] / count,
            scorers[name].kv_bytes_per_token,
        )
        for name in FORMATS
    }


def room_and_speed(model: Path, name: str, prompts: list[list[int]], out: int) -> tuple[int, float]:
    """Tokens of KV that fit, and tokens decoded a second."""
    llm = LLM(str(model), kv_cache_dtype=name, max_num_seqs=len(prompts), max_model_len=WINDOW)
    sampling = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
    stamps: list[float] = []
    llm.generate(prompts, sampling, observe=lambda plan, output: stamps.append(time.perf_counter()))
    steps = out - 1  # the last ones, which only decode
    return llm.core.memory_plan.num_tokens, len(prompts) * steps / (stamps[-1] - stamps[-1 - steps])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of the text, 8 tokens decoded")
    parser.add_argument("--text", type=Path, help="another text")
    parser.add_argument("--model", type=Path, help="a checkpoint directory; the bundled model by default")
    given = parser.parse_args()
    model = given.model or fetch_bundled()
    files = [given.text] if given.text else [ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    token_ids = Tokenizer.load(model).encode("\n".join(file.read_text(encoding="utf-8") for file in files))
    windows = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - WINDOW + 1, WINDOW)]
    windows = windows[: 1 if given.quick else 4]
    found = exactness(model, windows)
    prompts = [token_ids[100 * i : 100 * i + 256] for i in range(16)]
    print(
        f"{'kv_cache_dtype':<20} {'B/token':>8} {'tokens':>8} {'perplexity':>14} {'KL':>8} {'top-1':>7} "
        f"{'decode':>9}"
    )
    for name, row in found.items():
        tokens, speed = room_and_speed(model, name, prompts, 8 if given.quick else 32)
        if name == "auto":
            exact, first_tokens, first_speed = row, tokens, speed
        print(
            f"{name:<20} {row.kv_bytes:>8,} {tokens / first_tokens:>7.2f}x "
            f"{row.perplexity:>7.3f}{100 * (row.perplexity / exact.perplexity - 1):>+6.2f}% "
            f"{row.divergence:>8.4f} {100 * row.agreement:>6.1f}% {speed / first_speed:>8.2f}x",
            flush=True,
        )
    print(f"{sum(map(len, windows)):,} tokens of text; auto decodes {first_speed:,.0f} tokens/s")


if __name__ == "__main__":
    main()
