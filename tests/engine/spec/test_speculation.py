"""n-gram proposals against brute force; verification against the distribution that it must keep."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from engine.sampling.rejection import accept
from engine.spec.ngram import NgramProposer
from engine.speculative_config import SpeculativeConfig


def proposer(k: int, low: int, high: int, max_model_len: int = 1000) -> NgramProposer:
    config = SpeculativeConfig(num_speculative_tokens=k, prompt_lookup_min=low, prompt_lookup_max=high)
    return NgramProposer(config, max_model_len)


def by_brute_force(tokens: list[int], k: int, low: int, high: int) -> list[int]:
    for length in range(high, low - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length : start + length + k]
    return []


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [9, 1, 2]),  # of equal matches the first
        ([5, 1, 2, 7, 3, 1, 2, 8, 3, 1, 2], [8, 3, 1]),  # a longer match beats an earlier one
        ([1, 2, 3, 4, 5], []),
        ([7, 7], []),
        ([7, 7, 7], [7]),  # occurrences may overlap
        ([1, 2, 1, 2], [1, 2]),
        ([1], []),
        ([], []),
    ],
)
def test_ngram_examples(tokens: list[int], expected: list[int]) -> None:
    assert proposer(3, 2, 4).draft(np.array(tokens, dtype=np.int32)) == expected


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    k=st.integers(1, 5),
    low=st.integers(1, 4),
    extra=st.integers(0, 3),
)
def test_ngram_equals_brute_force(tokens: list[int], k: int, low: int, extra: int) -> None:
    assert proposer(k, low, low + extra).draft(np.array(tokens, dtype=np.int32)) == by_brute_force(
        tokens, k, low, low + extra
    )


def test_ngram_stays_within_max_model_len() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2]
    assert proposer(4, 2, 3, max_model_len=9).draft(np.array(tokens, dtype=np.int32)) == [3, 4]
    assert proposer(4, 2, 3, max_model_len=7).draft(np.array(tokens, dtype=np.int32)) == []


@pytest.mark.parametrize(
    ("drafts", "sampled", "emitted"),
    [
        ((), [4], [4]),
        ((4, 5), [4, 5, 6], [4, 5, 6]),
        ((4, 5), [4, 7, 6], [4, 7]),
        ((4, 5), [3, 5, 6], [3]),
    ],
)
def test_accepts_up_to_the_first_difference(
    drafts: tuple[int, ...], sampled: list[int], emitted: list[int]
) -> None:
    assert accept(drafts, sampled) == emitted


def test_verification_keeps_the_model_s_distribution() -> None:
    """Pairs of tokens drawn with any draft are distributed as without: p(first) * p(second | first)."""
    random = np.random.default_rng(0)
    first = np.array([0.5, 0.3, 0.2])
    second = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])
    trials = 20_000
    for draft in range(3):
        pairs: Counter[tuple[int, int]] = Counter()
        for _ in range(trials):
            after_draft = int(random.choice(3, p=second[draft]))
            emitted = accept((draft,), [int(random.choice(3, p=first)), after_draft])
            if len(emitted) == 1:  # rejected: the next step draws the second token
                emitted.append(int(random.choice(3, p=second[emitted[0]])))
            pairs[emitted[0], emitted[1]] += 1
        expected = [first[a] * second[a, b] * trials for a in range(3) for b in range(3)]
        assert chisquare([pairs[a, b] for a in range(3) for b in range(3)], expected).pvalue > 1e-3
