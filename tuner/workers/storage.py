"""Where a study is kept: an RDB behind a URL, which one worker or many on any machines share."""

from __future__ import annotations

import copy
import math
import re
import time
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event, exc
from sqlalchemy.engine import URL, make_url

from servers.errors import UserError
from servers.slo.objective import Objective

SQLITE_BUSY_SECONDS = 60
CONNECT_SECONDS = 10
MAX_AGE_SECONDS = 0.5
"""Of what a worker knows of what the others measure."""
_ANSWERS = {  # a host that is gone without a word is noticed within half a minute
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
STOPPING_SECONDS = 5.0
_HIDDEN = "***"
_FORMS = "Give e.g. sqlite:///studies.db, or postgresql+psycopg://USER@HOST/DATABASE for many machines."
_JOB_SECONDS, _JOB_POLLS = 5.0, 25
"""How long the creator of a study may take to say what it is for."""
_OPENINGS = 5
_GONE_SQLSTATES = ("08", "57P")
"""Classes of PostgreSQL's errors that pass: connection exceptions, a server that stops or starts."""


class StorageError(UserError):
    """The storage or the study cannot be used. The message says what to do."""


@dataclass(frozen=True)
class Heartbeat:
    """How workers know of each other that they live, in seconds."""

    interval: float = 10.0
    grace: float = 60.0
    """A worker that has not been heard of for so long is taken for dead, and its trial is retried."""


@dataclass
class RetryPolicy:
    """How long an operation waits for a database that does not answer, and between which attempts."""

    seconds: float = 600.0
    pause: float = 0.5
    longest_pause: float = 10.0
    notify: Callable[[str], None] = field(default=lambda text: None)
    stopping: Callable[[], bool] = field(default=lambda: False)
    """Whether the user wants an end: then STOPPING_SECONDS are enough."""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def call(self, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """``operation``'s result, tried again while the database is away. Raises its last error."""
        begun, pause, told = self.clock(), self.pause, False
        while True:
            try:
                result = operation(*arguments, **options)
            except StorageInternalError as error:
                limit = min(self.seconds, STOPPING_SECONDS) if self.stopping() else self.seconds
                if not is_away(error.__cause__) or self.clock() - begun + pause > limit:
                    raise
                if not told:
                    self.notify(f"the database does not answer: trying again for up to {self.seconds:.0f} s")
                    told = True
            else:
                if told:
                    self.notify("the database answers again")
                return result
            self.sleep(pause)
            pause = min(1.5 * pause, self.longest_pause)


def is_away(error: BaseException | None) -> bool:
    """Whether a database may answer later: it restarts, is out of reach, or is locked by another worker."""
    if not isinstance(error, exc.DBAPIError):
        return isinstance(error, exc.TimeoutError)  # no connection of the pool became free
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return str(state).startswith(_GONE_SQLSTATES)
    if not isinstance(error, exc.OperationalError):
        return False
    text = str(error.orig)
    return "database is locked" in text if type(error.orig).__module__ == "sqlite3" else "disk" not in text


def _retried(name: str) -> Callable[..., Any]:
    """A public operation of a storage, which waits for a database that is away."""

    def operation(self: SharedStorage, *arguments: Any, **options: Any) -> Any:
        if not name.startswith("get_"):
            self.refresh()
        return self.retry.call(getattr(self._cached, name), *arguments, **options)

    return operation


class SharedStorage(optuna.storages.BaseStorage):
    """An RDB that many workers use at once: it waits for a database that is away."""

    def __init__(self, rdb: optuna.storages.RDBStorage, retry: RetryPolicy, max_age: float) -> None:
        """``max_age``: seconds for which trials that were read are taken to be as they were, unless this
        process writes. A decision looks at the trials some thirty times, and each time costs a dozen queries.
        """
        self.engine, self.retry = rdb.engine, retry
        self._cached = optuna.storages.get_storage(rdb)
        self._max_age = max_age
        self._read: dict[int, tuple[float, list[FrozenTrial]]] = {}

    def refresh(self) -> None:
        """Let the next look at the trials see what other workers did until now."""
        self._read.clear()

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        now = self.retry.clock()
        read_at, trials = self._read.get(study_id, (-math.inf, []))
        if now >= read_at + self._max_age:
            trials = self.retry.call(self._cached.get_all_trials, study_id, deepcopy=False)
            self._read[study_id] = now, trials
        chosen = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(chosen) if deepcopy else chosen

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """As the base class. A change that was committed before its connection broke is known for ours."""
        attempts = 0
        self.refresh()

        def attempt() -> bool:
            nonlocal attempts
            attempts += 1
            try:
                return bool(self._cached.set_trial_state_values(trial_id, state, values))
            except UpdateFinishedTrialError:
                if attempts > 1 and self.get_trial(trial_id).state == state:
                    return True
                raise

        return bool(self.retry.call(attempt))

    create_new_study = _retried("create_new_study")
    delete_study = _retried("delete_study")
    set_study_user_attr = _retried("set_study_user_attr")
    set_study_system_attr = _retried("set_study_system_attr")
    get_study_id_from_name = _retried("get_study_id_from_name")
    get_study_name_from_id = _retried("get_study_name_from_id")
    get_study_directions = _retried("get_study_directions")
    get_study_user_attrs = _retried("get_study_user_attrs")
    get_study_system_attrs = _retried("get_study_system_attrs")
    get_all_studies = _retried("get_all_studies")
    create_new_trial = _retried("create_new_trial")
    set_trial_param = _retried("set_trial_param")
    set_trial_intermediate_value = _retried("set_trial_intermediate_value")
    set_trial_user_attr = _retried("set_trial_user_attr")
    set_trial_system_attr = _retried("set_trial_system_attr")
    get_trial = _retried("get_trial")
    get_trial_id_from_study_id_trial_number = _retried("get_trial_id_from_study_id_trial_number")

    def remove_session(self) -> None:
        self._cached.remove_session()

    def close(self) -> None:
        self.remove_session()
        self.engine.dispose()


class WorkerStorage(SharedStorage):
    """Where the configs of a study are, with the database's other side at hand: heartbeats."""

    def __init__(self, url: URL, heartbeat: Heartbeat, retry: RetryPolicy) -> None:
        self.url, self.heartbeat = url, heartbeat
        super().__init__(_open_rdb(url), retry, MAX_AGE_SECONDS)

    def open_heartbeats(self) -> optuna.storages.RDBStorage:
        """The same database, for a study whose trials live by heartbeats; it waits for nothing.

        On such a storage Optuna warns of every trial that is asked for, so the configs' study has the other.
        """
        with experimental():
            return _open_rdb(
                self.url,
                skip_compatibility_check=True,
                skip_table_creation=True,
                heartbeat_interval=self.heartbeat.interval,
                grace_period=self.heartbeat.grace,
            )


def _open_rdb(url: URL, **options: Any) -> optuna.storages.RDBStorage:
    engine: dict[str, Any] = {"pool_pre_ping": True}
    if url.get_backend_name() == "sqlite":
        engine["connect_args"] = {"timeout": SQLITE_BUSY_SECONDS}
    elif url.get_driver_name() in ("psycopg", "psycopg2"):
        engine["connect_args"] = {k: v for k, v in _ANSWERS.items() if k not in url.query}
    rdb = optuna.storages.RDBStorage(url.render_as_string(hide_password=False), engine, **options)
    if url.get_backend_name() == "sqlite":
        _serialise(rdb.engine)
    return rdb


def mask(url: str) -> str:
    """``url`` without its passwords, to be shown."""
    parsed = _parsed(url)
    if parsed is None:
        return re.sub(r"://.*@", "://***@", url) if "@" in url else url
    secret = {name: _HIDDEN for name in parsed.query if "password" in name}
    return parsed.update_query_dict(secret).render_as_string(hide_password=True)


def _parsed(url: str) -> URL | None:
    try:
        return make_url(url)
    except (exc.ArgumentError, ValueError):
        return None


def sqlite_file(url: str) -> Path | None:
    """Where an SQLite database lies; None for others, and for one in memory."""
    parsed = _parsed(url)
    if parsed is None or parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return Path(str(parsed.database))


def open_storage(
    url: str, heartbeat: Heartbeat | None = None, retry: RetryPolicy | None = None
) -> optuna.storages.RDBStorage | WorkerStorage:
    """The storage behind an RDB URL such as ``sqlite:///studies.db``. Raises StorageError.

    With a ``heartbeat`` it is a WorkerStorage, for many workers at once.
    """
    parsed = _parsed(url)
    if parsed is None:
        raise StorageError(
            f"--storage {mask(url)}: cannot be opened (it is no URL of a database; in a user's name and "
            f"password write %40 for an @, %2F for a /, %3A for a :). {_FORMS}"
        )
    for attempt in range(1, _OPENINGS + 1):
        try:
            if heartbeat is None:
                return optuna.storages.RDBStorage(url)
            return WorkerStorage(parsed, heartbeat, retry or RetryPolicy())
        except Exception as error:  # SQLAlchemy, the driver or Alembic, each with errors of its own
            if attempt < _OPENINGS and _is_race(error):
                time.sleep(0.2 * attempt)
                continue
            raise StorageError(
                f"--storage {mask(url)}: cannot be opened ({_cause(error, parsed)}). {_advice(error, parsed)}"
            ) from None
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def experimental() -> Iterator[None]:
    """Around Optuna's heartbeats, which it calls experimental; users need not be told so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _serialise(engine: sqlalchemy.Engine) -> None:
    """Let every transaction of SQLite begin by taking the write lock.

    Else one that reads a trial's state and then changes it, as Optuna does to claim a trial, is not atomic:
    Python's driver begins a transaction at the first write. (The recipe of SQLAlchemy's manual.) With a log
    that is written ahead no transaction waits for the disk, and nothing is lost when a process is killed.
    """

    @event.listens_for(engine, "connect")
    def leave_transactions_to_us(connection: Any, record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # of connections from before


def _is_race(error: Exception) -> bool:
    """Two workers made the tables at the same moment."""
    return isinstance(error, exc.IntegrityError) or (
        isinstance(error, exc.DBAPIError) and "already exists" in str(error.orig)
    )


def _cause(error: Exception, url: URL) -> str:
    """The first line that says something, without a password that a driver may quote."""
    source = error.__cause__ or error if isinstance(error, ImportError) else error
    text = next((line for line in str(source).splitlines() if line.strip()), type(error).__name__).strip()
    queried = [value for name, value in url.query.items() if "password" in name and isinstance(value, str)]
    for secret in filter(None, [url.password, *queried]):
        text = text.replace(secret, _HIDDEN)
    return text


def _advice(error: Exception, url: URL) -> str:
    if isinstance(error, ImportError):
        return "Install its driver; PostgreSQL's, psycopg, comes with: pip install 'vtune-llm[postgres]'."
    if "disk is full" in str(error):
        return "Make room there, or choose another place."
    if url.get_backend_name() != "sqlite" and isinstance(error, exc.OperationalError):
        return "Check the address, the user and the database."
    return _FORMS


def has_study(storage: optuna.storages.BaseStorage, name: str) -> bool:
    return name in optuna.get_all_study_names(storage)


def create_study(
    storage: optuna.storages.BaseStorage, name: str, objective: Objective
) -> optuna.Study | None:
    """A new study; None where it exists. Of two workers that create it at once, one does."""
    try:
        return optuna.create_study(storage=storage, study_name=name, direction=objective.direction)
    except optuna.exceptions.DuplicatedStudyError:
        return None


def open_study(storage: optuna.storages.BaseStorage, name: str, objective: Objective) -> optuna.Study:
    """Create the study, or load it where it exists."""
    return create_study(storage, name, objective) or optuna.load_study(study_name=name, storage=storage)


def has_results(study: optuna.Study) -> bool:
    """Whether a trial of it came to something."""
    return any("result" in trial.user_attrs for trial in study.get_trials(deepcopy=False))


def has_job(record: optuna.Study, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Whether the study says what it is for; False for one whose creator died before it had said so.

    A study with trials has an owner in any case.
    """
    for _ in range(_JOB_POLLS):
        if "job" in record.user_attrs or record.get_trials(deepcopy=False):
            return True
        sleep(_JOB_SECONDS / _JOB_POLLS)
    return False
