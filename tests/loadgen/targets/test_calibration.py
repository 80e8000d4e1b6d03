"""The load that teaches a simulation what steps take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_exchange import record, records

from loadgen.measure.record import RequestRecord
from loadgen.sim import calibration


def test_waves_fit_into_the_server_that_they_are_for() -> None:
    for wave in (calibration.WARM_UP, *calibration.WAVES):
        schedule = wave.schedule(1, vocab_size=1000)
        assert wave.concurrency <= calibration.FLAGS["max_num_seqs"]
        for request in schedule.requests:
            whole = len(request.prompt_token_ids or ()) + request.max_tokens
            assert whole <= calibration.FLAGS["max_model_len"]


def test_no_two_waves_share_a_prompt() -> None:
    firsts = [
        request.prompt_token_ids
        for number, wave in enumerate(calibration.WAVES)
        for request in wave.schedule(number, vocab_size=49_152).requests
    ]
    assert len(set(firsts)) == len(firsts)


def test_delivery_is_how_late_chunks_come_by_the_clock_of_the_steps() -> None:
    def streamed(*seconds: float) -> RequestRecord:
        stamps = tuple(round(at * 1e9) for at in seconds)
        return replace(record(0, 0.0, tokens=len(stamps)), chunk_at=stamps)

    steps = [(1, 100.0), (2, 100.2), (0, 100.4), (2, 100.5), (1, 130.0), (1, 131.0)]
    two = records([streamed(1.0, 1.2, 1.53), streamed(1.24, 1.56)])
    one = records([streamed(7.5, 8.0)])
    late = calibration.delivery([two, one], steps)
    assert [outputs for outputs, _ in late] == [1, 2, 2, 1, 1]
    assert [seconds for _, seconds in late] == pytest.approx([0.0, 0.04, 0.06, 0.5, 0.0])
    assert calibration.delivery([one, two], steps) == [], "these are not their steps"


def test_entry_is_what_a_request_takes_and_what_its_tokens_take() -> None:
    def answered(index: int, prompt: int, outside: float) -> RequestRecord:
        request = record(index, 0.0, first_s=0.5 + outside)
        return replace(request, prompt_tokens=prompt, server_queue=0.2, server_prefill=0.3)

    answers = [answered(0, 100, 0.004), answered(1, 20, 0.004), answered(2, 1000, 0.006)]
    alone = records(answers, mode="closed", concurrency=1)
    crowd = records([answered(0, 100, 0.5)] * 9, mode="closed", concurrency=9)
    assert calibration.entry([alone, crowd]) == (pytest.approx(0.004), pytest.approx(2e-6))
