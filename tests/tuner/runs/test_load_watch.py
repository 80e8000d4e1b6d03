"""When a load on a server that is somebody else's ends."""

import threading

import pytest

from tuner.runs import load_watch
from tuner.runs.load_watch import LASTING_POLLS, MOST_FAILED, LoadWatch


def page(waiting: float, errors: float = 0.0) -> str:
    return (
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        f'vllm:request_success_total{{engine="0",finished_reason="error"}} {errors}\n'
        'vllm:request_success_total{engine="0",finished_reason="length"} 1000\n'
    )


class Server:
    """Says one page after the other, and ends the watch's load after the last one."""

    def __init__(self, *pages: str) -> None:
        self.pages, self.over = list(pages), threading.Event()

    def scrape(self) -> str:
        if len(self.pages) == 1:
            self.over.set()
            return self.pages[0]
        return self.pages.pop(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_watch, "POLL_SECONDS", 0.001)


def watched(server: Server, watch: LoadWatch) -> bool:
    """Whether the load was ended."""
    stop = threading.Event()
    with watch.watching(server.scrape, stop):
        while not (stop.is_set() or server.over.is_set()):
            stop.wait(0.001)
        server.over.wait(1.0 if not stop.is_set() else 0.0)
    return stop.is_set()


def test_a_queue_that_was_there_before_is_no_reason() -> None:
    watch = LoadWatch()
    assert not watched(Server(*[page(5)] * 6), watch)
    assert watch.reason == ""


def test_a_queue_that_rises_ends_the_load_and_the_next() -> None:
    watch = LoadWatch()
    assert watched(Server(page(5), *[page(6)] * (LASTING_POLLS + 1)), watch)
    assert watch.reason == "6 requests wait in the server's queue, 5 did before the load"
    assert watched(Server(page(0)), watch)


def test_for_a_moment_every_request_waits() -> None:
    assert not watched(Server(page(0), page(1), page(0), page(1), page(0), page(0)), LoadWatch())


def test_what_was_found_is_from_before_the_first_load() -> None:
    watch = LoadWatch()
    assert not watched(Server(page(0), page(0)), watch)
    assert watched(Server(*[page(3)] * 6), watch)


def test_errors_of_the_server_end_the_load() -> None:
    watch = LoadWatch()
    assert not watched(Server(page(0, 7), page(0, 7 + MOST_FAILED), page(0, 7 + MOST_FAILED)), watch)
    assert watched(Server(page(0, 7), page(0, 8 + MOST_FAILED), page(0, 8 + MOST_FAILED)), watch)
    assert watch.reason == f"the server ended {1 + MOST_FAILED} requests with an error"


def test_requests_that_fail_end_the_load() -> None:
    watch, stop = LoadWatch(), threading.Event()
    watch.failed(MOST_FAILED, stop)
    assert not stop.is_set()
    watch.failed(MOST_FAILED + 1, stop)
    assert stop.is_set()
    assert watch.reason == f"{MOST_FAILED + 1} requests failed"


def test_so_does_the_end_of_the_budget() -> None:
    left = iter([9.0, 9.0, 0.0])
    watch = LoadWatch(lambda: next(left, 0.0))
    assert watched(Server(page(0), page(0), *[page(0)] * 50), watch)
    assert watch.reason == "the budget is spent"


def test_a_server_without_metrics_is_watched_by_its_answers_alone() -> None:
    assert not watched(Server("", "", ""), LoadWatch())
