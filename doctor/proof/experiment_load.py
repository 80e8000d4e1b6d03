"""The load of an experiment: several streams, each with its own way of arriving, in one fixed schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from doctor.diagnosis.experiment import RequestStream
from loadgen.plan.arrivals import Constant, Poisson
from loadgen.plan.workload import (
    DEFAULT_VOCAB_SIZE,
    PlannedRequest,
    PromptSource,
    Schedule,
    schedule_hash,
    warm,
)

STAGGER = 0.02
"""Seconds between the first requests of two clients: a crowd at one instant is a symptom of its own."""
_FASTEST_DECODE, _FASTEST_PREFILL = 300, 30_000
"""Tokens a second that no client exceeds, so that its chain of requests lasts for the load."""


def schedule(
    streams: Sequence[RequestStream],
    *,
    seed: int,
    seconds: float,
    warmup: bool = True,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
) -> Schedule:
    """Everything that ``streams`` send within ``seconds``. The same seed gives the same prompts and times.

    A client is a chain of requests, each sent when the one before is answered. Warm-up requests have prompts
    of their own, but the shared parts of their streams, once for every group.
    """
    planned: list[PlannedRequest] = []
    warmups: list[PlannedRequest] = []
    for number, stream in enumerate(streams):
        source = _Prompts(stream, vocab_size, seed, number)
        if warmup:
            warmups += [warm(source.request(0, group)) for group in range(stream.groups)]
        planned += _clients(stream, source, seconds) if stream.clients else _arrivals(stream, source, seconds)
    requests = _numbered(planned)
    return Schedule(
        requests=requests,
        warmup=tuple(replace(r, index=-1 - n) for n, r in enumerate(warmups)),
        mode="open",
        concurrency=None,
        duration=seconds,
        sha256=schedule_hash(requests, "open", None, seconds),
        description=f"{'; '.join(map(describe_load, streams))}; {seconds:g} s; seed {seed}",
        seed=seed,
    )


def describe_load(stream: RequestStream) -> str:
    """One stream in words: ``8 clients of chat (128 in, 64 out)``."""
    how = f"{stream.clients} clients of" if stream.clients else f"{stream.rate:g} a second of"
    shared = f", {stream.shared} shared" if stream.shared else ""
    behind = f" behind a header of {stream.header}" if stream.shared and stream.header else ""
    lengths = f"{_range(stream.prompt)} in, {_range(stream.output)} out"
    return f"{how} {stream.name} ({lengths}{shared}{behind})"


def _range(length: tuple[int, int]) -> str:
    low, high = length
    return str(low) if low == high else f"{low}-{high}"


class _Prompts:
    """Draws the requests of one stream."""

    def __init__(self, stream: RequestStream, vocab_size: int, seed: int, number: int) -> None:
        self.stream = stream
        self.times_rng, self._lengths, prompts = np.random.default_rng((seed, number)).spawn(3)
        self._source = PromptSource(vocab_size, prompts)
        self._shared = [
            self._source.tokens(stream.shared) if stream.shared else () for _ in range(stream.groups)
        ]
        self._turn = itertools.count()

    def request(self, index: int, group: int | None = None, intended: float = 0.0) -> PlannedRequest:
        """The next one; groups take turns where none is named."""
        stream = self.stream
        shared = self._shared[next(self._turn) % stream.groups if group is None else group]
        length = int(self._lengths.integers(*stream.prompt, endpoint=True))
        own = self._source.tokens(length - len(shared))
        return PlannedRequest(
            index=index,
            cls=stream.name,
            intended=intended,
            prompt_token_ids=own[: stream.header] + shared + own[stream.header :],
            prompt=None,
            max_tokens=int(self._lengths.integers(*stream.output, endpoint=True)),
            temperature=stream.temperature,
            priority=stream.priority,
            think=stream.think,
        )


def _clients(stream: RequestStream, source: _Prompts, seconds: float) -> Iterator[PlannedRequest]:
    """Chains: ``follows`` holds the index within ``planned`` of the stream, made absolute when numbered."""
    assert stream.clients is not None
    answer = stream.output[0] / _FASTEST_DECODE + stream.prompt[0] / _FASTEST_PREFILL + stream.think
    turns = max(1, round(seconds / answer))
    for client in range(stream.clients):
        for turn in range(turns):
            request = source.request(-1 if turn else 0, None, stream.starts + client * STAGGER)
            yield replace(request, follows=-1 if turn else None)


def _arrivals(stream: RequestStream, source: _Prompts, seconds: float) -> Iterator[PlannedRequest]:
    assert stream.rate is not None
    arrival = Constant(stream.rate) if stream.even else Poisson(stream.rate)
    span = seconds - stream.starts
    for at in arrival.times(source.times_rng, duration=span) if span > 0 else ():
        yield source.request(0, None, stream.starts + float(at))


def _numbered(planned: Sequence[PlannedRequest]) -> tuple[PlannedRequest, ...]:
    """By intended time, as an open loop wants it; a further turn of a chain stays behind the one before."""
    order = sorted(range(len(planned)), key=lambda n: (planned[n].intended, n))
    place = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(
            planned[old],
            index=place[old],
            follows=None if planned[old].follows is None else place[old - 1],
        )
        for old in order
    )
