"""The statistics lines of the server's log, as vLLM writes them."""

from __future__ import annotations

import logging

import pytest

from engine.metrics.log import StatLogger
from engine.metrics.stats import StepStats


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(logging.getLogger("vtune"), "propagate", True)
    caplog.set_level(logging.INFO, "vtune")
    return caplog.messages


def test_an_interval_in_vllms_words(lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    logger = StatLogger(clock)
    logger.record(StepStats(num_running=3, num_waiting=1, kv_usage=0.5, prefix_queries=200, prefix_hits=50))
    logger.record(
        StepStats(
            num_running=2, kv_usage=0.25, prompt_tokens=200, prompt_tokens_cached=50, generation_tokens=35
        )
    )
    clock.now = 10.0
    logger.log()
    assert caplog.messages == [
        "Engine 000: Avg prompt throughput: 15.0 tokens/s, Avg generation throughput: 3.5 tokens/s, "
        "Running: 2 reqs, Waiting: 0 reqs, CPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    ]


def test_speculation_has_a_line_of_its_own(lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    logger = StatLogger(clock)
    for accepted in ((2, 1, 0), (1, 0, 0)):
        logger.record(
            StepStats(
                num_running=1,
                generation_tokens=3,
                num_drafts=2,
                num_draft_tokens=6,
                num_accepted_tokens=sum(accepted),
                accepted_per_position=accepted,
            )
        )
    clock.now = 4.0
    logger.log()
    assert caplog.messages[1] == (
        "SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 1.00 tokens/s, "
        "Drafted throughput: 3.00 tokens/s, Accepted: 4 tokens, Drafted: 12 tokens, "
        "Per-position acceptance rate: 0.750, 0.250, 0.000, Avg Draft acceptance rate: 33.3%"
    )


def test_idleness_is_told_once(lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    logger = StatLogger(Clock())
    logger.log()
    assert caplog.messages == []
    logger.record(StepStats(num_running=0, generation_tokens=1, preemptions=2))
    logger.log()
    assert "Preemptions: 2" in caplog.messages[0]
    logger.log()
    assert "Avg generation throughput: 0.0 tokens/s" in caplog.messages[1]
    logger.log()
    assert len(caplog.messages) == 2
