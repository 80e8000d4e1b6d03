"""From one exchange's raw bytes to its record: failures, and the tokens of each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from loadgen.measure.record import Failure, RequestRecord
from loadgen.plan.workload import PlannedRequest
from loadgen.wire.http1 import MalformedMessage, Response, decode
from loadgen.wire.messages import End, Exchange
from loadgen.wire.stream import Delta, Stream, error_message, read_json, read_stream, token_count

_BEFORE_AN_ANSWER = {
    End.COMPLETE: Failure.GARBAGE,
    End.CLOSED: Failure.CLOSED,
    End.RESET: Failure.CLOSED,
    End.TIMEOUT: Failure.NO_ANSWER,
    End.REFUSED: Failure.REFUSED,
    End.CONNECT_TIMEOUT: Failure.CONNECT_TIMEOUT,
    End.TLS: Failure.TLS,
    End.MALFORMED: Failure.GARBAGE,
    End.UNFINISHED: Failure.UNFINISHED,
    End.CANCELLED: Failure.CANCELLED,
    End.SKIPPED: Failure.SKIPPED,
}
_MID_STREAM = {
    End.COMPLETE: Failure.NO_FINISH_REASON,
    End.CLOSED: Failure.CLOSED_MID_STREAM,
    End.RESET: Failure.CLOSED_MID_STREAM,
    End.TLS: Failure.CLOSED_MID_STREAM,
    End.TIMEOUT: Failure.STALLED,
    End.MALFORMED: Failure.GARBAGE,
    End.UNFINISHED: Failure.UNFINISHED,
    End.CANCELLED: Failure.CANCELLED,
    End.SKIPPED: Failure.SKIPPED,
}
_STATUS = {
    401: Failure.UNAUTHORIZED,
    403: Failure.UNAUTHORIZED,
    404: Failure.WRONG_PATH,
    405: Failure.WRONG_PATH,
    429: Failure.RATE_LIMITED,
    503: Failure.UNAVAILABLE,
}
_RETRY_DIGITS = 10


def parse_exchange(exchange: Exchange, planned: PlannedRequest, start_ns: int) -> RequestRecord:
    """The record of ``exchange``; its times become relative to ``start_ns``."""
    response, failure, detail = _decode(exchange)
    stream = Stream() if response is None or failure else read_stream(response)
    completion = token_count(stream.usage.get("completion_tokens"))
    chunks = merge_by_stamp(allot_tokens(stream.deltas, completion))
    if failure is None:
        failure, detail = _judge(exchange, planned, stream, delivered=bool(chunks))
    end_ns = exchange.stamps[-1] if failure is None else exchange.ended_ns
    return RequestRecord(
        index=exchange.index,
        cls=planned.cls,
        intended=exchange.intended_ns - start_ns,
        sent=exchange.sent_ns - start_ns if exchange.sent_ns else None,
        end=end_ns - start_ns,
        chunk_at=tuple(stamp - start_ns for stamp in chunks),
        chunk_tokens=tuple(chunks.values()),
        failure=failure,
        detail=detail,
        status=None if response is None else response.status,
        retry_after=None if response is None else _retry_after(response.headers.get("retry-after")),
        finish_reason=stream.finish_reason,
        prompt_tokens=token_count(stream.usage.get("prompt_tokens")),
        completion_tokens=completion,
        cached_tokens=_cached_tokens(stream.usage),
        planned_prompt=None if planned.prompt_token_ids is None else len(planned.prompt_token_ids),
        max_tokens=planned.max_tokens,
        retried=exchange.retried,
        server_queue=_milliseconds(stream.metrics.get("queue_time_ms")),
        server_prefill=_milliseconds(stream.metrics.get("time_to_first_token_ms")),
    )


def _decode(exchange: Exchange) -> tuple[Response | None, Failure | None, str]:
    if not exchange.stamps:
        if exchange.end is End.TIMEOUT and not exchange.sent_ns:
            return None, Failure.CONNECT_TIMEOUT, exchange.detail
        return None, _BEFORE_AN_ANSWER[exchange.end], exchange.detail
    try:
        response = decode(exchange.parts, exchange.stamps)
    except MalformedMessage as error:
        whole = exchange.end in (End.COMPLETE, End.MALFORMED)  # else its head was cut off
        return None, Failure.GARBAGE if whole else _MID_STREAM[exchange.end], exchange.detail or str(error)
    status = response.status
    if status != 200:
        return (
            response,
            _STATUS.get(status, Failure.HTTP_ERROR),
            f"HTTP {status}: {error_message(response.body)}",
        )
    kind = response.headers.get("content-type", "")
    if response.complete and "text/event-stream" not in kind:
        body = read_json(response.body)
        if isinstance(body, dict) and "error" in body:
            return response, Failure.IN_BAND_ERROR, error_message(response.body)
        return response, Failure.GARBAGE, f"expected an event stream, got {kind or 'no content type'}"
    if (coding := response.headers.get("content-encoding", "identity")) != "identity":
        return response, Failure.GARBAGE, f"the body is coded ({coding}), which was not asked for"
    return response, None, ""


def _judge(
    exchange: Exchange, planned: PlannedRequest, stream: Stream, delivered: bool
) -> tuple[Failure | None, str]:
    """Success needs a finish reason, no error in the stream, and with ignore_eos the right token count."""
    if stream.failure is not None:
        return stream.failure, stream.detail
    ended = exchange.end in (End.COMPLETE, End.CLOSED, End.RESET)
    if stream.finish_reason is None or not ended:
        return _MID_STREAM[exchange.end], exchange.detail
    completion = token_count(stream.usage.get("completion_tokens"))
    if not delivered:
        return Failure.NO_TOKENS, f"finish reason {stream.finish_reason!r} without a token"
    if planned.ignore_eos and completion is not None and completion != planned.max_tokens:
        return Failure.TOKEN_COUNT, f"asked for {planned.max_tokens} tokens, got {completion}"
    return None, ""


def _milliseconds(value: object) -> float | None:
    """As seconds; None for what is no time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return None
    return value / 1e3


def allot_tokens(deltas: Sequence[Delta], total: int | None) -> list[tuple[int, float]]:
    """(stamp, tokens) of the deltas that carry tokens.

    The first delta with text is the first token; empty ones before it carry none, and what they may
    have held counts with it. Later empty ones can carry a token whose text is held back (half a
    character): they count only if that makes the number of deltas equal to ``total``. Where a delta
    carries several tokens, the surplus goes to those with the most text a token.
    """
    exact = [delta for delta in deltas if delta.tokens and delta.tokens > 0]
    if exact and sum(delta.tokens or 0 for delta in exact) == total:
        return _from_first_text(exact, [float(delta.tokens or 0) for delta in exact])
    texts = [delta for delta in deltas if delta.chars]
    if not texts and total:  # only special tokens, whose text is skipped: usage proves that they were there
        texts = [delta for delta in deltas if not delta.role_only]
    if not texts or total == 0:
        return []
    if total is None or total == len(texts):
        return [(delta.at_ns, 1.0) for delta in texts]
    carriers = _carriers(deltas, total)
    if carriers:
        return _from_first_text(carriers, [1.0] * len(carriers))
    counts = _spread(texts, total) if total > len(texts) else [total / len(texts)] * len(texts)
    return [(delta.at_ns, count) for delta, count in zip(texts, counts, strict=True)]


def merge_by_stamp(tokens: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Tokens of each chunk. What arrived in the same read came together and is one chunk."""
    chunks: dict[int, float] = {}
    for at_ns, count in tokens:
        chunks[at_ns] = chunks.get(at_ns, 0.0) + count
    return chunks


def _carriers(deltas: Sequence[Delta], total: int) -> list[Delta] | None:
    """The deltas, empty ones included, if there are exactly ``total`` (a bare finish may be left out)."""
    everything = [delta for delta in deltas if not delta.role_only]
    if len(everything) == total:
        return everything
    without_finish = [delta for delta in everything if delta.chars or not delta.finished]
    return without_finish if len(without_finish) == total else None


def _from_first_text(deltas: Sequence[Delta], tokens: Sequence[float]) -> list[tuple[int, float]]:
    first = next((i for i, delta in enumerate(deltas) if delta.chars), 0)
    counts = [sum(tokens[: first + 1]), *tokens[first + 1 :]]
    return [(delta.at_ns, count) for delta, count in zip(deltas[first:], counts, strict=True)]


def _spread(deltas: Sequence[Delta], total: int) -> list[float]:
    """One token each; the surplus in shares of the text, its remainder to the most text a token."""
    chars = sum(delta.chars for delta in deltas) or 1
    surplus = total - len(deltas)
    counts = [1 + surplus * delta.chars // chars for delta in deltas]
    order = sorted(range(len(deltas)), key=lambda i: (-deltas[i].chars / counts[i], i))
    for k in range(total - sum(counts)):
        counts[order[k % len(order)]] += 1
    return [float(count) for count in counts]


def _cached_tokens(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    return token_count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _retry_after(value: str | None) -> float | None:
    """Seconds, from either form of the header."""
    if value is None:
        return None
    if value.isascii() and value.isdigit():
        return float(value) if len(value) < _RETRY_DIGITS else None
    try:
        when = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    return max(0.0, (when - datetime.now(UTC)).total_seconds()) if when.tzinfo else None


def parse_all(
    exchanges: Iterable[Exchange], planned: dict[int, PlannedRequest], start_ns: int
) -> tuple[RequestRecord, ...]:
    """Records in order of their intended time."""
    records = (parse_exchange(exchange, planned[exchange.index], start_ns) for exchange in exchanges)
    return tuple(sorted(records, key=lambda record: (record.intended, record.index)))
