import signal
import sys
import time
import weakref
from typing import Any

import pytest

from tuner.runs.interrupts import Interrupts


def interrupted_load(*numbers: Any, error: Any = None) -> Any:
    """A load that gets signals; returns what happened to it."""
    happened = []
    try:
        with Interrupts() as interrupts, interrupts.load() as stop:
            for number in numbers:
                signal.raise_signal(number)
                happened.append("stopped" if stop.is_set() else "running")
            if error is not None:
                raise error
            happened.append("ended")
    except KeyboardInterrupt as error:
        happened.append(type(error).__name__)
    return happened


def test_outside_a_load_it_interrupts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_during_a_load_the_load_is_stopped_and_comes_to_its_end(number: Any) -> None:
    assert interrupted_load(number) == ["stopped", "ended", "KeyboardInterrupt"]


def test_a_second_one_does_not_wait_for_the_load() -> None:
    assert interrupted_load(signal.SIGINT, signal.SIGINT) == ["stopped", "AtOnce"]


def test_an_error_of_the_load_does_not_hide_the_interrupt() -> None:
    assert interrupted_load(signal.SIGINT, error=ValueError()) == ["stopped", "KeyboardInterrupt"]


def test_without_a_signal_nothing_happens() -> None:
    assert interrupted_load() == ["ended"]


def test_one_that_comes_where_nothing_can_be_raised_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    class Thing:
        pass

    def work() -> None:
        thing = Thing()
        watch = weakref.ref(thing, lambda reference: signal.raise_signal(signal.SIGINT))
        del thing
        assert watch() is None, "the callback was called, and what it raised is gone"
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), Interrupts():
        work()
    assert capsys.readouterr().err == ""


def test_what_else_nobody_can_see_is_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        def __del__(self) -> None:
            raise ValueError("of a finalizer")

    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with Interrupts():
        Thing()
    assert [str(lost.exc_value) for lost in told] == ["of a finalizer"]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
