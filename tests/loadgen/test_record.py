"""Saving and loading runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_exchange import HEALTHY, record, records

from loadgen.measure.record import Failure, Records, RecordsError
from loadgen.measure.stats import frame
from servers.files import write_atomically


def run() -> Records:
    made = [record(k, k / 10, cls="ab"[k % 2]) for k in range(10)]
    made[3] = replace(
        made[3], failure=Failure.RATE_LIMITED, status=429, retry_after=7.0, detail="slow | down"
    )
    made[4] = replace(made[4], sent=None, chunk_at=(), chunk_tokens=(), failure=Failure.REFUSED)
    return records(
        made,
        client=replace(HEALTHY, stalls=((1.0, 0.3),)),
        reasons=("because",),
        scrapes=((1_700_000_000_000, "# TYPE a counter\na 1\n"),),
        warmup_failures=("x",),
        seed=5,
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.json"
    run().save(path)
    assert Records.load(path) == run()
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_a_line_a_request(tmp_path: Path) -> None:
    run().save_requests(tmp_path / "r.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(10))
    assert lines[3]["failure"] == "rate limited"
    assert "failure" not in lines[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{oops", "not JSON"),
        ("[]", "schema"),
        ("{}", "schema"),
        ('{"schema": "vtune.records/99"}', "vtune.records/99"),
        ('{"schema": "vtune.records/1"}', "damaged"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RecordsError, match=words) as caught:
        Records.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["client", "requests", "window", "scrapes"])
def test_damaged_files_are_refused(damage: str) -> None:
    data = json.loads(json.dumps(run().to_json())) | {damage: [1, 2, "x"]}
    with pytest.raises(RecordsError, match="damaged"):
        Records.from_json(data)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="No such file"):
        Records.load(tmp_path / "none.json")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def parts() -> object:
        yield "half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, parts())  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_frame() -> None:
    table = frame(run())
    assert len(table) == 10
    assert table.loc[0, "ttft"] == pytest.approx(0.1)
    assert table.loc[0, "class"] == "a"
    assert table["ttft"].isna().sum() == 2
    assert table.loc[3, "failure"] == "rate limited"
    assert bool(table.loc[0, "in_window"])
    assert frame(records([])).empty


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("schedule_sha256", None, "the run.schedule_sha256 is None"),
        ("planned", "x" * 100, "the run.planned is 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."),
        ("partial", 1, "the run.partial is 1"),
        ("window", [1.0], "the run.window has 1 items, not 2"),
        ("environment", [5], "the run.environment is"),
        ("client", {"loop": "x"}, "the run.client lacks"),
        ("reasons", "because", "the run.reasons is 'because'"),
        ("scrapes", [[1, 2]], "the run.scrapes is 2"),
        ("surprise", 1, "the run has an unknown surprise"),
        ("requests.cls", [], "the run.requests.cls is"),
        ("requests.intended", True, "the run.requests.intended is True"),
        ("requests.failure", "bad luck", "the run.requests.failure is 'bad luck'"),
        ("requests.chunk_at", ["now"], "the run.requests.chunk_at is 'now'"),
        ("requests.chunk_at", [1], r"1 chunks, but \d+ counts of tokens"),
    ],
)
def test_damage_is_named(tmp_path: Path, field: str, value: object, words: str) -> None:
    content = run().to_json()
    outer, _, inner = field.partition(".")
    if inner:
        content[outer][0][inner] = value
    else:
        content[outer] = value
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordsError, match=words):
        Records.load(path)
