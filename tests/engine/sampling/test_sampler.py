"""The sampler against plain definitions: which tokens may be drawn, how often, and what is reported."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from sampling_definition import kept_by_definition
from scipy.stats import chisquare

from engine.request import Request, SamplingParams
from engine.sampling.sampler import ROWS_AT_ONCE, TOP_P_CANDIDATES, Sampler, SampleRow, seeded_uniform

VOCAB = 200


def row(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> SampleRow:
    request = Request("r", prompt or [1], SamplingParams(**params), eos_token_ids=(0,))
    request.token_ids += output or []
    return SampleRow(request)


def logits(seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw(values: torch.Tensor, count: int, seed: int = 0, **params: Any) -> Counter[int]:
    """``count`` draws from one row of logits."""
    sampler, drawn = Sampler(seed), Counter[int]()
    for start in range(0, count, 500):
        rows = [row(**params)] * min(500, count - start)
        drawn.update(sampler.sample(values.expand(len(rows), -1).clone(), rows)[0])
    return drawn


@pytest.mark.parametrize("vocab", [64, 200, 3000])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": -1, "top_p": 0.8},
        {"top_p": 0.5, "temperature": 1.5},
        {"top_p": 1e-9},
        {"top_k": 20, "top_p": 0.6},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_k": 10, "top_p": 0.9, "temperature": 1.2},
    ],
)
def test_draws_follow_the_definition(params: dict[str, Any], vocab: int) -> None:
    values = logits(3, vocab=vocab)[0]
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    expected = kept_by_definition(values.double(), **settings)
    count = 4000
    drawn = draw(values, count, **params)
    assert set(drawn) <= set(expected.nonzero().flatten().tolist())
    likely = [token for token in range(vocab) if expected[token] * count >= 5]
    seen = [drawn[token] for token in likely]
    want = [float(expected[token]) * count for token in likely]
    if (rest := count - sum(want)) >= 5:
        seen.append(count - sum(seen))
        want.append(rest)
    if len(seen) > 1:
        scale = sum(seen) / sum(want)
        assert chisquare(seen, [value * scale for value in want]).pvalue > 1e-4


def test_a_flat_distribution_is_sorted_as_a_whole() -> None:
    """top-p keeps more than the candidates here: none of the kept tokens may be lost."""
    values = torch.linspace(0.0, 0.01, 64 * (TOP_P_CANDIDATES + 64))
    drawn = draw(values, 500, top_p=0.99)
    kept = kept_by_definition(values.double(), 1.0, 0, 0.99, 0.0)
    assert set(drawn) <= set(kept.nonzero().flatten().tolist())
    assert len(drawn) > 450


def test_only_the_rows_own_parameters_count() -> None:
    values = logits(1, rows=4)
    best = values.argmax(-1).tolist()
    rows = [row(temperature=0.0), row(top_k=1), row(top_p=1e-6), row(temperature=1e-6)]
    assert Sampler().sample(values, rows)[0] == best


def test_more_rows_than_are_drawn_at_once() -> None:
    count = 2 * ROWS_AT_ONCE + 3
    values = torch.full((count, VOCAB), -100.0)
    values[torch.arange(count), torch.arange(count)] = 100.0
    given: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"temperature": 0.0})
    for params in given:
        assert Sampler().sample(values.clone(), [row(**params)] * count)[0] == list(range(count))


def test_masked_tokens_are_never_drawn() -> None:
    values = torch.full((1, VOCAB), -torch.inf)
    values[0, [5, VOCAB - 1]] = 0.0
    assert set(draw(values[0], 300)) == {5, VOCAB - 1}
    assert set(draw(values[0], 300, top_k=10, top_p=0.99)) == {5, VOCAB - 1}


def test_a_seed_fixes_the_draw_whatever_the_batch() -> None:
    values = logits(2, rows=3)
    alone = Sampler(1).sample(values[1:2].clone(), [row(seed=42)])[0][0]
    batched = Sampler(2).sample(values.clone(), [row(), row(seed=42), row(seed=1)])[0][1]
    assert alone == batched
    later = row(seed=42, output=[9])
    draws = {Sampler().sample(values[1:2].clone(), [row(seed=seed)])[0][0] for seed in range(50)}
    assert len(draws) > 5
    assert later.position == 1
    assert seeded_uniform(42, 0) != seeded_uniform(42, 1)


def test_seeded_uniforms_are_uniform() -> None:
    values = [seeded_uniform(seed, place) for seed in range(60) for place in range(60)]
    counts, _ = torch.histogram(torch.tensor(values), bins=20, range=(0.0, 1.0))
    assert chisquare(counts.tolist()).pvalue > 1e-3
    assert 0.0 <= min(values) <= max(values) < 1.0


def test_engine_seed_makes_unseeded_requests_repeatable() -> None:
    values = logits(2, rows=8)
    first, again, other = (Sampler(seed).sample(values.clone(), [row()] * 8)[0] for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_repetition_penalty_counts_prompt_and_output() -> None:
    values = torch.tensor([[2.0, 1.9, -1.0, 0.5]])
    request = row(prompt=[0], output=[2], temperature=0.0, repetition_penalty=2.0)
    assert Sampler().sample(values, [request])[0] == [1]
    torch.testing.assert_close(values, torch.tensor([[1.0, 1.9, -2.0, 0.5]]))


def test_presence_and_frequency_penalties_count_output_only() -> None:
    values = torch.zeros(1, 5)
    request = row(prompt=[0, 0], output=[1, 1, 2], presence_penalty=0.5, frequency_penalty=0.25)
    Sampler().sample(values, [request])
    torch.testing.assert_close(values, torch.tensor([[0.0, -1.0, -0.75, 0.0, 0.0]]))


def test_drafts_before_a_position_count_as_output() -> None:
    values = torch.zeros(2, 5)
    request = row(temperature=0.0, frequency_penalty=1.0).request
    Sampler().sample(values, [SampleRow(request), SampleRow(request, (3,))])
    torch.testing.assert_close(values, torch.tensor([[0.0] * 5, [0.0, 0.0, 0.0, -1.0, 0.0]]))


@pytest.mark.parametrize(("emitted", "chosen"), [(0, 3), (1, 3), (2, 0)])
def test_min_tokens_masks_eos_and_stop_ids(emitted: int, chosen: int) -> None:
    values = torch.tensor([[9.0, 0.0, 8.0, 7.0]])
    request = row(output=[1] * emitted, temperature=0.0, min_tokens=2, stop_token_ids=(2,), ignore_eos=True)
    assert Sampler().sample(values, [request])[0] == [chosen]


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Before temperature and penalties; the chosen token comes with its rank."""
    values = logits(7, rows=2)
    raw = values.log_softmax(-1)
    rows = [
        row(temperature=0.5, top_k=3, seed=3, logprobs=4, repetition_penalty=1.3, prompt=[4, 5]),
        row(temperature=0.0, logprobs=0),
    ]
    tokens, found = Sampler().sample(values.clone(), rows)
    first, second = found
    assert first is not None
    assert second is not None
    assert first.token_id == tokens[0]
    assert first.logprob == pytest.approx(float(raw[0, tokens[0]]), abs=1e-5)
    assert first.rank == int((raw[0] > raw[0, tokens[0]]).sum()) + 1
    assert [token for token, _ in first.top] == raw[0].topk(4).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(raw[0].topk(4).values.tolist(), abs=1e-5)
    assert (second.rank, second.top) == (1, ())


def test_no_logprobs_unless_asked_for() -> None:
    assert Sampler().sample(logits(0, rows=2), [row(), row(temperature=0.0)])[1] == [None, None]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9999}, {"top_k": 30}, {"logprobs": 3, "min_p": 0.1}])
def test_scratch_bytes_cover_what_is_allocated(params: dict[str, Any]) -> None:
    vocab, count = 30_000, 20
    values, rows = logits(0, rows=count, vocab=vocab), [row(**params)] * count
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        Sampler().sample(values, rows)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    assert 0 < peak <= Sampler.scratch_bytes(count, vocab)
