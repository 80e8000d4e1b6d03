"""Suffix decoding (arXiv:2411.04975): drafts from what followed the longest known context before.

The paper keeps two suffix trees, of the request's own tokens and of past outputs, whose nodes count how often
each continuation occurred. Here a node is the set of places that share its context: a search finds them, they
vote on the continuation, and counts are exact over the places that are looked at. No tree is stored, whose
nodes would outnumber the tokens many times.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kernels.base import Int32
from engine.spec.history import TokenHistories
from engine.spec.proposer import Proposer, TargetStep
from engine.speculative_config import SpeculativeConfig

MAX_OCCURRENCES = 64
"""How many occurrences of a context vote at most: the latest ones."""
WINDOW_TOKENS = 1 << 20
"""Tokens of past outputs that are kept at most: 28 MB with their chains."""
CONTEXT_LENGTHS = (6, 2)
"""How many last tokens are searched for in past outputs: first the long context, which occurs less often."""
NO_TOKEN = -1
"""Stands between texts: it equals no token, so neither a match nor a draft runs across."""
_HEADS = 1 << 17

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, and how many of them the counts expect to be accepted."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0


class SuffixProposer(Proposer):
    """Drafts as long as the evidence for them: ``max_spec_factor`` tokens for each that matched, while the
    estimated probability stays above ``min_token_prob``. Of all contexts that recur, long or short, own or
    past, the one with the best expected number of accepted tokens drafts."""

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self._k, self._max_model_len = config.num_speculative_tokens, max_model_len
        self._depth = min(config.suffix_decoding_max_tree_depth, max_model_len)
        self._ahead = min(self._k, self._depth)
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_prob = config.suffix_decoding_min_token_prob
        self._histories = TokenHistories()
        cached = config.suffix_decoding_max_cached_requests
        self._past = PastOutputs(cached, self._depth, self._ahead) if cached else None

    def propose(self, step: TargetStep) -> dict[str, list[int]]:
        self._retire()
        drafts: dict[str, list[int]] = {}
        for request, emitted in step.emitting():
            history = self._histories.of(request)
            if step.drafting:
                drafts[request.request_id] = self.draft(history.extended(emitted))
        return drafts

    def draft(self, tokens: Int32) -> list[int]:
        """Drafts to follow ``tokens``, from what these hold and from past outputs."""
        k = min(self._k, self._max_model_len - len(tokens))
        if k <= 0:
            return []
        best = self._vote(*own_places(tokens, self._depth, self._ahead), k)
        if self._past is not None and best.score < k:
            past = self._vote(*self._past.places(tokens), k)
            best = max(best, past, key=lambda draft: draft.score)
        return list(best.tokens)

    def remember(self, output: Sequence[int]) -> None:
        """Add a finished request's output to the past ones."""
        if self._past is not None:
            self._past.add(output)

    def _retire(self) -> None:
        for request in self._histories.remove_finished():
            if (
                not request.cache_salt
            ):  # a salted request must not speed up others, which would tell what it says
                self.remember(request.output_token_ids)

    def _vote(self, matched: Sequence[int], continuations: Sequence[Sequence[int]], k: int) -> Draft:
        """The best draft over all context lengths; ``matched[i]`` tokens precede ``continuations[i]``.

        A context of n tokens is shared by the places that matched n or more. Between two lengths that occur
        the places are the same, and only the limit on the draft differs.
        """
        best = Draft()
        lengths = sorted(set(matched) - {0}, reverse=True)
        for longest, shorter in zip(lengths, (*lengths[1:], 0), strict=False):
            limit = min(k, max(self._limit(length) for length in range(shorter + 1, longest + 1)))
            if limit <= best.score:
                continue
            voters = [continuations[i] for i, length in enumerate(matched) if length >= longest]
            draft = self._follow(voters, limit)
            if draft.score > best.score:
                best = draft
        return best

    def _limit(self, matched: int) -> int:
        """Drafts at most after ``matched`` tokens of context."""
        return min(int(self._factor * matched + 1e-6), self._depth - matched)

    def _follow(self, voters: Sequence[Sequence[int]], limit: int) -> Draft:
        """From the context down the tree, always to the most frequent child."""
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        for place in range(limit):
            token, count = Counter(voter[place] for voter in voters).most_common(1)[0]
            probability *= count / len(voters)
            if token == NO_TOKEN or probability < self._min_prob:
                break
            tokens.append(token)
            score += probability
            voters = [voter for voter in voters if voter[place] == token]
        return Draft(tuple(tokens), score)


def own_places(tokens: Int32, depth: int, ahead: int) -> tuple[list[int], list[list[int]]]:
    """Earlier occurrences of the end of ``tokens`` within them, the latest first: how many tokens match
    (less than ``depth``), and the ``ahead`` tokens that follow each, NO_TOKEN where there are no more."""
    total = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    for length in range(2, depth):  # while more recur than may vote, look at those that match longer
        if len(ends) <= MAX_OCCURRENCES:
            break
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[total - length]]
        if not len(longer):
            break
        ends = longer
    ends = ends[-MAX_OCCURRENCES:][::-1]
    if not len(ends):
        return [], []
    back = np.arange(1, min(depth, total))
    context = np.where(ends[:, None] >= back, tokens[ends[:, None] - back], NO_TOKEN)
    after = ends[:, None] + np.arange(ahead)
    following = np.where(after < total, tokens[np.minimum(after, total - 1)], NO_TOKEN)
    return _matched(context, tokens), following.tolist()


def _matched(context: Int32, tokens: Int32) -> list[int]:
    """How many of the last tokens each row of ``context`` [places, n] (latest first) has in common."""
    same = context == tokens[: -context.shape[1] - 1 : -1]
    matched: list[int] = np.logical_and.accumulate(same, axis=1).sum(axis=1).tolist()
    return matched


class PastOutputs:
    """A window on the latest outputs that is searched through hash chains, as LZ77 compressors do it.

    Every place has a link to the one before it with the same hash of its last tokens. The window is a ring:
    the oldest outputs are overwritten, and links to them end a chain. Memory is the same from the start.
    """

    def __init__(self, max_requests: int, depth: int, ahead: int, window: int = WINDOW_TOKENS) -> None:
        self._depth, self._ahead, self._max_requests = depth, ahead, max_requests
        self._window = max(window, 8 * depth)
        window = self._window
        self._tokens = np.full(window, NO_TOKEN, dtype=np.int32)
        self._heads = {length: np.full(_HEADS, NO_TOKEN, dtype=np.int64) for length in CONTEXT_LENGTHS}
        self._links = {length: np.full(window, NO_TOKEN, dtype=np.int64) for length in CONTEXT_LENGTHS}
        self._starts: deque[int] = deque()
        """Where the outputs in the window begin. Places only grow; the ring takes them modulo its size."""
        self._end = 0

    def __len__(self) -> int:
        """Outputs in the window."""
        return len(self._starts)

    def add(self, output: Sequence[int]) -> None:
        """Append an output (of a longer one than a quarter of the window: its end)."""
        tokens = np.asarray(output[-(self._window // 4) :], dtype=np.int32)
        if len(tokens) < 2:
            return
        room = len(tokens) + 2 * self._depth  # empty places around it, so that what is read is never torn
        if self._end % self._window + room > self._window:
            self._clear(self._window - self._end % self._window)
        begin = self._end + self._depth
        self._clear(room)
        at = begin % self._window
        self._tokens[at : at + len(tokens)] = tokens
        self._starts.append(begin)
        while len(self._starts) > self._max_requests:
            self._starts.popleft()
        for length in CONTEXT_LENGTHS:
            self._link(tokens, begin, length)

    def places(self, tokens: Int32) -> tuple[list[int], list[list[int]]]:
        """As ``own_places``, of the end of ``tokens`` in the outputs."""
        for length in CONTEXT_LENGTHS:
            ends = self._chain(tokens, length) if len(tokens) >= length else []
            if not ends:
                continue
            at = np.asarray(ends)[:, None] % self._window
            back = np.arange(1, min(self._depth, len(tokens) + 1))
            matched = _matched(self._tokens[at - back], tokens)
            if max(matched) >= length:  # else the hashes were equal by chance
                return matched, self._tokens[at + np.arange(self._ahead)].tolist()
        return [], []

    def _clear(self, count: int) -> None:
        """Go on by ``count`` places, and forget the outputs that were there."""
        at = self._end % self._window
        self._tokens[at : at + count] = NO_TOKEN
        self._end += count
        while self._starts and self._starts[0] < self._end + self._depth - self._window:
            self._starts.popleft()

    def _link(self, tokens: Int32, begin: int, length: int) -> None:
        heads, links, window = self._heads[length], self._links[length], self._window
        for place, key in enumerate(_hashes(tokens, length).tolist(), begin + length):
            links[place % window] = heads[key]
            heads[key] = place

    def _chain(self, tokens: Int32, length: int) -> list[int]:
        """Where contexts of the same hash as the last ``length`` tokens end, the latest first."""
        ends: list[int] = []
        if not self._starts:
            return ends
        links, window, oldest = self._links[length], self._window, self._starts[0]
        place = int(self._heads[length][int(_hashes(tokens[-length:], length)[0])])
        while place >= oldest and len(ends) < MAX_OCCURRENCES:
            ends.append(place)
            place = int(links[place % window])
        return ends


def _hashes(tokens: Int32, length: int) -> Places:
    """A number below _HEADS for each run of ``length`` tokens."""
    runs = max(len(tokens) - length + 1, 0)
    mixed = np.zeros(runs, dtype=np.uint64)
    for offset in range(length if runs else 0):
        part = tokens[offset : offset + runs].astype(np.uint64)
        mixed = (mixed + part + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(47)).astype(np.int64)
