"""Logits to tokens, over the whole batch, with vLLM's meaning of every parameter.

Order: raw logprobs, ``min_tokens`` mask, penalties, temperature, min-p, top-k, top-p, draw.
A draw needs one uniform number. For a request with a seed it is a hash of the seed and the token's place in
the output, so that the text does not depend on batching, preemption or speculation; except with drafts that
were drawn themselves (``draft_sample_method: probabilistic``), where it depends on which tokens were drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.request import Request, SamplingParams
from engine.sampling.rejection import invert, verify
from engine.step import TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below count as 0, as in vLLM."""

ROWS_AT_ONCE = 16
"""Rows drawn from together: bounds the memory of sorting and summing over the vocabulary."""

BLOCK_COLUMNS = 64
"""The vocabulary is searched in blocks of this many columns before single columns."""

TOP_P_CANDIDATES = 384
"""How many of the largest logits top-p looks at first; only a flatter distribution is sorted as a whole."""


TARGET, ACCEPT, RESIDUAL, DRAFT = range(4)
"""What a uniform number is for. The numbers of one output position must be independent."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draft for the token to be chosen, and the distribution [vocab] that it was drawn from."""

    token: int
    distribution: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: its request, and the drafts before the token to be chosen."""

    request: Request
    drafts: tuple[int, ...] = ()
    drawn: Drawn | None = None
    """None also where the draft was not drawn but is the only candidate: the token is chosen without it."""

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def position(self) -> int:
        """The chosen token's place in the output."""
        return self.request.num_output_tokens + len(self.drafts)


class Sampler:
    """Chooses a token for each row. ``seed`` is the engine's: it drives requests that have none.

    ``argmax`` is the device's own, if it has one that is faster than torch's.
    """

    def __init__(self, seed: int = 0, argmax: Callable[[torch.Tensor], list[int]] | None = None) -> None:
        self._argmax = argmax or _argmax
        self._random = np.random.default_rng(seed)

    @staticmethod
    def scratch_bytes(rows: int, vocab_size: int) -> int:
        """Peak bytes beside the logits: a copy for logprobs, and what drawing from ROWS_AT_ONCE rows takes
        where the whole vocabulary is sorted (48 bytes a column: values, 64-bit indices and sums, masks)."""
        return 4 * vocab_size * rows + 12 * 4 * vocab_size * min(rows, ROWS_AT_ONCE)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SampleRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Token and (where asked for) logprobs of each row of ``logits`` [R, vocab], which is overwritten."""
        wants = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits[wants] if wants else None
        for i, row in enumerate(rows):
            params = row.params
            if row.position < params.min_tokens:
                _mask_stops(logits[i], row)
            if params.repetition_penalty != 1.0:
                _penalise_repetition(logits[i], row)
            if params.presence_penalty or params.frequency_penalty:
                _penalise_presence(logits[i], row)
        tokens = self._choose(logits, rows)
        found: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            for place, i in enumerate(wants):
                found[i] = token_logprobs(raw[place].log_softmax(-1), tokens[i], rows[i].params.logprobs or 0)
        return tokens, found

    def _choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        drawn = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
        if not drawn:
            return self._argmax(logits)
        tokens = self._argmax(logits) if len(drawn) < len(rows) else [0] * len(rows)
        verified = [i for i in drawn if rows[i].drawn is not None]
        alone = [i for i in drawn if rows[i].drawn is None]
        filtered = [i for i in alone if _is_filtered(rows[i].params, logits.shape[-1])]
        plain = [i for i in alone if not _is_filtered(rows[i].params, logits.shape[-1])]
        for group, choose in ((plain, _draw), (filtered, _draw_filtered), (verified, self._verify)):
            for start in range(0, len(group), ROWS_AT_ONCE):
                part = group[start : start + ROWS_AT_ONCE]
                members = [rows[i] for i in part]
                scaled = _scale(logits[part], members)
                for i, token in zip(part, choose(scaled, members, self._uniforms(members)), strict=True):
                    tokens[i] = token
        return tokens

    def _verify(self, logits: torch.Tensor, rows: Sequence[SampleRow], uniforms: torch.Tensor) -> list[int]:
        """Of each row [R, vocab] the draft, where it is accepted, else a token in its place: together they
        are distributed as the target is (rejection.py)."""
        drawn = [row.drawn for row in rows if row.drawn is not None]
        proposed = torch.stack([draft.distribution for draft in drawn])
        drafts = torch.tensor([draft.token for draft in drawn])
        return verify(
            _probabilities(logits, rows),
            proposed,
            drafts,
            self._uniforms(rows, ACCEPT),
            self._uniforms(rows, RESIDUAL),
        )

    def _target(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """The distributions that the rows [R, vocab], which are overwritten, are to be drawn from."""
        return _probabilities(_scale(logits, rows), rows)

    def _uniforms(self, rows: Sequence[SampleRow], purpose: int = TARGET) -> torch.Tensor:
        """[R, 1]"""
        values = [self.uniform(row.params, row.position, purpose) for row in rows]
        return torch.tensor(values, dtype=torch.float32).unsqueeze(-1)

    def uniform(self, params: SamplingParams, position: int, purpose: int) -> float:
        """The number in [0, 1) that decides about the token at ``position`` of the output."""
        if params.seed is None:
            return float(self._random.random())
        return seeded_uniform(params.seed, position, purpose)

    def draw_draft(self, logits: torch.Tensor, params: SamplingParams, position: int) -> Drawn:
        """A draft by the softmax of ``logits`` [vocab] at the request's temperature; ``position`` is one that
        no other draft beside it has."""
        distribution = (logits / params.temperature).softmax(-1)
        uniform = torch.tensor([[self.uniform(params, position, DRAFT)]])
        token, _ = invert(distribution.unsqueeze(0), uniform)
        return Drawn(int(token), distribution)


def _argmax(logits: torch.Tensor) -> list[int]:
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


def seeded_uniform(seed: int, position: int, purpose: int = TARGET) -> float:
    """A number in [0, 1) from a seed and a place, by two rounds of splitmix64's mixing function."""
    state = _mix64(seed) ^ (position + 1) ^ (purpose << 48)
    return (_mix64(state) >> 11) * 2.0**-53


def _mix64(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def token_logprobs(logprobs: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Report ``token`` and the ``count`` most likely ones of one row [vocab] of log-probabilities."""
    own = logprobs[token]
    rank = int((logprobs > own).sum()) + 1
    top = logprobs.topk(min(count, len(logprobs))) if count else None
    pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(token, float(own), rank, pairs)


def _mask_stops(logits: torch.Tensor, row: SampleRow) -> None:
    """Below ``min_tokens`` nothing that would stop the request can be chosen (EOS also under ignore_eos)."""
    stops = (*row.request.eos_token_ids, *row.params.stop_token_ids)
    logits[[i for i in stops if 0 <= i < len(logits)]] = -torch.inf


def _penalise_repetition(logits: torch.Tensor, row: SampleRow) -> None:
    """On prompt and output, multiplicative (arXiv:1909.05858)."""
    seen = torch.tensor(list({*row.request.token_ids, *row.drafts}), dtype=torch.long)
    values, penalty = logits[seen], row.params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_presence(logits: torch.Tensor, row: SampleRow) -> None:
    """Presence and frequency, on output only, subtractive (OpenAI's API reference)."""
    output = torch.tensor([*row.request.output_token_ids, *row.drafts], dtype=torch.long)
    seen, counts = output.unique(return_counts=True)
    logits[seen] -= row.params.frequency_penalty * counts + row.params.presence_penalty


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0


def _column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(-1)


def _scale(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Divide by temperature; then min-p: drop what is less likely than min_p times the likeliest."""
    logits = logits.div_(_column([row.params.temperature for row in rows]))
    if any(row.params.min_p > 0 for row in rows):
        floor = logits.amax(-1, keepdim=True) + _column([row.params.min_p for row in rows]).log()
        logits.masked_fill_(logits < floor, -torch.inf)
    return logits


def _blocks(logits: torch.Tensor) -> torch.Tensor:
    """[R, vocab] -> [R, blocks, BLOCK_COLUMNS], padded with -inf."""
    missing = -logits.shape[-1] % BLOCK_COLUMNS
    padded = F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    return padded.unflatten(-1, (-1, BLOCK_COLUMNS))


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow], uniforms: torch.Tensor) -> list[int]:
    """One token of each row [R, vocab] by its softmax: first a block by its sum, then within the block."""
    weights = (_blocks(logits) - logits.amax(-1)[:, None, None]).exp_()
    block, rest = invert(weights.sum(-1), uniforms)
    within = weights[torch.arange(len(weights)), block]
    place, _ = invert(within, rest / within.sum(-1, keepdim=True))
    return (block * BLOCK_COLUMNS + place).tolist()


def _draw_filtered(logits: torch.Tensor, rows: Sequence[SampleRow], uniforms: torch.Tensor) -> list[int]:
    """top-k, then top-p of what is left, then draw."""
    weights, indices = _filter(logits, rows)
    chosen, _ = invert(weights, uniforms)
    return indices.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).tolist()


def _probabilities(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The whole distribution of each row [R, vocab] after top-k and top-p."""
    if not any(_is_filtered(row.params, logits.shape[-1]) for row in rows):
        return logits.softmax(-1)
    weights, indices = _filter(logits, rows)
    kept = torch.zeros_like(logits).scatter_(-1, indices, weights)
    return kept.div_(kept.sum(-1, keepdim=True))


def _filter(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k and then top-p leave of each row [R, vocab]: weights in descending order, and their columns.
    Only the largest logits are looked at, where they suffice."""
    vocab = logits.shape[-1]
    top_k = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    log_total = logits.logsumexp(-1, keepdim=True)
    values, indices = _largest(logits, max(TOP_P_CANDIDATES, *(k for k in top_k if k < vocab), 0))
    if not _suffices(values, log_total, top_k, rows):
        values, indices = logits.sort(dim=-1, descending=True)
    limits = torch.tensor(top_k).unsqueeze(-1)
    values = values.masked_fill(torch.arange(values.shape[-1]) >= limits, -torch.inf)
    # The total is over the k that are left, or over the whole vocabulary where top-k is off.
    total = torch.where(limits == vocab, log_total, values.logsumexp(-1, keepdim=True))
    weights = (values - total).exp_()
    before = weights.cumsum(-1).sub_(weights)
    outside = before >= _column([row.params.top_p for row in rows])
    outside[:, 0] = False  # the likeliest is always kept
    return weights.masked_fill_(outside, 0.0), indices


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """At least the ``count`` largest of each row [R, vocab], in descending order, and their columns; short
    rows end in -inf. Quicker than a top-k: the count-th largest of the blocks' maxima bounds what counts."""
    peaks = _blocks(logits).amax(-1)
    if count >= peaks.shape[-1]:
        values, indices = logits.sort(dim=-1, descending=True)
        return values, indices
    mask = logits >= peaks.topk(count, dim=-1).values[:, -1:]
    row, column = mask.nonzero(as_tuple=True)
    counts = mask.sum(-1)
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    values = torch.full((len(logits), int(counts.max())), -torch.inf)
    indices = torch.zeros(values.shape, dtype=torch.long)
    values[row, place], indices[row, place] = logits[row, column], column
    values, order = values.sort(dim=-1, descending=True)
    return values, indices.gather(-1, order)


def _suffices(
    values: torch.Tensor, log_total: torch.Tensor, top_k: Sequence[int], rows: Sequence[SampleRow]
) -> bool:
    """Whether the candidates hold everything that top-k or top-p keeps, for every row."""
    mass = (values - log_total).exp_().sum(-1).tolist()
    return all(
        k <= values.shape[-1] or part >= row.params.top_p
        for k, part, row in zip(top_k, mass, rows, strict=True)
    )
