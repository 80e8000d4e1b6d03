"""Suffix decoding against a suffix tree built by brute force; the window of past outputs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kernels.base import Int32
from engine.request import Request, RequestStatus, SamplingParams
from engine.spec.history import TokenHistories
from engine.spec.suffix import MAX_OCCURRENCES, PastOutputs, SuffixProposer
from engine.speculative_config import SpeculativeConfig


def proposer(k: int = 8, max_model_len: int = 1000, **keys: float) -> SuffixProposer:
    names = {f"suffix_decoding_{key}": value for key, value in keys.items()}
    config = SpeculativeConfig.parse({"method": "suffix", "num_speculative_tokens": k, **names})
    return SuffixProposer(config, max_model_len)


def array(tokens: list[int]) -> Int32:
    return np.array(tokens, dtype=np.int32)


def by_tree(tokens: list[int], k: int, depth: int, factor: float, least: float) -> list[int]:
    """The definition: for every context length, follow the most frequent child down a tree of counts."""
    best: tuple[float, list[int]] = (0.0, [])
    for length in range(min(len(tokens), depth - 1), 0, -1):
        path, score, probability = tokens[-length:], 0.0, 1.0
        for _ in range(min(k, int(factor * length + 1e-6), depth - length)):
            token, share = most_frequent(tokens, path, len(path) - length)
            probability *= share
            if token is None or probability < least:
                break
            path, score = [*path, token], score + probability
        best = max(best, (score, path[length:]), key=lambda item: item[0])
    return best[1]


def most_frequent(tokens: list[int], path: list[int], drafted: int) -> tuple[int | None, float]:
    """What follows ``path`` most often (None: the end of the text) and how often; of equals the latest."""
    follow: Counter[int | None] = Counter()
    for end in range(len(tokens), len(path) - 1, -1):
        itself = end - drafted == len(tokens)
        if tokens[end - len(path) : end] == path and not itself:
            follow[tokens[end] if end < len(tokens) else None] += 1
    if not follow:
        return None, 0.0
    token, count = follow.most_common(1)[0]
    return token, count / sum(follow.values())


@settings(max_examples=250, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    k=st.integers(1, 6),
    depth=st.integers(2, 10),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    least=st.sampled_from([0.0, 0.1, 0.5]),
)
@example(tokens=[1, 2, 3, 1, 2, 3, 1, 2], k=4, depth=24, factor=1.0, least=0.1)
def test_own_tokens_draft_as_a_suffix_tree_does(
    tokens: list[int], k: int, depth: int, factor: float, least: float
) -> None:
    suffix = proposer(
        k, max_tree_depth=depth, max_cached_requests=0, max_spec_factor=factor, min_token_prob=least
    )
    assert suffix.draft(array(tokens)) == by_tree(tokens, k, depth, factor, least)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1]),  # as many drafts as tokens matched
        ([9, 5, 1], []),
        ([7, 7, 7, 7, 7], [7, 7]),  # a run: each match may be as long as what is left to draft
        ([1, 2, 8, 1, 2, 9, 1, 2, 9, 1, 2], [9, 1]),  # the more frequent of two continuations
        ([4, 6, 4, 7, 4, 8, 4], [8]),  # of equally frequent ones the latest
        ([1], []),
    ],
)
def test_drafts_of_own_tokens(tokens: list[int], expected: list[int]) -> None:
    assert proposer(max_cached_requests=0).draft(array(tokens))[: len(expected) or None] == expected


def test_an_unlikely_continuation_is_not_drafted() -> None:
    tokens = [t for i in range(12) for t in (1, 20 + i)] + [1]
    assert proposer(max_cached_requests=0).draft(array(tokens)) == []
    assert len(proposer(max_cached_requests=0, min_token_prob=0.05).draft(array(tokens))) == 1


def test_the_factor_bounds_the_draft() -> None:
    tokens = [*range(1, 13), *range(1, 5)]
    for factor, count in ((0.25, 1), (0.5, 2), (1.0, 4), (2.0, 8)):
        suffix = proposer(max_cached_requests=0, max_spec_factor=factor)
        assert suffix.draft(array(tokens)) == list(range(5, 5 + count))


def test_drafts_stay_within_max_model_len() -> None:
    tokens = array([*range(1, 13), *range(1, 9)])
    assert proposer(max_model_len=22).draft(tokens) == [9, 10]
    assert proposer(max_model_len=20).draft(tokens) == []


def test_past_outputs_draft_where_own_tokens_do_not() -> None:
    suffix = proposer()
    suffix.remember(range(100, 130))
    assert suffix.draft(array([5, 6, 110, 111, 112])) == [113, 114, 115]
    assert suffix.draft(array([5, 6, 110, 6, 112])) == []
    assert proposer().draft(array([5, 6, 110, 111, 112])) == []


def test_the_better_of_own_and_past_drafts() -> None:
    suffix = proposer()
    suffix.remember([1, 2, 3, 50, 51, 52, 53])
    assert suffix.draft(array([2, 3, 60, 61, 1, 2, 3])) == [50, 51, 52]  # three match, against two
    assert suffix.draft(array([1, 2, 3, 60, 61, 1, 2, 3])) == [60, 61, 1]  # as good: its own


def test_drafts_do_not_run_from_one_output_into_another() -> None:
    suffix = proposer()
    suffix.remember([1, 2, 3, 4, 5])
    suffix.remember([6, 7, 8, 9])
    assert suffix.draft(array([2, 3, 4])) == [5]
    assert suffix.draft(array([3, 4, 5])) == []
    assert suffix.draft(array([5, 6])) == []


def finished(name: str, output: list[int], salt: str = "") -> Request:
    request = Request(name, [1], SamplingParams(), cache_salt=salt)
    request.token_ids += output
    return request


@pytest.mark.parametrize(("salt", "expected"), [("", [33, 34]), ("secret", [])])
def test_finished_requests_are_remembered_unless_salted(salt: str, expected: list[int]) -> None:
    from engine.spec.proposer import TargetStep
    from engine.step import ScheduledRequest

    suffix = proposer()
    request = finished("a", list(range(30, 40)), salt)
    step = TargetStep([ScheduledRequest(request, 0, 11)], [[]], {"a": [40]}, hidden=None)
    suffix.propose(step)
    assert suffix.draft(array([31, 32])) == []
    request.status = RequestStatus.FINISHED_STOPPED
    suffix.propose(TargetStep([], [], {}, hidden=None))
    assert suffix.draft(array([31, 32])) == expected


# ---------------------------------------------------------------- the window


def test_the_oldest_outputs_are_forgotten_by_count() -> None:
    past = PastOutputs(max_requests=3, depth=8, ahead=4)
    for start in range(0, 500, 100):
        past.add(range(start, start + 10))
    assert len(past) == 3
    assert past.places(array([101, 102])) == ([], [])
    assert past.places(array([201, 202])) == ([2], [[203, 204, 205, 206]])


def test_the_window_has_a_size() -> None:
    past = PastOutputs(max_requests=1000, depth=4, ahead=3, window=256)
    for start in range(0, 100_000, 100):
        past.add(range(start, start + 20))
        assert past.places(array([start + 3, start + 4]))[1] == [[start + 5, start + 6, start + 7]]
    assert 5 <= len(past) <= 256 // 20
    assert past.places(array([99_003, 99_004])) == ([], [])


def test_of_a_long_output_the_end_is_kept() -> None:
    past = PastOutputs(max_requests=10, depth=4, ahead=3, window=256)
    past.add(range(1000))
    assert past.places(array([500, 501])) == ([], [])
    assert past.places(array([990, 991]))[1] == [[992, 993, 994]]


def test_only_the_latest_places_vote() -> None:
    past = PastOutputs(max_requests=500, depth=8, ahead=2)
    for last in [7] * 100 + [9] * MAX_OCCURRENCES:
        past.add([1, 2, last])
    _, following = past.places(array([1, 2]))
    assert following == [[9, -1]] * MAX_OCCURRENCES


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=30),
    tokens=st.lists(st.integers(0, 5), min_size=2, max_size=6),
)
def test_places_are_occurrences_in_outputs_that_are_kept(outputs: list[list[int]], tokens: list[int]) -> None:
    past = PastOutputs(max_requests=8, depth=6, ahead=3, window=256)
    for output in outputs:
        past.add(output)
    kept = [output for output in outputs if len(output) >= 2][-len(past) :] if len(past) else []
    matched, following = past.places(array(tokens))
    for length, follow in zip(matched, following, strict=True):
        ahead = [token for token in follow if token >= 0]
        piece = tokens[len(tokens) - length :] + ahead
        assert any(
            output[start : start + len(piece)] == piece
            for output in kept
            for start in range(len(output) - len(piece) + 1)
        )
    pair = tokens[-2:]
    occurs = any(output[i : i + 2] == pair for output in kept for i in range(len(output) - 1))
    assert bool(matched) == occurs


# ---------------------------------------------------------------- histories


def test_histories_follow_requests_that_grow() -> None:
    histories = TokenHistories()
    request = finished("a", [2, 3])
    assert histories.of(request).extended([4]).tolist() == [1, 2, 3, 4]
    request.token_ids += [4]
    for token in range(5, 400):
        assert histories.of(request).extended([token]).tolist() == [*request.token_ids, token]
        request.token_ids.append(token)


def test_histories_forget_who_has_finished_and_who_only_has_the_same_name() -> None:
    histories = TokenHistories()
    first, second = finished("a", [2]), finished("a", [8, 9])
    histories.of(first).extended([])
    assert histories.of(second).extended([]).tolist() == [1, 8, 9]
    second.status = RequestStatus.FINISHED_ABORTED
    assert histories.remove_finished() == [second]
    assert len(histories) == 0
