"""The oracle of the model tests: transformers, teacher-forced, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

TIE = 1e-4
"""Two logits closer than this may come out in either order."""


class Reference:
    """A checkpoint as transformers computes it."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        return self.model(torch.tensor([list(token_ids)])).logits[0]

    def check_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Assert that greedy decoding of ``prompt`` gives ``output``.

        One forward over both is enough: if every token is the argmax after those before it, then decoding
        step by step chooses the same tokens.
        """
        rows = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        for place, (row, token) in enumerate(zip(rows, output, strict=True)):
            best = row.max()
            assert best - row[token] < TIE, (
                f"output token {place} is {token} ({row[token]:.5f}), "
                f"transformers has {int(row.argmax())} ({best:.5f})"
            )
