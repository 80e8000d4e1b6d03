"""Traces: read right, scaled right, replayed with the prefixes they shared; wrong rows named."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.plan.trace_formats import Columns, read_trace
from loadgen.plan.traces import Trace, TraceError, TraceRow

PUBLIC = Path(__file__).parents[3].parent / "shared" / "traces"
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [7, 8, 9]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 10, "hash_ids": [7, 8]},
    {"timestamp": 3000, "input_length": 600, "output_length": 20, "hash_ids": [7, 11]},
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def public(name: str) -> Path:
    path = PUBLIC / name
    if not path.exists():
        pytest.skip(f"the public trace {name} is not beside this checkout")
    return path


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def mooncake(tmp_path: Path) -> Trace:
    return read_trace(write(tmp_path / "m.jsonl", MOONCAKE))


def rows(*arrivals: float) -> Trace:
    return Trace("made", tuple(TraceRow(at, 10, 5, "short") for at in arrivals))


def percentiles(values: list[int]) -> list[int]:
    return [int(value) for value in np.percentile(values, [50, 90, 99])]


def test_azures_file_gives_its_published_figures() -> None:
    trace = read_trace(public("azure23_conv.csv"))
    assert len(trace.rows) == 19366
    assert percentiles([r.prompt_tokens for r in trace.rows]) == [1020, 2734, 4142]
    assert percentiles([r.output_tokens for r in trace.rows]) == [129, 424, 601]
    assert (round(trace.rate, 2), round(trace.gap_cv, 2)) == (5.53, 1.09)


def test_mooncakes_file_gives_its_published_figures_and_its_shared_prefixes() -> None:
    trace = read_trace(public("mooncake_conv.jsonl"))
    assert len(trace.rows) == 12031
    assert percentiles([r.prompt_tokens for r in trace.rows]) == [6909, 27367, 85400]
    assert percentiles([r.output_tokens for r in trace.rows]) == [350, 597, 1118]
    assert (round(trace.rate, 2), round(trace.gap_cv, 2)) == (3.40, 3.03)
    tokens, hits = trace.prefix_hits()
    assert hits / tokens == pytest.approx(0.374, abs=0.002)
    blocks = sum(len(row.blocks) for row in trace.rows)
    shares = [trace.prefix_hits(capacity)[1] / 512 / blocks for capacity in (1000, 5000, 20000, 50000)]
    assert shares == pytest.approx([0.04, 0.11, 0.29, 0.36], abs=0.01)


def test_dequantized_mooncake_has_no_ties_and_keeps_every_request_in_its_tick() -> None:
    trace = read_trace(public("mooncake_conv.jsonl"))
    spread = trace.dequantized(seed=4)
    assert len(spread.rows) == len(trace.rows)
    assert len({row.arrival for row in spread.rows}) == len(trace.rows)
    assert spread.rate == pytest.approx(trace.rate, rel=0.01)
    assert spread.gap_cv < 1.3 < trace.gap_cv
    assert "ticks of 3 s" in spread.description
    assert trace.dequantized(4) == spread != trace.dequantized(5)


def test_burstgpt_rows_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,,,ChatGPT,472,18,490,Conversation log\n"
        "45,,,ChatGPT,1087,0,1087,API log\n"
        "118.5,,,GPT-4,417,276,693,API log\n"
    )
    trace = read_trace(path)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens, r.cls) for r in trace.rows] == [
        (0.0, 472, 18, "Conversation log"),
        (113.5, 417, 276, "API log"),
    ]
    assert trace.notes == ("1 row of 0 tokens left out",)


BAILIAN = [
    {"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.25, "input_length": 40, "output_length": 5,
     "type": "text", "turn": 1, "hash_ids": [0, 1, 2]},
    {"chat_id": 1, "parent_chat_id": 0, "timestamp": 2.75, "input_length": 48, "output_length": 6,
     "type": "text", "turn": 2, "hash_ids": [0, 1, 3]},
]  # fmt: skip


def test_bailians_files_have_mooncakes_names_but_seconds_and_short_blocks(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "b.jsonl", BAILIAN))
    assert ([row.arrival for row in trace.rows], trace.block_tokens) == ([0.0, 2.5], 16)
    assert trace.prefix_hits() == (88, 32)


def only(rows: list[dict[str, object]], *keys: str) -> list[dict[str, object]]:
    return [{key: row[key] for key in keys} for row in rows]


BARE = ("timestamp", "input_length", "output_length")
SECONDS = [row | {"timestamp": at} for at, row in enumerate(MOONCAKE)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (only(MOONCAKE, *BARE), r"time=timestamp:UNIT,prompt=input_length,output=output_length with UNIT"),
        (
            only(BAILIAN, *BARE, "hash_ids"),
            r"fractions of ms.*blocks=hash_ids,block_tokens=N with UNIT one of",
        ),
        (only(BAILIAN, *BARE, "hash_ids", "chat_id"), r"different units in different traces"),
        (SECONDS, r"1e\+03 req/s, with 'timestamp' in ms, is not plausible"),
        ([row | {"timestamp": 1790000000 + n} for n, row in enumerate(MOONCAKE)], r"looks like s since 1970"),
        (
            [row | {"timestamp": 1790000000000 + n} for n, row in enumerate(BAILIAN)],
            r"like ms since 1970, not s",
        ),
        ([row | {"input_length": 90000} for row in MOONCAKE], r"3 blocks of 512 tokens do not fit a prompt"),
    ],
)
def test_a_unit_that_the_columns_do_not_prove_is_asked_for(
    tmp_path: Path, rows: list[dict[str, object]], message: str
) -> None:
    path = write(tmp_path / "unclear.jsonl", rows)
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    named = Columns.parse("time=timestamp:s,prompt=input_length,output=output_length")
    assert len(read_trace(path, named).rows) == len(rows)


def test_offsets_count_and_rows_of_no_tokens_do_not(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        AZURE + "2024-05-10 02:00:12.25+02:00,76,15\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:13 UTC,1000,0\n2024-05-10 00:00:14 -0100,0,7\n2024-05-10 00:00:15 -0100,9.0,7\n"
    )
    trace = read_trace(path)
    assert [row.arrival for row in trace.rows] == pytest.approx([0.0, 12.24007, 3614.99007])
    assert trace.notes == ("2 rows of 0 tokens left out", "put in order of time")


def test_named_columns_may_lie_within_objects_and_a_list_is_a_table(tmp_path: Path) -> None:
    rows = [{"time": f"2026-09-01T10:00:0{n}Z", "usage": {"in": 30, "out": 2}} for n in (0, 3)]
    path = tmp_path / "own.json"
    path.write_text(json.dumps(rows))
    trace = read_trace(path, Columns.parse("time=time:datetime,prompt=usage.in,output=usage.out"))
    assert [(row.arrival, row.prompt_tokens, row.output_tokens) for row in trace.rows] == [
        (0.0, 30, 2), (3.0, 30, 2),
    ]  # fmt: skip
    with pytest.raises(TraceError, match=r"its columns are time, usage\.in, usage\.out"):
        read_trace(path)


def test_named_columns_read_any_table(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("when,in,out,team,ids\n1500,40,4,a,3 4\n1000,20,2,b,3\n")
    columns = Columns.parse("time=when:ms, prompt=in, output=out, class=team, blocks=ids, block_tokens=16")
    trace = read_trace(path, columns)
    assert trace.rows == (
        TraceRow(0.0, 20, 2, "b", (3,)),
        TraceRow(0.5, 40, 4, "a", (3, 4)),
    )
    assert (trace.block_tokens, trace.notes) == (16, ("put in order of time",))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("time=ts,prompt=a,output=b", "names no unit"),
        ("time=ts:fortnights,prompt=a,output=b", "names no unit"),
        ("prompt=a,output=b", "write e.g. time="),
        ("time=ts:s,prompt=a,output=b,colour=c", "write e.g. time="),
        ("time=ts:s,prompt=a,output=b,blocks=c", "go together"),
    ],
)
def test_columns_need_a_time_with_its_unit(columns: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Columns.parse(columns)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the trace is empty"),
        (AZURE, "the trace is empty"),
        ("a,b\n1,2\n", r"its columns are a, b"),
        (AZURE + "2023-11-16 18:15:46.68,374,44\nnoon,374,44\n", r"line 3, column 'TIMESTAMP': 'noon'"),
        (AZURE + "2023-11-16 18:15:46.68,many,44\n", r"line 2, column 'ContextTokens': 'many' is no whole"),
        (AZURE + "2023-11-16 18:15:46.68,-4,44\n", r"column 'ContextTokens': -4 is not within 0"),
        (AZURE + "2023-11-16 18:15:46.68,,44\n", r"column 'ContextTokens': empty"),
        (AZURE + "2023-11-16 18:15:46.68,374\n", r"line 2: 2 cells under 3 columns"),
        (AZURE + '2023-11-16 18:15:46.68,374,"44\n', r"line 2: unexpected end"),
        ('{"timestamp": 0, "input_length": 1\n', r"line 1, column \d+: no JSON object"),
        ("{}\n[1]\n", r"its columns are none"),
        (json.dumps(MOONCAKE[0]) + "\n[1]\n", r"line 2: no JSON object"),
        (json.dumps(MOONCAKE[0] | {"hash_ids": [1.5]}), r"line 1, column 'hash_ids': 1.5 is no block id"),
        (json.dumps(MOONCAKE[0] | {"timestamp": True}), r"column 'timestamp': True is no number of ms"),
        (json.dumps(MOONCAKE[0] | {"timestamp": float("nan")}), r"column 'timestamp': nan is no number"),
        ('{"schema": "vtune.trace/9"}\n', r"this version reads vtune.trace/1"),
        ('{"schema": "vtune.trace/1", "block_tokens": 16}\n', r"holds no request"),
        (AZURE + "2023-11-16 18:15:46.68,374,0\n", r"holds no request \(1 row of 0 tokens left out\)"),
        (AZURE + "2023-11-16 18:15:46Z,3,4\n2023-11-16 18:15:46,3,4\n", r"line 3.*has no UTC offset, but"),
        ("[" + json.dumps(MOONCAKE[0]) + ", 3]", r"item 2: no JSON object"),
        ("[{", r"no JSON"),
        ("1,374,44\n2,400,41\n", r"its first line holds numbers"),
    ],
)
def test_a_wrong_row_names_file_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_trace_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TraceError, match="no UTF-8"):
        read_trace(path)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "nowhere")


def test_our_own_format_carries_settings_and_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl",
        [
            {"schema": "vtune.trace/1", "block_tokens": 16},
            {"at": 0.25, "prompt_tokens": 40, "output_tokens": 3, "class": "chat", "blocks": [5, 6, 7],
             "sampling": {"temperature": 0.7, "top_p": 0.9}},
            {"at": 1.5, "prompt_tokens": 33, "output_tokens": 4, "blocks": [5, 6, 8]},
        ],
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.block_tokens == 16
    assert trace.rows[0].sampling == (("temperature", 0.7), ("top_p", 0.9))
    assert [row.arrival for row in trace.rows] == [0.0, 1.25]
    plan = trace.schedule(seed=1, max_model_len=64)
    assert plan.requests[0].sampling == trace.rows[0].sampling
    bad = write(tmp_path / "bad.jsonl", [{"schema": "vtune.trace/1", "block_tokens": 16},
                {"at": 0, "prompt_tokens": 1, "output_tokens": 1, "sampling": {"prompt": 3}}])  # fmt: skip
    with pytest.raises(TraceError, match=r"line 2, column 'sampling': 'prompt' is unknown"):
        read_trace(bad)


def test_replayed_prompts_share_what_the_trace_shared_and_nothing_else(tmp_path: Path) -> None:
    plan = mooncake(tmp_path).schedule(seed=2, max_model_len=2048, vocab_size=32000)
    first, second, third = (request.prompt_token_ids or () for request in plan.requests)
    assert [len(first), len(second), len(third)] == [1100, 1024, 600]
    assert second == first[:1024]
    assert third[:512] == first[:512]
    assert third[512:] != first[512:600]
    assert len({plan.warmup[0].prompt_token_ids[0], first[0]}) == 2
    assert [r.intended for r in plan.requests] == [0.0, 3.0, 3.0]
    other = mooncake(tmp_path).schedule(seed=3, max_model_len=2048, vocab_size=32000)
    assert other.requests[0].prompt_token_ids != first
    assert other.sha256 != plan.sha256


def test_lengths_and_rate_scale_and_prefixes_stay_shared(tmp_path: Path) -> None:
    trace = mooncake(tmp_path).scaled(rate=2.0, length=0.25)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace.rows] == [
        (0.0, 275, 12),
        (1.5, 256, 2),
        (1.5, 150, 5),
    ]
    assert trace.block_tokens == 128
    first, second, _ = (r.prompt_token_ids or () for r in trace.schedule(seed=1, max_model_len=512).requests)
    assert second == first[:256]
    assert "rate x2, lengths x0.25" in trace.description


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_positive_numbers(factor: float) -> None:
    with pytest.raises(TraceError, match="scales must be positive"):
        rows(0.0, 1.0).scaled(rate=factor)


def test_a_window_begins_anew_at_zero_and_an_empty_one_is_refused() -> None:
    trace = rows(0.0, 5.0, 7.5, 12.0)
    assert [row.arrival for row in trace.window(5.0, 12.0).rows] == [0.0, 2.5]
    with pytest.raises(TraceError, match=r"no request arrives between 20 and 30 s; it lasts 12 s"):
        trace.window(20.0, 30.0)


def test_requests_beyond_the_context_are_an_error_clipped_or_dropped(tmp_path: Path) -> None:
    trace = mooncake(tmp_path)
    with pytest.raises(TraceError, match=r"2 of 3 requests exceed the context of 1000.*--length-scale 0.869"):
        trace.schedule(seed=1, max_model_len=1000)
    trace.scaled(length=0.869).schedule(seed=1, max_model_len=1000)
    clipped = trace.fitted(1000, "clip")
    assert [(r.prompt_tokens, r.output_tokens) for r in clipped.rows] == [(950, 50), (990, 10), (600, 20)]
    assert "2 clipped to 1000 tokens" in clipped.description
    dropped = trace.fitted(1000, "drop")
    assert [r.prompt_tokens for r in dropped.rows] == [600]
    with pytest.raises(TraceError, match="no requests left"):
        trace.fitted(10, "drop")


def test_times_that_were_not_rounded_are_not_spread() -> None:
    with pytest.raises(TraceError, match="not rounded to a tick"):
        rows(0.0, 0.1234567, 0.7654321).dequantized(1)


def test_prefix_hits_end_at_the_first_miss_and_count_whole_blocks_only(tmp_path: Path) -> None:
    trace = mooncake(tmp_path)
    assert trace.prefix_hits() == (1100 + 1024 + 600, 1024 + 512)
    assert trace.prefix_hits(capacity=1) == (2724, 0)
    assert rows(0.0, 1.0).prefix_hits() == (20, 0)
