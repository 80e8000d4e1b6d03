"""Sampling and rejection kernels in Triton's interpreter against sorting, numpy's Philox, chi-square."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from triton_interpreter import random, rejection, sampling

VOCAB = 300


def make_draws(rows: int, **settings: float) -> sampling.Draws:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), settings.get(name, default), dtype=dtype)

    return sampling.Draws(
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        torch.arange(rows) * 0x1234567890 + 99,
        torch.arange(rows, dtype=torch.int32),
    )


def fits(counts: np.ndarray, probabilities: torch.Tensor) -> bool:
    expected = probabilities.double().numpy()
    return bool(chisquare(counts, counts.sum() * expected / expected.sum()).pvalue > 0.001)


def test_philox_known_answers() -> None:
    """From the authors' kat_vectors file of Random123."""
    zero = np.zeros(1, dtype=np.int64)
    assert hex(int(random._philox(0, [zero] * 4)[0])) == "0x6627e8d5"
    ones = np.full(1, 0xFFFFFFFF, dtype=np.int64)
    assert hex(int(random._philox(0xFFFFFFFFFFFFFFFF, [ones] * 4)[0])) == "0x408f276d"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 5000},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    ],
    ids=str,
)
def test_tokens_equal_sorting(settings: dict[str, float]) -> None:
    torch.manual_seed(1)
    logits, draws = 3 * torch.randn(6, VOCAB), make_draws(6, **settings)
    before = logits.clone()
    assert torch.equal(sampling.sample(logits, draws), sampling.sample_reference(logits, draws))
    assert torch.equal(logits, before)


def test_a_vocabulary_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 128)
    torch.manual_seed(2)
    logits, draws = 2 * torch.randn(2, VOCAB), make_draws(2, top_k=40, top_p=0.9)
    assert torch.equal(sampling.sample(logits, draws), sampling.sample_reference(logits, draws))


def test_masked_and_single_columns() -> None:
    """-inf is never drawn, also where little else is left; a vocabulary of one has one answer."""
    logits = torch.full((4, VOCAB), -torch.inf)
    logits[:, 7], logits[:, 9] = 1.0, 0.0
    for settings in ({}, {"top_k": 5}, {"top_p": 0.9999}, {"min_p": 1e-9}):
        assert set(sampling.sample(logits, make_draws(4, **settings)).tolist()) <= {7, 9}
    assert sampling.sample(torch.zeros(2, 1), make_draws(2)).tolist() == [0, 0]
    assert sampling.sample(torch.zeros(0, 5), make_draws(0)).tolist() == []


def test_a_row_s_token_does_not_depend_on_the_others() -> None:
    torch.manual_seed(3)
    logits, draws = torch.randn(8, VOCAB), make_draws(8)
    whole = sampling.sample(logits, draws)
    part = sampling.Draws(*(getattr(draws, name)[5:7] for name in vars(draws)))
    assert torch.equal(sampling.sample(logits[5:7], part), whole[5:7])


def test_draws_follow_the_distribution() -> None:
    """By the reference, which the kernel equals; 4,000 draws of 20 columns."""
    probabilities = torch.tensor([2.0 ** -(i / 3) for i in range(20)])
    probabilities /= probabilities.sum()
    seeds = range(4000)
    race = torch.stack([random.exponential_reference(s, np.arange(20), 3, random.TOKEN) for s in seeds])
    counts = (probabilities.log() - race.log()).argmax(-1).bincount(minlength=20)
    assert fits(counts.numpy(), probabilities)


def make_drafts(
    requests: int, length: int, with_q: bool, greedy: int = 0
) -> tuple[torch.Tensor, rejection.Drafts]:
    """Requests with 0 to ``length`` drafts from q, where q and p are alike, so that some are accepted."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(requests) % (length + 1)
    start = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    total = int(start[-1])
    logits = torch.randn(total, 40, generator=generator)
    target = logits.softmax(-1)
    probs = (logits + torch.randn(total, 40, generator=generator)).softmax(-1)
    tokens = (probs if with_q else target).multinomial(1, generator=generator).squeeze(-1)
    if greedy:
        target = torch.nn.functional.one_hot(target.argmax(-1), 40).float()
        tokens[::2] = target.argmax(-1)[::2]
    return target, rejection.Drafts(
        tokens.int(),
        start.int(),
        torch.full((requests,), greedy, dtype=torch.int32),
        torch.arange(requests, dtype=torch.int32) + 1000,
        torch.arange(requests) + (1 << 40),
        torch.arange(requests, dtype=torch.int32),
        probs if with_q else None,
    )


@pytest.mark.parametrize("greedy", [0, 1])
@pytest.mark.parametrize("with_q", [False, True])
def test_rejection_equals_the_reference(with_q: bool, greedy: int) -> None:
    target, drafts = make_drafts(24, 4, with_q, greedy)
    tokens, counts = rejection.reject(target, drafts, 4)
    emitted = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    assert emitted == rejection.reject_reference(target, drafts)
    assert all(
        row[count:] == [-1] * (5 - count) for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)
    )
    accepted = sum(count - 1 for count in counts.tolist())
    assert 0 < accepted < len(drafts.tokens)  # the test sees both outcomes
    if greedy:
        best = target.argmax(-1).tolist()
        for request, row in enumerate(emitted):
            first = int(drafts.start[request])
            bonus = [1000 + request] if len(row) > int(drafts.start[request + 1]) - first else []
            assert row == best[first : first + len(row) - len(bonus)] + bonus


@pytest.mark.parametrize("with_q", [False, True])
def test_rejection_loses_nothing(with_q: bool) -> None:
    """The first token emitted after a draft from q is distributed as p: chi-square over 3,000 requests."""
    requests, vocab = 3000, 12
    generator = torch.Generator().manual_seed(5)
    p, q = torch.randn(2, vocab, generator=generator).softmax(-1)
    tokens = q.expand(requests, -1).multinomial(1, generator=generator).squeeze(-1)
    if not with_q:
        tokens[:] = int(p.argmax())
    ones = torch.zeros(requests, dtype=torch.int32)
    drafts = rejection.Drafts(
        tokens.int(), torch.arange(requests + 1).int(), ones, ones - 1, torch.arange(requests), ones,
        q.expand(requests, -1) if with_q else None,
    )  # fmt: skip
    emitted = rejection.reject_reference(p.expand(requests, -1), drafts)
    counts = np.bincount([row[0] for row in emitted], minlength=vocab)
    assert fits(counts, p)
