"""Saving and loading runs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_exchange import HEALTHY, record, records

from loadgen.measure.record import Failure, Records
from loadgen.measure.saved import SavedFileError
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
        ('{"schema": ' + "[" * 100_000, "not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SavedFileError, match=words) as caught:
        Records.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["client", "requests", "window", "scrapes"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(run().to_json() | {damage: [1, 2, "x"]}))
    with pytest.raises(SavedFileError, match="damaged"):
        Records.load(path)


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They were written by Python's json: escapes, spaces, whole numbers for floats."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps(run().to_json() | {"verdict": "ü", "window": [0, 10]}, indent=1))
    assert Records.load(path) == replace(run(), verdict="ü")


def test_half_a_character_does_not_keep_a_run_from_being_saved(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    replace(run(), environment={"model": "m\udcff"}).save(path)
    assert Records.load(path).environment == {"model": "m?"}


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SavedFileError, match="No such file"):
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
        ("schedule_sha256", None, "Expected `str`, got `null` - at `$.schedule_sha256`"),
        ("planned", "x" * 100, "Expected `int`, got `str` - at `$.planned`"),
        ("partial", 1, "Expected `bool`, got `int` - at `$.partial`"),
        ("window", [1.0], "Expected `array` of length 2 - at `$.window`"),
        ("environment", [5], "Expected `object`, got `array` - at `$.environment`"),
        ("client", {"loop": "x"}, "missing required field `workers` - at `$.client`"),
        ("reasons", "because", "Expected `array`, got `str` - at `$.reasons`"),
        ("scrapes", [[1, 2]], "Expected `str`, got `int` - at `$.scrapes[0][1]`"),
        ("requests.cls", [], "Expected `str`, got `array` - at `$.requests[0].cls`"),
        ("requests.intended", True, "Expected `int`, got `bool` - at `$.requests[0].intended`"),
        ("requests.failure", "bad luck", "Invalid enum value 'bad luck' - at `$.requests[0].failure`"),
        ("requests.chunk_at", ["now"], "Expected `int`, got `str` - at `$.requests[0].chunk_at[0]`"),
        ("requests.chunk_at", [1], "1 chunks, but 5 counts of tokens - at `$.requests[0]`"),
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
    with pytest.raises(SavedFileError, match=re.escape(words)):
        Records.load(path)
