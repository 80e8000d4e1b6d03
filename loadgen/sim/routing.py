"""Which of several replicas gets a request: the policies of routers, for experiments on simulated fleets."""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from loadgen.plan.datasets import CHARS_PER_TOKEN
from loadgen.plan.workload import PlannedRequest, Schedule

Policy = Literal["random", "least-loaded", "prefix-aware", "length-pooled"]
PREFIX_TOKENS = 64
"""Prompts are compared in pieces of so many tokens."""
MIN_MATCH = 0.5
"""Share of a prompt that a replica must have seen for the prompt to be sent there."""
MAX_SKEW, MAX_RATIO = 8, 1.5
"""A replica with more requests in flight than 8 and 1.5 times the least loaded one is passed over."""


class Route(ABC):
    """Chooses for each request, in the order of sending; knows only what a router sees."""

    def __init__(self, replicas: int) -> None:
        self.in_flight = [0] * replicas

    def choose(self, planned: PlannedRequest, token_ids: Sequence[int]) -> int:
        """The replica for this request, which is in flight there from now on."""
        chosen = self._choose(planned, token_ids)
        self.in_flight[chosen] += 1
        return chosen

    def ended(self, planned: PlannedRequest, replica: int) -> None:
        """The request is answered, or has failed."""
        self.in_flight[replica] -= 1

    @abstractmethod
    def _choose(self, planned: PlannedRequest, token_ids: Sequence[int]) -> int: ...

    def _least(self, among: Sequence[int]) -> int:
        """The one with the fewest requests in flight, the first of equals."""
        return min(among, key=self.in_flight.__getitem__)


class RandomRoute(Route):
    """Any replica, with equal chance."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas)
        self._random = random.Random(seed)

    def _choose(self, planned: PlannedRequest, token_ids: Sequence[int]) -> int:
        return self._random.randrange(len(self.in_flight))


class LeastLoadedRoute(Route):
    """The replica with the fewest requests in flight."""

    def _choose(self, planned: PlannedRequest, token_ids: Sequence[int]) -> int:
        return self._least(range(len(self.in_flight)))


class PrefixAwareRoute(Route):
    """The replica that was sent the longest part of the prompt before, unless it is much busier than others
    or that part is short; then the least loaded one. What replicas evict the router does not learn."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._seen: list[set[int]] = [set() for _ in range(replicas)]

    def _choose(self, planned: PlannedRequest, token_ids: Sequence[int]) -> int:
        prefixes = _prefixes(token_ids)
        matches = [_longest(prefixes, seen) for seen in self._seen]
        best = max(range(len(matches)), key=lambda replica: (matches[replica], -self.in_flight[replica]))
        least = self._least(range(len(matches)))
        limit = max(self.in_flight[least] * MAX_RATIO, self.in_flight[least] + MAX_SKEW)
        far = matches[best] * PREFIX_TOKENS < MIN_MATCH * len(token_ids)
        chosen = least if far or self.in_flight[best] > limit else best
        self._seen[chosen].update(prefixes)
        return chosen


class LengthPooledRoute(Route):
    """Short prompts have replicas of their own, long ones the others; in each pool the least loaded.

    The widest gap (by ratio) between the schedule's prompt lengths parts short from long; each pool gets the
    share of the replicas that its tokens are of all tokens, and at least one.
    """

    def __init__(self, replicas: int, schedule: Schedule) -> None:
        super().__init__(replicas)
        sizes = sorted((len(tokens_of(r)), r.max_tokens) for r in schedule.requests)
        ratios = [after[0] / before[0] for before, after in pairwise(sizes)]
        cut = max(range(len(ratios)), key=ratios.__getitem__, default=0)
        self.threshold = sizes[cut][0]
        """The longest prompt that is short."""
        short = sum(prompt + output for prompt, output in sizes if prompt <= self.threshold)
        share = short / sum(prompt + output for prompt, output in sizes)
        count = min(max(round(share * replicas), 1), max(replicas - 1, 1))
        self.pools = range(count), range(count if replicas > 1 else 0, replicas)

    def _choose(self, planned: PlannedRequest, token_ids: Sequence[int]) -> int:
        return self._least(self.pools[len(token_ids) > self.threshold])


def tokens_of(planned: PlannedRequest) -> Sequence[int]:
    """The prompt's token ids; of a text, one for every CHARS_PER_TOKEN characters, equal where these are."""
    if planned.prompt_token_ids is not None:
        return planned.prompt_token_ids
    text = planned.prompt or "".join(f"{m.role}: {m.text}\n" for m in planned.messages or ())
    pieces = (text[at : at + CHARS_PER_TOKEN] for at in range(0, len(text), CHARS_PER_TOKEN))
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in pieces]


def make_route(policy: Policy, replicas: int, schedule: Schedule) -> Route:
    """The router of one run."""
    if policy == "random":
        return RandomRoute(replicas, schedule.seed or 0)
    if policy == "least-loaded":
        return LeastLoadedRoute(replicas)
    if policy == "prefix-aware":
        return PrefixAwareRoute(replicas)
    return LengthPooledRoute(replicas, schedule)


def _prefixes(token_ids: Sequence[int]) -> list[int]:
    """A hash of each whole piece and everything before it."""
    hashes, before = [], 0
    for end in range(PREFIX_TOKENS, len(token_ids) + 1, PREFIX_TOKENS):
        before = hash((before, *token_ids[end - PREFIX_TOKENS : end]))
        hashes.append(before)
    return hashes


def _longest(prefixes: Sequence[int], seen: set[int]) -> int:
    """How many of the first pieces have been seen."""
    for count, prefix in enumerate(prefixes):
        if prefix not in seen:
            return count
    return len(prefixes)
