import io
from typing import Any

import pytest
from rich.console import Console

from loadgen.plan.load_policy import Progress
from tuner.output.display import LiveObserver, PlainObserver, make_observer
from tuner.runs.result import TrialResult


def tell_a_story(observer: Any) -> Any:
    result = TrialResult(3, {}, "sampler", "failed", "out_of_memory")
    with observer:
        observer.phase("search")
        observer.note("a start costs [5.0] s")
        observer.budget(60.0, 600.0)
        observer.trial_begins(3, "max_num_seqs 128 -> 16", "sampler")
        observer.step("load 1 of 2", 8.0)
        observer.load(Progress(elapsed=2.0, sent=5, finished=3, failed=1, planned=8))
        observer.trial_ends(result, "failed: out_of_memory")
        observer.incumbent(result, "ITL ES99 138 ms")
        return observer


def test_without_a_terminal_there_is_a_line_an_event() -> None:
    out = io.StringIO()
    observer = tell_a_story(make_observer(Console(file=out), "title"))
    assert isinstance(observer, PlainObserver)
    lines = out.getvalue().splitlines()
    assert [line.split("] ", 1)[1] for line in lines] == [
        "== search",
        "a start costs [5.0] s",
        "trial 3 (sampler): max_num_seqs 128 -> 16",
        "  load 1 of 2, 8 s",
        "  failed: out_of_memory",
        "  best so far: trial 3",
    ]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_there_is_a_panel() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    observer = make_observer(console, "vtune optimize: s")
    assert isinstance(observer, LiveObserver)
    tell_a_story(observer)
    observer.step("load 1 of 2", 8.0)
    observer.load(Progress(elapsed=2.0, sent=5, finished=3, failed=1, planned=8))
    shown = io.StringIO()
    Console(file=shown, width=120).print(observer._render())
    for expected in (
        "vtune optimize: s",
        "search",
        "trial 3 (sampler): max_num_seqs 128 -> 16",
        "5 sent, 3 answered, 1 failed",
        "of 10 min",
        "trial 3: ITL ES99 138 ms",
        "3 failed: out_of_memory",
    ):
        assert expected in shown.getvalue()


def test_a_terminal_that_cannot_be_drawn_on_gets_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, _environ={"TERM": "dumb"})
    assert isinstance(make_observer(console, "vtune optimize: s"), PlainObserver)


@pytest.mark.parametrize("total", [None, 600.0])
def test_a_panel_before_anything_has_happened(total: float | None) -> None:
    observer = LiveObserver(Console(file=io.StringIO()), "t")
    observer.budget(0.0, total)
    shown = io.StringIO()
    Console(file=shown, width=80).print(observer._render())
    assert "nothing measured yet" in shown.getvalue()
