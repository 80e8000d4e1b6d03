import signal

import pytest

from tuner.interrupts import Interrupts


def interrupted_load(*numbers, error=None):
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
    except KeyboardInterrupt:
        happened.append("KeyboardInterrupt")
    return happened


def test_outside_a_load_it_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_during_a_load_the_load_is_stopped_and_comes_to_its_end(number):
    assert interrupted_load(number) == ["stopped", "ended", "KeyboardInterrupt"]


def test_a_second_one_does_not_wait_for_the_load():
    assert interrupted_load(signal.SIGINT, signal.SIGINT) == ["stopped", "KeyboardInterrupt"]


def test_an_error_of_the_load_does_not_hide_the_interrupt():
    assert interrupted_load(signal.SIGINT, error=ValueError()) == ["stopped", "KeyboardInterrupt"]


def test_without_a_signal_nothing_happens():
    assert interrupted_load() == ["ended"]


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
