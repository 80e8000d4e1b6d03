"""Verification of drafts that were drawn: the output has the target's distribution, from any proposer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from sampling_definition import kept_by_definition
from scipy.stats import chisquare

from engine.request import Request, SamplingParams
from engine.sampling.rejection import verify
from engine.sampling.sampler import Drawn, Sampler, SampleRow, seeded_uniform

VOCAB = 12
TRIALS = 3_000
PARAMS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all of them": {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.4},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (3,)},
}


def logits(seed: int) -> torch.Tensor:
    return 1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def request_of(**params: Any) -> Request:
    request = Request("r", [1, 2, 3], SamplingParams(**params), eos_token_ids=(0,))
    request.token_ids += [4, 5, 4]
    return request


def outcomes(
    proposal: torch.Tensor, drafts: tuple[int, ...] = (), seeded: bool = False, **params: Any
) -> Counter[int]:
    """What ``TRIALS`` verifications of a draft from ``proposal`` (logits) put out."""
    found: Counter[int] = Counter()
    sampler = Sampler(0)
    for start in range(0, TRIALS, 500):
        rows = []
        for trial in range(start, start + 500):
            request = request_of(**params, **({"seed": trial} if seeded else {}))
            drawn = sampler.draw_draft(proposal, request.sampling, 3)
            rows.append(SampleRow(request, drafts, drawn))
        found.update(sampler.sample(logits(0).expand(500, -1).clone(), rows)[0])
    return found


def target(drafts: tuple[int, ...] = (), **params: Any) -> torch.Tensor:
    """The distribution without drafts, by the definitions."""
    request, values = request_of(**params), logits(0)
    sampling = request.sampling
    if request.num_output_tokens + len(drafts) < sampling.min_tokens:
        values[[0, *sampling.stop_token_ids]] = -torch.inf
    seen = {*request.token_ids, *drafts}
    for token in seen if sampling.repetition_penalty != 1.0 else ():
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter([*request.output_token_ids, *drafts]).items():
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    return kept_by_definition(values, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def check(found: Counter[int], expected: torch.Tensor) -> None:
    """Chi-square of the counts. Tokens that the target never chooses must not come out at all."""
    assert all(expected[token] > 0 for token in found)
    shares = expected.double() / expected.double().sum()
    common = [token for token in range(VOCAB) if shares[token] * TRIALS >= 5]
    observed = [found[token] for token in common]
    wanted = (shares[common] * TRIALS).tolist()
    rest = TRIALS - sum(wanted)
    if rest > 5:
        observed, wanted = [*observed, TRIALS - sum(observed)], [*wanted, rest]
    else:
        wanted = [count * sum(observed) / sum(wanted) for count in wanted]
    assert chisquare(observed, wanted).pvalue > 1e-3


@pytest.mark.parametrize("case", PARAMS)
def test_the_output_has_the_target_s_distribution(case: str) -> None:
    """Position by position: penalties count the drafts before, filters cut the target, not the draft."""
    params = PARAMS[case]
    check(outcomes(logits(7), drafts=(6, 6), **params), target(drafts=(6, 6), **params))


@pytest.mark.parametrize("proposal", ["its own", "near", "far", "certain", "never right"])
def test_whatever_the_drafts_are(proposal: str) -> None:
    certain = torch.full((VOCAB,), -40.0)
    certain[5] = 40.0
    impossible = torch.full((VOCAB,), -40.0)
    impossible[int(logits(0).argmin())] = 40.0
    proposals = {
        "its own": logits(0),
        "near": logits(0) + 0.3 * logits(1),
        "far": -logits(0),
        "certain": certain,
        "never right": impossible,
    }
    found = outcomes(proposals[proposal])
    check(found, logits(0).softmax(-1))


def test_seeded_uniforms_of_draft_and_verification_are_independent() -> None:
    """One seed drives the draft, its acceptance and its replacement; were they the same number, the output's
    distribution would be another."""
    check(outcomes(logits(7), seeded=True), logits(0).softmax(-1))
    numbers = {seeded_uniform(3, 5, purpose) for purpose in range(4)}
    assert len(numbers) == 4


def test_acceptance_is_as_likely_as_can_be() -> None:
    """sum(min(p, q)): no way to couple the two distributions agrees more often."""
    p, q = logits(0).softmax(-1), logits(7).softmax(-1)
    sampler, accepted = Sampler(0), 0
    for _ in range(TRIALS // 500):
        rows = [
            SampleRow(request := request_of(), (), sampler.draw_draft(logits(7), request.sampling, 3))
            for _ in range(500)
        ]
        chosen = sampler.sample(logits(0).expand(500, -1).clone(), rows)[0]
        accepted += sum(
            token == row.drawn.token for token, row in zip(chosen, rows, strict=True) if row.drawn
        )
    expected = float(torch.minimum(p, q).sum())
    assert (
        chisquare([accepted, TRIALS - accepted], [expected * TRIALS, (1 - expected) * TRIALS]).pvalue > 1e-3
    )


def test_a_replacement_is_never_the_draft() -> None:
    p, q = logits(0).softmax(-1), logits(7).softmax(-1)
    drafts = torch.arange(VOCAB)
    rejected = (p < q).nonzero().squeeze(-1).tolist()
    assert rejected
    almost_one = torch.full((VOCAB, 1), 1.0)
    for uniform in torch.linspace(0, 1, 50):
        chosen = verify(
            p.expand(VOCAB, -1), q.expand(VOCAB, -1), drafts, almost_one, uniform.expand(VOCAB, 1)
        )
        assert all(chosen[token] != token for token in rejected)


def test_equal_distributions_accept_everything() -> None:
    p = logits(0).softmax(-1).expand(VOCAB, -1)
    drafts = torch.arange(VOCAB)
    assert verify(p, p, drafts, torch.ones(VOCAB, 1), torch.rand(VOCAB, 1)) == list(range(VOCAB))


def test_greedy_requests_ignore_what_a_draft_was_drawn_from() -> None:
    request = request_of(temperature=0.0)
    drawn = Drawn(2, logits(7).softmax(-1))
    chosen, _ = Sampler(0).sample(logits(0).unsqueeze(0).clone(), [SampleRow(request, (), drawn)])
    assert chosen == [int(logits(0).argmax())]
