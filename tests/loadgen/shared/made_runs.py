"""Runs whose figures are known, for what compares or judges runs."""

from __future__ import annotations

import numpy as np

from loadgen.measure.record import ClientStats, Failure, Records, RequestRecord

MS = 1_000_000


def records(seed: int = 0, *, gap: float = 10.0, requests: int = 60, failed: int = 0) -> Records:
    """A run whose figures are known: TTFT 5 gaps, 11 tokens a request, one request after the other.

    ``gap`` in ms; the last ``failed`` requests were refused. ``seed`` gives 1 % of noise a run.
    """
    step = round(gap * MS * float(np.exp(np.random.default_rng(seed).normal(0, 0.01))))
    done = []
    for index in range(requests):
        begin = index * 15 * step
        failure = Failure.REFUSED if index >= requests - failed else None
        chunks = () if failure else tuple(begin + (5 + token) * step for token in range(11))
        done.append(
            RequestRecord(
                index=index,
                cls="short" if index % 2 else "long",
                intended=begin,
                sent=begin,
                end=begin + 15 * step,
                chunk_at=chunks,
                chunk_tokens=(1.0,) * len(chunks),
                failure=failure,
                finish_reason=None if failure else "length",
                max_tokens=11,
            )
        )
    return Records(
        schedule_sha256="5c4ed01e" * 8,
        schedule="made up",
        mode="closed",
        concurrency=1,
        planned=requests,
        requests=tuple(done),
        window=(0.0, requests * 15 * step / 1e9),
        client=ClientStats("asyncio", 1, 0.1, 10.0, 100, 0.0, 0.0, 0.0),
        environment={"url": f"http://127.0.0.1:{8000 + seed}", "model": "m", "cpus": 2},
        start_unix_ms=0,
        verdict="ok",
    )
