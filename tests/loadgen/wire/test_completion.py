"""Recorded bytes in, records out: every figure exact, every failure named."""

import json
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_exchange import DONE, HEAD, MS, delta, event, exchange, parse, planned, records, text, usage

from loadgen.measure.record import Failure
from loadgen.measure.stats import Summary, e2e, max_stall, tpot, ttft
from loadgen.wire.completion import allot_tokens, parse_exchange
from loadgen.wire.messages import End, Exchange
from loadgen.wire.stream import Delta

PLAIN = [
    (100, text("a")),
    (110, text("b")),
    (130, text("c")),
    (140, text("d", "length")),
    (141, usage(4) + DONE),
]


def test_the_plain_case() -> None:
    record = parse(PLAIN, intended=20, sent=25)
    assert record.failure is None
    assert record.chunk_at == (100 * MS, 110 * MS, 130 * MS, 140 * MS)
    assert record.chunk_tokens == (1, 1, 1, 1)
    assert (record.intended, record.sent, record.end) == (20 * MS, 25 * MS, 141 * MS)
    assert (record.prompt_tokens, record.completion_tokens, record.finish_reason) == (3, 4, "length")
    assert ttft(record) == pytest.approx(0.080)
    assert tpot(record) == pytest.approx(0.040 / 3)
    assert max_stall(record) == pytest.approx(0.020)
    assert e2e(record) == pytest.approx(0.121)


def test_bytes_one_by_one_give_the_same_record() -> None:
    assert parse(PLAIN, bytewise=True) == parse(PLAIN)


def test_crlf_comments_and_unicode_line_separators_give_the_same_record() -> None:
    strange = [
        (
            at,
            b": ping\r\n\r\n" + data.replace(b"\n\n", b"\r\n\r\n").replace(b'"a"', '"\u2028\u0085"'.encode()),
        )
        for at, data in PLAIN
    ]
    assert parse(strange) == parse(PLAIN)
    assert parse(strange, bytewise=True) == parse(PLAIN)


def test_a_role_only_chunk_is_no_token() -> None:
    parts = [
        (50, delta(role="assistant", content="")),
        (100, delta(content="a")),
        (110, delta(content="b")),
        (120, delta("stop")),
        (121, usage(2) + DONE),
    ]
    record = parse(parts, max_tokens=2)
    assert record.failure is None
    assert record.chunk_at == (100 * MS, 110 * MS)
    assert record.chunk_tokens == (1, 1)


def test_an_empty_first_chunk_is_no_token_but_what_it_held_counts_with_the_first() -> None:
    record = parse([(90, text("")), *PLAIN[:3], (140, text("d", "length")), (141, usage(5))], max_tokens=5)
    assert record.failure is None
    assert record.chunk_at[0] == 100 * MS
    assert record.chunk_tokens == (2, 1, 1, 1)


def test_a_later_empty_chunk_is_a_token_whose_text_is_held_back() -> None:
    """A tokenizer gives out nothing for half a character; vLLM sends the empty chunk all the same."""
    parts = [(100, text("a")), (110, text("")), (120, text("é")), (130, text("b", "length")), (131, usage(4))]
    record = parse(parts)
    assert record.chunk_at == (100 * MS, 110 * MS, 120 * MS, 130 * MS)
    assert record.chunk_tokens == (1, 1, 1, 1)


def test_four_tokens_a_chunk() -> None:
    """4 tokens every 40 ms: inter-chunk 40 ms, TPOT and ITL 10 ms."""
    parts = [(40 * k, text("wxyz", "length" if k == 5 else None)) for k in range(1, 6)]
    record = parse([*parts, (200, usage(20) + DONE)], max_tokens=20)
    assert record.chunk_tokens == (4, 4, 4, 4, 4)
    assert tpot(record) == pytest.approx(0.010)
    assert max_stall(record) == pytest.approx(0.040)
    summary = Summary(records([record]))
    assert summary.distribution("itl").rank(0.5) == pytest.approx(0.010)
    assert summary.distribution("itl").count == 16
    assert summary.distribution("inter_chunk").rank(0.5) == pytest.approx(0.040)


def test_uneven_chunks_are_weighed_by_their_text() -> None:
    parts = [(10, text("a")), (20, text("bcdefg")), (30, text("hij", "length")), (31, usage(10))]
    assert parse(parts, max_tokens=10).chunk_tokens == (1, 6, 3)


def test_events_of_one_read_are_one_chunk() -> None:
    record = parse([(100, text("a")), (140, text("b") + text("c") + text("d", "length") + usage(4) + DONE)])
    assert record.chunk_at == (100 * MS, 140 * MS)
    assert record.chunk_tokens == (1, 3)


@pytest.mark.parametrize("counts", [(2, 1, 5), (1, 1, 1)])
def test_the_servers_own_token_counts_win(counts: tuple[int, ...]) -> None:
    total, running = sum(counts), 0
    with_usage, with_ids = [], []
    for k, count in enumerate(counts):
        running += count
        finish = "length" if k == len(counts) - 1 else None
        with_usage.append((10 * k, text("x", finish, usage={"completion_tokens": running})))
        ids = {"choices": [{"text": "x", "finish_reason": finish, "token_ids": [7] * count}]}
        with_ids.append((10 * k, event(ids)))
    for parts in (with_usage, with_ids):
        assert parse([*parts, (99, usage(total))], max_tokens=total).chunk_tokens == counts


def test_a_server_that_splits_tokens_has_chunks_of_less_than_one() -> None:
    parts = [(10 * k, text("x", "length" if k == 4 else None)) for k in range(1, 5)]
    record = parse([*parts, (50, usage(2))], max_tokens=2)
    assert record.chunk_tokens == (0.5, 0.5, 0.5, 0.5)


def test_without_usage_a_chunk_is_taken_for_a_token() -> None:
    record = parse(PLAIN[:4])
    assert record.failure is None
    assert record.completion_tokens is None
    assert record.tokens == 4


def test_tokens_without_text_still_count() -> None:
    """Special tokens are skipped in the text; with ignore_eos a model may produce nothing else."""
    record = parse([(10, text("")), (20, text("", "length")), (21, usage(2))], max_tokens=2)
    assert record.failure is None
    assert record.chunk_at == (10 * MS, 20 * MS)


def test_missing_done_is_no_failure_if_all_else_is_there() -> None:
    assert parse([*PLAIN[:4], (141, usage(4))]) == parse(PLAIN)


def test_the_other_kinds_of_generated_text_are_tokens_too() -> None:
    call = [{"index": 0, "function": {"arguments": "{}"}}]
    parts = [
        (10, delta(reasoning_content="hm")),
        (20, delta(tool_calls=call)),
        (30, delta("stop", content="b")),
        (31, usage(3)),
    ]
    assert parse(parts, max_tokens=3).chunk_at == (10 * MS, 20 * MS, 30 * MS)


def test_cached_tokens() -> None:
    details = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    assert parse([*PLAIN[:4], (141, event({"choices": [], "usage": details}))]).cached_tokens == 2


ERROR = event({"error": {"message": "the engine\nis dead", "code": 500}})
FAILURES: dict[str, tuple[list[tuple[int, bytes]], End, Failure, str]] = {
    "error in the stream": (
        [*PLAIN[:2], (120, ERROR)],
        End.COMPLETE,
        Failure.IN_BAND_ERROR,
        "the engine is dead",
    ),
    "error after the finish": ([*PLAIN[:4], (150, ERROR)], End.COMPLETE, Failure.IN_BAND_ERROR, "dead"),
    "no finish reason": ([*PLAIN[:3], (140, usage(4) + DONE)], End.COMPLETE, Failure.NO_FINISH_REASON, ""),
    "closed": (PLAIN[:2], End.CLOSED, Failure.CLOSED_MID_STREAM, ""),
    "closed inside an event": ([*PLAIN[:2], (115, b'data: {"ch')], End.CLOSED, Failure.CLOSED_MID_STREAM, ""),
    "reset": (PLAIN[:2], End.RESET, Failure.CLOSED_MID_STREAM, ""),
    "timed out": (PLAIN[:2], End.TIMEOUT, Failure.STALLED, ""),
    "never ended": (PLAIN, End.TIMEOUT, Failure.STALLED, ""),
    "unfinished": (PLAIN[:2], End.UNFINISHED, Failure.UNFINISHED, ""),
    "interrupted": (PLAIN[:2], End.CANCELLED, Failure.CANCELLED, ""),
    "no JSON": ([*PLAIN[:2], (120, b"data: {oops\n\n")], End.COMPLETE, Failure.GARBAGE, "oops"),
    "no object": ([(100, b"data: 5\n\n")], End.COMPLETE, Failure.GARBAGE, "5"),
    "too few tokens": (
        [*PLAIN[:2], (120, text("c", "stop")), (121, usage(3))],
        End.COMPLETE,
        Failure.TOKEN_COUNT,
        "3",
    ),
    "no tokens": (
        [(100, delta("stop", role="assistant")), (101, usage(0))],
        End.COMPLETE,
        Failure.NO_TOKENS,
        "",
    ),
    "nothing at all": ([], End.TIMEOUT, Failure.NO_ANSWER, ""),
    "hung up": ([], End.CLOSED, Failure.CLOSED, ""),
    "refused": ([], End.REFUSED, Failure.REFUSED, ""),
    "TLS": ([], End.TLS, Failure.TLS, ""),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures(name: str) -> None:
    parts, end, failure, words = FAILURES[name]
    record = parse(parts, end=end)
    assert record.failure is failure
    assert words in record.detail


def test_fewer_tokens_are_fine_without_ignore_eos() -> None:
    parts = [(100, text("a")), (110, text("b", "stop")), (111, usage(2))]
    assert parse_exchange(exchange(parts), planned(4, ignore_eos=False), 0).failure is None


def answer(status: int, body: Any, *headers: str, kind: str = "application/json") -> Exchange:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(data)}", *headers]
    raw = "\r\n".join([*lines, "", ""]).encode() + data
    return Exchange(0, 0, MS, 2 * MS, End.COMPLETE, stamps=[2 * MS], parts=[raw])


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (401, Failure.UNAUTHORIZED),
        (403, Failure.UNAUTHORIZED),
        (404, Failure.WRONG_PATH),
        (429, Failure.RATE_LIMITED),
        (503, Failure.UNAVAILABLE),
        (400, Failure.HTTP_ERROR),
        (500, Failure.HTTP_ERROR),
    ],
)
def test_statuses(status: int, failure: Failure) -> None:
    record = parse_exchange(answer(status, {"error": {"message": "because"}}, "Retry-After: 7"), planned(), 0)
    assert (record.failure, record.status, record.retry_after) == (failure, status, 7.0)
    assert record.detail == f"HTTP {status}: because"


def test_retry_after_as_a_date() -> None:
    past = parse_exchange(answer(503, {}, f"Retry-After: {formatdate(0, usegmt=True)}"), planned(), 0)
    assert past.retry_after == 0.0
    assert parse_exchange(answer(503, {}, "Retry-After: soon"), planned(), 0).retry_after is None


@pytest.mark.parametrize(
    "body", [{"object": "error", "message": "no"}, "plain", ["x"], {"detail": {"a": 1}}, None]
)
def test_any_error_body_is_survived(body: object) -> None:
    assert parse_exchange(answer(500, body), planned(), 0).failure is Failure.HTTP_ERROR


def test_a_200_that_is_no_stream() -> None:
    error = parse_exchange(answer(200, {"error": {"message": "no"}}), planned(), 0)
    assert (error.failure, error.detail) == (Failure.IN_BAND_ERROR, "no")
    html = parse_exchange(answer(200, "<hi>", kind="text/html"), planned(), 0)
    assert html.failure is Failure.GARBAGE
    assert "text/html" in html.detail


def test_bytes_that_are_no_http() -> None:
    raw = Exchange(0, 0, MS, 2 * MS, End.MALFORMED, "no status line", stamps=[2 * MS], parts=[b"SSH-2.0\r\n"])
    assert parse_exchange(raw, planned(), 0).failure is Failure.GARBAGE


@pytest.mark.parametrize(
    ("end", "failure"), [(End.CANCELLED, Failure.CANCELLED), (End.CLOSED, Failure.CLOSED_MID_STREAM)]
)
def test_a_head_that_was_cut_off(end: End, failure: Failure) -> None:
    raw = Exchange(0, 0, MS, 2 * MS, end, stamps=[2 * MS], parts=[HEAD[:30]])
    assert parse_exchange(raw, planned(), 0).failure is failure


@pytest.mark.parametrize(
    "body",
    [
        {"choices": None},
        {"choices": [None]},
        {"choices": [{}]},
        {"choices": [{"delta": None, "text": None}]},
        {"choices": {}, "usage": []},
        {"usage": {"completion_tokens": "many"}},
        {"choices": [{"delta": {"content": ["x"]}}]},
    ],
)
def test_odd_objects_are_survived(body: dict[str, Any]) -> None:
    record = parse([*PLAIN[:2], (115, event(body)), *PLAIN[2:]])
    assert record.completion_tokens == 4


DELTAS = st.lists(
    st.builds(
        Delta,
        st.integers(0, 3),
        st.integers(0, 9),
        st.none() | st.integers(-2, 3),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
)


@settings(max_examples=400, deadline=None)
@given(DELTAS, st.none() | st.integers(0, 30))
def test_allotted_tokens_add_up(deltas: list[Delta], total: int | None) -> None:
    allotted = allot_tokens(deltas, total)
    if allotted and total is not None:
        assert sum(count for _, count in allotted) == pytest.approx(total)
    if any(delta.chars for delta in deltas):
        assert allotted or total == 0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [HEAD, b"data: ", b"5\r\n", b"0\r\n\r\n", b"\r\n", b"\n\n", b"{}", b"[DONE]", text("a"), usage(4)]
        )
        | st.binary(max_size=6),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([end for end in End if end not in (End.REFUSED, End.CONNECT_TIMEOUT)]),
)
def test_no_bytes_break_the_parser(parts: list[bytes], end: End) -> None:
    raw = Exchange(0, 0, 1, 99, end, stamps=list(range(len(parts))), parts=parts)
    record = parse_exchange(raw, planned(), 0)
    assert record.failure is not None or record.tokens > 0
