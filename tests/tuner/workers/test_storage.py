"""The storage's URL and its errors, and patience with a database that is away, on a clock of the test's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import sqlalchemy.exc as exc
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import TrialState

from servers.slo.objective import parse_slo
from tuner.output.folder import OutputError, locked
from tuner.workers.storage import (
    Heartbeat,
    RetryPolicy,
    SharedStorage,
    StorageError,
    create_study,
    has_job,
    is_away,
    mask,
    open_storage,
    open_study,
)

OBJECTIVE = parse_slo("itl").objective


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture
def time_() -> Time:
    return Time()


@pytest.fixture
def retry(time_: Time) -> RetryPolicy:
    return RetryPolicy(seconds=30.0, sleep=time_.sleep, clock=lambda: time_.now)


def gone(state: Any = None, invalidated: bool = False) -> Any:
    """What Optuna raises when the database of PostgreSQL does not answer."""
    error = StorageInternalError("commit")
    original: Any = SimpleNamespace(sqlstate=state)
    error.__cause__ = exc.OperationalError("SELECT 1", {}, original, connection_invalidated=invalidated)
    return error


def failing(times: int, error: Any) -> Callable[..., Any]:
    """An operation that fails so many times."""
    calls = iter(range(times))

    def operation() -> str:
        for _ in calls:
            raise error
        return "done"

    return operation


def test_a_database_that_comes_back_is_waited_for(retry: RetryPolicy, time_: Time) -> None:
    notes: list[str] = []
    retry.notify = notes.append
    assert retry.call(failing(5, gone())) == "done"
    assert time_.naps == sorted(time_.naps)
    assert max(time_.naps) <= retry.longest_pause
    assert notes == [
        "the database does not answer: trying again for up to 30 s",
        "the database answers again",
    ]


def test_one_that_does_not_come_back_is_given_up(retry: RetryPolicy, time_: Time) -> None:
    with pytest.raises(StorageInternalError):
        retry.call(failing(1000, gone()))
    assert 20 < time_.now <= 30


def test_a_user_who_wants_an_end_is_not_kept(retry: RetryPolicy, time_: Time) -> None:
    retry.stopping = lambda: True
    with pytest.raises(StorageInternalError):
        retry.call(failing(1000, gone()))
    assert time_.now <= 5


def test_a_second_interrupt_ends_the_wait_at_once(retry: RetryPolicy) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    retry.sleep = interrupted
    with pytest.raises(KeyboardInterrupt):
        retry.call(failing(1000, gone()))


def test_what_will_not_pass_is_not_waited_for(retry: RetryPolicy, time_: Time) -> None:
    with pytest.raises(StorageInternalError):
        retry.call(failing(1000, gone(state="53100")))  # its disk is full
    assert time_.naps == []


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (gone().__cause__, True),
        (gone(state="57P01").__cause__, True),
        (gone(state="08006").__cause__, True),
        (gone(state="42P01").__cause__, False),
        (gone(state="42P01", invalidated=True).__cause__, True),
        (exc.IntegrityError("INSERT", {}, Exception()), False),
        (exc.TimeoutError(), True),
        (None, False),
    ],
)
def test_which_errors_pass(error: Any, away: bool) -> None:
    assert is_away(error) is away


def test_sqlite_is_waited_for_when_locked_and_not_when_the_disk_is_full() -> None:
    import sqlite3

    def failure(text: str) -> Any:
        return exc.OperationalError("INSERT", {}, sqlite3.OperationalError(text))

    assert is_away(failure("database is locked"))
    assert not is_away(failure("database or disk is full"))


def test_every_operation_of_a_storage_is_retried() -> None:
    """``get_storage``, which puts Optuna's cache before an RDB, is no documented part of its interface: look
    at it again with another version of Optuna."""
    assert optuna.__version__.split(".")[:2] == ["5", "0"]
    cached = optuna.storages.get_storage(optuna.storages.RDBStorage("sqlite://"))
    assert not isinstance(cached, optuna.storages.RDBStorage)
    own = optuna.storages.BaseStorage.__abstractmethods__ - vars(SharedStorage).keys()
    assert not own


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Any]:
    storage = open_storage(f"sqlite:///{tmp_path / 's.db'}", Heartbeat())
    yield storage
    storage.close()


def test_a_change_that_was_made_before_its_reply_was_lost_is_ours(
    shared: Any, time_: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study(shared, "s", OBJECTIVE)
    trial = study.ask()
    shared.retry = RetryPolicy(sleep=time_.sleep, clock=lambda: time_.now)
    original = optuna.storages.RDBStorage.set_trial_state_values
    replies = iter([gone()])

    def unheard(self: optuna.storages.RDBStorage, *arguments: Any, **options: Any) -> Any:
        done = original(self, *arguments, **options)
        for error in replies:
            raise error
        return done

    monkeypatch.setattr(optuna.storages.RDBStorage, "set_trial_state_values", unheard)
    study.tell(trial, 1.0)
    assert study.trials[0].state == TrialState.COMPLETE
    assert len(time_.naps) == 1
    study_id = shared.get_study_id_from_name("s")
    number = shared.get_trial_id_from_study_id_trial_number(study_id, trial.number)
    with pytest.raises(UpdateFinishedTrialError):  # another worker's change is not ours
        shared.set_trial_state_values(number, TrialState.FAIL)


def test_of_two_that_create_a_study_one_does(shared: Any) -> None:
    assert create_study(shared, "s", OBJECTIVE) is not None
    assert create_study(shared, "s", OBJECTIVE) is None
    assert open_study(shared, "s", OBJECTIVE).study_name == "s"


def test_a_study_whose_creator_died_before_it_had_said_its_job_is_taken_over(
    shared: Any, time_: Time
) -> None:
    study = open_study(shared, "s", OBJECTIVE)
    assert not has_job(study, time_.sleep)
    assert time_.now == pytest.approx(5)
    study.set_user_attr("job", {})
    assert has_job(study, time_.sleep)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://u:geheim@h/d", "postgresql+psycopg://u:***@h/d"),
        ("postgresql+psycopg://u:ge%2Fheim@h:5/d?sslmode=require", "postgresql+psycopg://u:***@h:5/d?sslmode=require"),
        ("postgresql://u:geheim@h:port/d", "postgresql://***@h:port/d"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("nonsense", "nonsense"),
    ],
)  # fmt: skip
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert mask(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://u:geheim@127.0.0.1:1/d",
        "postgresql+psycopg://u@127.0.0.1:1/d?password=geheim",
        "postgresql://u:geheim@127.0.0.1:port/d",
        "postgresql+psycopg2://u:geheim@127.0.0.1:1/d",
        "nodatabase://u:geheim@127.0.0.1:1/d",
    ],
)
def test_no_password_is_in_an_error(url: str) -> None:
    with pytest.raises(StorageError) as caught:
        open_storage(url, Heartbeat())
    said = str(caught.value)
    assert "geheim" not in said
    assert "--storage" in said
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_driver_that_is_not_installed_is_named_with_its_remedy() -> None:
    with pytest.raises(StorageError, match=r"pip install 'vtune-llm\[postgres\]'"):
        open_storage("postgresql+psycopg2://u@127.0.0.1:1/d", Heartbeat())


def test_where_workers_write(tmp_path: Path) -> None:
    with locked(tmp_path / "out", shared=True) as first, locked(tmp_path / "out", shared=True) as second:
        assert (first, second) == (tmp_path / "out", tmp_path / "out" / "worker-2")
        with pytest.raises(OutputError, match="in use by another vtune"), locked(tmp_path / "out"):
            pass
        (second / "report.md").touch()
    assert (tmp_path / "out" / "worker-2" / "report.md").exists()


def test_a_directory_in_which_nothing_was_written_is_not_left(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "s"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert list((tmp_path / "mine").iterdir()) == []
