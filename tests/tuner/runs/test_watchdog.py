import threading

from tuner.runs.watchdog import Patience


def wait(event: threading.Event) -> None:
    assert event.wait(60), "the timer never ran out"


def test_an_answer_renews_patience() -> None:
    stop = threading.Event()
    with Patience(3600, stop, renewed=True) as patience:
        first = patience._timer
        patience.answered(1)
        second = patience._timer
        assert first.finished.is_set()  # it was cancelled
        assert second is not first
        patience.answered(1)  # nothing new
        assert patience._timer is second
    assert not stop.is_set()


def test_patience_ends_with_the_last_answer() -> None:
    stop = threading.Event()
    with Patience(0.05, stop, renewed=True) as patience:
        patience.answered(1)
        wait(stop)
    assert patience.exhausted


def test_a_load_of_so_many_seconds_is_not_excused() -> None:
    stop = threading.Event()
    with Patience(0.05, stop, renewed=False) as patience:
        first = patience._timer
        patience.answered(1)
        assert patience._timer is first
        wait(stop)
    assert patience.exhausted


def test_a_load_that_ends_in_time_is_not_stopped() -> None:
    stop = threading.Event()
    with Patience(3600, stop, renewed=True) as patience:
        patience.answered(3)
    assert patience._timer.finished.is_set()
    assert not patience.exhausted
    assert not stop.is_set()
