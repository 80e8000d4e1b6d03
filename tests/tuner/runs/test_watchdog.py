import threading

from tuner.runs.watchdog import Watchdog


def wait(event: threading.Event) -> None:
    assert event.wait(60), "the timer never ran out"


def test_an_answer_renews_patience() -> None:
    stop = threading.Event()
    with Watchdog(3600, stop, renewed=True) as watchdog:
        first = watchdog._timer
        watchdog.answered(1)
        second = watchdog._timer
        assert first.finished.is_set()  # it was cancelled
        assert second is not first
        watchdog.answered(1)  # nothing new
        assert watchdog._timer is second
    assert not stop.is_set()


def test_patience_ends_with_the_last_answer() -> None:
    stop = threading.Event()
    with Watchdog(0.05, stop, renewed=True) as watchdog:
        watchdog.answered(1)
        wait(stop)
    assert watchdog.exhausted


def test_a_load_of_so_many_seconds_is_not_excused() -> None:
    stop = threading.Event()
    with Watchdog(0.05, stop, renewed=False) as watchdog:
        first = watchdog._timer
        watchdog.answered(1)
        assert watchdog._timer is first
        wait(stop)
    assert watchdog.exhausted


def test_a_load_that_ends_in_time_is_not_stopped() -> None:
    stop = threading.Event()
    with Watchdog(3600, stop, renewed=True) as watchdog:
        watchdog.answered(3)
    assert watchdog._timer.finished.is_set()
    assert not watchdog.exhausted
    assert not stop.is_set()
