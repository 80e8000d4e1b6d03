"""Damaged input: what cannot be told is named, nothing wrong is found, and there is never a traceback."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import TRUTH, meta, needs_recordings, scrapes
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.sources import Observation, Scrapes, SeriesFile, Source, observe_recording
from servers.command import parse_command
from servers.errors import SourceError
from servers.kinds import LABELS
from servers.metrics.catalog import METRICS
from servers.metrics.exposition import Recording, Series, record

NAMES = [name for name in TRUTH if name != "prefix-unshared"]


class Parsed(Source):
    """A recording that is parsed already."""

    name = "parsed"

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        return observe_recording(self.recording, self.name, window, slo)


@cache
def recording(name: str) -> Recording:
    return record(scrapes(name))


def examine(name: str, damaged: Recording) -> Diagnosis:
    """Diagnose a damaged recording, with the server's true flags."""
    return diagnose(Parsed(damaged), parse_command(meta(name)["server_cmd"]).flags)


def found(diagnosis: Diagnosis) -> set[str]:
    return {finding.id for finding in diagnosis.findings}


@cache
def whole(name: str) -> set[str]:
    return found(examine(name, recording(name)))


def without(name: str, metric: str) -> Recording:
    gone = set(METRICS[metric].names)
    kept = {
        sample: columns
        for sample, columns in recording(name).series.items()
        if re.sub("_(bucket|sum|count)$", "", sample) not in gone and sample not in gone
    }
    return replace(recording(name), series=kept)


@needs_recordings
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_metric_never_makes_a_finding(name: str) -> None:
    for metric in METRICS:
        diagnosis = examine(name, without(name, metric))
        assert found(diagnosis) <= whole(name), metric
        if TRUTH[name] and TRUTH[name] not in found(diagnosis):
            assert not diagnosis.healthy, metric


def with_restart(name: str) -> Recording:
    """The server restarts in the middle: every counter begins again at 0."""
    series: dict[str, list[Series]] = {}
    kinds = ("gauge", "info")
    gauges = {sample for metric in METRICS.values() if metric.kind in kinds for sample in metric.names}
    for sample, columns in recording(name).series.items():
        series[sample] = []
        for column in columns:
            values = column.values.copy()
            if sample not in gauges:
                half = len(values) // 2
                values[half:] -= values[half]
            series[sample].append(replace(column, values=values))
    return replace(recording(name), series=series)


@needs_recordings
@pytest.mark.parametrize("name", NAMES)
def test_a_counter_reset_is_survived_and_said(name: str) -> None:
    diagnosis = examine(name, with_restart(name))
    assert found(diagnosis) <= whole(name)
    assert any("restarted" in note for note in diagnosis.notes)
    if TRUTH[name]:
        assert TRUTH[name] in found(diagnosis)


def every_line(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda page: re.sub(pattern, replacement, page, flags=re.MULTILINE)


def shuffled(page: str) -> str:
    lines = page.splitlines(keepends=True)
    return "".join(random.Random(0).sample(lines, len(lines)))


MUTATIONS: dict[str, Callable[[str], str]] = {
    "every line twice": every_line(r"^(.*\n)", r"\1\1"),
    "no comments": every_line(r"^#.*\n", ""),
    "Windows line ends": lambda page: page.replace("\n", "\r\n"),
    "underscores for colons": lambda page: page.replace("vllm:", "vllm_"),
    "with timestamps": every_line(r"^(vllm:\S+) (\S+)$", r"\1 \2 1795952090003"),
    "a line of rubbish": lambda page: page + 'vllm:num_requests_running{engine="0" 3\n}}}{{{ \x00\x07\n',
    "shuffled": shuffled,
}


@needs_recordings
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", ["kv-starved", "healthy-steady"])
def test_harmless_oddities_change_nothing(name: str, mutation: str) -> None:
    thinned = scrapes(name)[::4]
    mutated = [(unix_ms, MUTATIONS[mutation](page)) for unix_ms, page in thinned]
    assert found(diagnose(Scrapes(mutated), {})) == found(diagnose(Scrapes(thinned), {}))


BREAKAGES: dict[str, Callable[[str], str]] = {
    "decimal commas": every_line(r"(\d)\.(\d+)$", r"\1,\2"),
    "all NaN": every_line(r" \S+$", " NaN"),
    "all infinite": every_line(r" \S+$", " +Inf"),
    "renamed": lambda page: page.replace("vllm:", "engine:"),
    "no values": every_line(r" \S+$", ""),
    "HTML": lambda page: "<html><body>502 Bad Gateway</body></html>\n",
    "nothing": lambda page: "",
}


@needs_recordings
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_cannot_be_read_is_refused_in_words(breakage: str) -> None:
    broken = [(unix_ms, BREAKAGES[breakage](page)) for unix_ms, page in scrapes("overload")[::8]]
    with pytest.raises(SourceError, match=f"no {LABELS} metric"):
        diagnose(Scrapes(broken, "broken"), {})


@needs_recordings
@pytest.mark.parametrize("name", ["overload", "seq-cap", "long-prefill-itl-spikes"])
@pytest.mark.parametrize("seed", range(4))
def test_a_file_cut_off_anywhere_gives_no_wrong_finding(name: str, seed: int, tmp_path: Path) -> None:
    text = "".join(f"# scrape_unix_ms {unix_ms}\n{page}" for unix_ms, page in scrapes(name)[::3])
    path = tmp_path / "cut.prom"
    path.write_text(text[: random.Random(seed).randrange(len(text) // 2, len(text))])
    causes = {finding.id for finding in diagnose(SeriesFile(path), {}).findings if not finding.suppressed_by}
    assert causes <= whole(name) | {"itl-flat-high"}


def test_a_scrape_that_lost_lines_is_left_out_whole() -> None:
    """Counters that end at different times would look like requests that vanished."""
    pages = Server().scrapes()
    last, text = pages[-1]
    lines = text.splitlines(keepends=True)
    pages[-1] = (last, "".join(line for line in lines if "request_success" not in line))
    diagnosis = diagnose(Scrapes(pages), {})
    assert diagnosis.findings == ()
    assert any("incomplete" in note for note in diagnosis.notes)


def test_a_nan_among_counters_is_no_vanished_request() -> None:
    pages = Server().scrapes()
    last, text = pages[-1]
    pages[-1] = (last, re.sub(r"(vllm:request_success_total\S+) \S+", r"\1 NaN", text))
    assert diagnose(Scrapes(pages), {}).findings == ()


def test_a_hundred_instances_are_told_apart() -> None:
    servers = [
        Server(
            running=2,
            waiting=12 if number % 10 == 0 else 0,
            kv=0.05,
            labels={"engine": "0", "model_name": f"m{number}", "instance": f"host{number}:8000"},
        )
        for number in range(100)
    ]
    pages = [server.scrapes(count=3) for server in servers]
    merged = [(parts[0][0], "".join(page for _, page in parts)) for parts in zip(*pages, strict=True)]
    diagnosis = diagnose(Scrapes(merged), {"max_num_seqs": 2})
    capped = {f.instance for f in diagnosis.findings if f.id == "seq-cap"}
    assert capped == {f"host{number}:8000" for number in range(0, 100, 10)}
    assert len(diagnosis.engines) == 100


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the file is empty"),
        (b"   \n\n", "the file is empty"),
        (b"\x1f\x8b\x08\x00rubbish", "damaged gzip data"),
        (b"\x89PNG\x00\x00\x00", "binary data"),
        (b"# scrape_unix_ms soon\nvllm:num_requests_running 1.0\n", "not a time in milliseconds"),
        (
            b"# scrape_unix_ms 1000\nvllm:num_requests_running 1.0\n# scrape_unix_ms 2000\nup 1\n",
            "only one usable scrape",
        ),
        (
            b"# scrape_unix_ms 1000\nup 1\n# scrape_unix_ms 2000\nup 1\n",
            f"no {LABELS} metric",
        ),
    ],
)
def test_a_file_of_no_use_is_refused_in_words(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "series.prom.gz"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=re.escape(complaint)):
        diagnose(SeriesFile(path), {})


def test_a_truncated_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    noise = random.Random(0)  # so that the compressed data is not one block
    pages = [(t, page + f"# {noise.random()}\n" * 200) for t, page in Server().scrapes()]
    packed = gzip.compress("".join(f"# scrape_unix_ms {t}\n{page}" for t, page in pages).encode())
    path = tmp_path / "series.prom.gz"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    diagnosis = diagnose(SeriesFile(path), {})
    assert diagnosis.findings == ()
    assert any("damaged gzip data" in note for note in diagnosis.notes)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_never_raises_anything_else(data: st.DataObject, tmp_path: Path) -> None:
    text = bytearray("".join(f"# scrape_unix_ms {t}\n{p}" for t, p in Server().scrapes(count=3)).encode())
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
    path = tmp_path / "damaged.prom"
    path.write_bytes(bytes(text))
    try:
        diagnosis = diagnose(SeriesFile(path), {})
    except SourceError:
        return
    assert diagnosis.to_json()["schema"]


def test_values_that_do_not_move_are_no_traffic() -> None:
    still = Server()
    pages = [(1000 * number, still.page(3, 0.0)) for number in range(5)]
    diagnosis = diagnose(Scrapes(pages), {})
    assert diagnosis.findings == ()
    assert not diagnosis.idle  # eight requests are running; they only got no token


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("waiting", [1e300, 1e308, -1e308, float("inf")])
def test_negative_and_huge_figures_are_survived(waiting: float) -> None:
    odd = Server(running=-3, waiting=waiting, kv=50, counters={"finished": 1e18})
    assert json.dumps(diagnose(Scrapes(odd.scrapes()), {}).to_json(), allow_nan=False)


Scraped = list[tuple[int, str]]
Damage = Callable[[Scraped, random.Random], Scraped]


def per_page(change: Callable[[str, random.Random], str]) -> Damage:
    return lambda scraped, chance: [(at, change(page, chance)) for at, page in scraped]


def some_pages(change: Callable[[str, random.Random], str]) -> Damage:
    """One scrape in four."""
    return lambda scraped, chance: [
        (at, change(page, chance) if chance.random() < 0.25 else page) for at, page in scraped
    ]


def without_lines(page: str, chance: random.Random) -> str:
    lines = page.splitlines(keepends=True)
    return "".join(line for line in lines if chance.random() > 0.2)


def cut_off(page: str, chance: random.Random) -> str:
    return page[: chance.randrange(len(page))]


def one_metric(change: Callable[[str], str]) -> Damage:
    """The same metric in every scrape."""

    def damage(scraped: Scraped, chance: random.Random) -> Scraped:
        names = sorted(name for metric in METRICS.values() for name in metric.names if ":" in name)
        chosen = chance.choice(names)
        pattern = re.compile(rf"^{chosen}(_bucket|_sum|_count)?[{{ ].*\n", re.MULTILINE)
        return [(at, pattern.sub(lambda match: change(match[0]), page)) for at, page in scraped]

    return damage


def reset(scraped: Scraped, chance: random.Random) -> Scraped:
    """The second half is a server that started anew: the pages of the beginning again."""
    half = len(scraped) // 2
    return scraped[:half] + [(at, page) for (at, _), (_, page) in zip(scraped[half:], scraped, strict=False)]


def gaps(scraped: Scraped, chance: random.Random) -> Scraped:
    first = chance.randrange(1, len(scraped) // 2)
    return scraped[:first] + scraped[first + chance.randrange(1, len(scraped) // 3) :]


def twice(scraped: Scraped, chance: random.Random) -> Scraped:
    return sorted([*scraped, *chance.sample(scraped, len(scraped) // 3)])


DAMAGES: dict[str, Damage] = {
    "a metric renamed": one_metric(lambda line: "other:" + line.partition(":")[2]),
    "a metric missing": one_metric(lambda line: ""),
    "a metric of NaN": one_metric(lambda line: line.rsplit(" ", 1)[0] + " NaN\n"),
    "a metric twice": one_metric(lambda line: line + line),
    "lines lost here and there": some_pages(without_lines),
    "scrapes cut off": some_pages(cut_off),
    "scrapes empty": some_pages(lambda page, chance: ""),
    "scrapes of NaN": some_pages(lambda page, chance: re.sub(r" \S+$", " NaN", page, flags=re.M)),
    "scrapes of another locale": some_pages(
        lambda page, chance: re.sub(r"(\d)\.(\d+)$", r"\1,\2", page, flags=re.M)
    ),
    "a restart": reset,
    "a gap": gaps,
    "scrapes twice": twice,
}

HELD = {
    "healthy": Server(),
    "capped": Server(running=2, waiting=9, kv=0.02),
    "overloaded": Server(
        running=128,
        waiting=lambda t: 150 * t,
        histograms={
            "itl": {0.35: 1000},
            "ttft": {8.1: 10},
            "queue_time": {8.0: 10},
            "tpot": {0.35: 10},
            "prefill_time": {0.8: 10},
        },
    ),
    "preempting": Server(running=16, waiting=6, kv=0.99, counters={"preemptions": 3}),
    "speculating": Server(
        running=16, counters={"drafts": 1000, "draft_tokens": 5000, "accepted_tokens": 200}
    ),
}
"""Synthetic servers, so that this runs without the recordings."""
FLAGS = {"max_num_seqs": 2}


def judged(scraped: Scraped, name: str) -> Diagnosis:
    return diagnose(Scrapes(scraped), FLAGS if name == "capped" else {})


@cache
def undamaged(name: str) -> frozenset[str]:
    return frozenset(found(judged(HELD[name].scrapes(count=9), name)))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(HELD)),
    damages=st.lists(st.sampled_from(sorted(DAMAGES)), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_damage_upon_damage_finds_nothing_that_is_not_there(name: str, damages: list[str], seed: int) -> None:
    chance, scraped = random.Random(seed), HELD[name].scrapes(count=9)
    for damage in damages:
        scraped = DAMAGES[damage](scraped, chance)
    try:
        diagnosis = judged(scraped, name)
    except SourceError:
        return
    assert found(diagnosis) <= undamaged(name), damages
    assert json.dumps(diagnosis.to_json(), allow_nan=False)


def of_instance(server: Server, name: str) -> Scraped:
    labels = {"engine": "0", "model_name": "m", "instance": name}
    return replace(server, labels=labels).scrapes(count=12)


def joined(*parts: Scraped) -> Scraped:
    return [(pages[0][0], "".join(text for _, text in pages)) for pages in zip(*parts, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_lines_lost_in_most_scrapes_of_one_instance_are_no_finding_and_leave_the_others(seed: int) -> None:
    chance = random.Random(seed)
    torn = per_page(without_lines)(of_instance(Server(), "a:1"), chance)
    found = diagnose(Scrapes(joined(torn, of_instance(HELD["capped"], "b:1"))), FLAGS)
    assert {(f.id, f.instance) for f in found.findings if f.severity != "info"} == {("seq-cap", "b:1")}
    assert any("of a:1 lack series that others have" in note for note in found.notes)


def test_instances_that_were_scraped_in_turn_are_whole() -> None:
    parts = [of_instance(HELD["capped"], name) for name in ("a:1", "b:1")]
    turns = [parts[number % 2][number] for number in range(12)]
    found = diagnose(Scrapes(turns), FLAGS)
    assert {f.instance for f in found.findings if f.id == "seq-cap"} == {"a:1", "b:1"}
    assert found.notes == ()
