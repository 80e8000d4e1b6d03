"""Which study a call of ``vtune optimize`` begins or resumes, and where that is kept."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import optuna

from loadgen.target import Target
from servers.connection import KEY
from servers.slo.objective import parse_slo
from tuner.job.job import Job, UsageError
from tuner.job.options import Options, Place, option_of
from tuner.session.new_job import RUNS, RequestedJob, requested_job
from tuner.study.budget import parse_seconds
from tuner.study.target import make_target
from tuner.workers.storage import (
    Heartbeat,
    WorkerStorage,
    create_study,
    has_job,
    has_study,
    mask,
    open_storage,
    open_study,
)


@dataclass(frozen=True)
class Begun:
    """A study with its job."""

    record: optuna.Study
    job: Job
    resumed: bool
    """Whether it was there already."""


@dataclass(frozen=True)
class StudySession:
    """One call of ``vtune optimize``, its options resolved."""

    name: str
    """The study's."""
    place: Place
    asked: RequestedJob
    resumes_only: bool
    """Whether nothing but the study's name and place was given."""
    start_timeout: float
    """Seconds."""

    @classmethod
    def of(cls, options: Options) -> StudySession:
        """Creates nothing, so that a typing error leaves nothing behind.

        Raises UsageError, and what ``requested_job`` raises.
        """
        place = options.place
        name = place.study or time.strftime("optimize-%Y%m%d-%H%M%S")
        if not name.isprintable():  # nor are halves of surrogates, which stand for bytes that are no UTF-8
            raise UsageError(f"--study {name!a}: not a printable name. Choose another.")
        database = _database(place.out or RUNS / name)
        if options.resumes_only and place.storage is None and not database.is_file():
            raise _no_such_study(name, place)
        start_timeout = parse_seconds(place.start_timeout, "--start-timeout")
        return cls(name, place, requested_job(options), options.resumes_only, start_timeout)

    @property
    def out(self) -> Path:
        return self.place.out or RUNS / self.name

    def storage_url(self, out: Path) -> str:
        """The storage that is given; else a database in ``out``."""
        return self.place.storage or f"sqlite:///{_database(out).resolve()}"

    @contextlib.contextmanager
    def storage(self, out: Path, shared: bool) -> Iterator[optuna.storages.RDBStorage | WorkerStorage]:
        """``shared``: by several workers. Raises StorageError."""
        storage = open_storage(self.storage_url(out), Heartbeat() if shared else None)
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()

    def target(self, job: Job, out: Path) -> Target:
        """What the study's server is opened by. Raises TargetError."""
        return make_target(job, out, self.start_timeout, self.asked.connection)

    def begin(self, storage: optuna.storages.BaseStorage) -> Begun:
        """The study with its job. Of two workers that create it, one does.

        Raises UsageError where there is none and nothing but its name was given, which is how one is resumed;
        and for options that contradict those that it was begun with.
        """
        objective = parse_slo(self.asked.job.slo).objective
        if self.resumes_only and not has_study(storage, self.name):
            raise _no_such_study(self.name, self.place)
        made = create_study(storage, self.name, objective)
        record = made or open_study(storage, self.name, objective)
        resumed = made is None and has_job(record)
        job = _resumed_job(record, self.asked) if resumed else self.asked.job
        record.set_user_attr("job", job.to_json())
        return Begun(record, job, made is None)

    @property
    def resume_command(self) -> str:
        words = ["vtune", "optimize", "--study", self.name]
        if self.place.out is not None:
            words += ["--out", str(self.place.out)]
        if self.place.storage is not None:
            words += ["--storage", mask(self.place.storage)]
        if self.place.workers is not None:
            words += ["--workers", str(self.place.workers)]
        return shlex.join(words)


def _database(out: Path) -> Path:
    """Of a study that has no --storage."""
    return out / "study.db"


def _no_such_study(name: str, place: Place) -> UsageError:
    where = mask(place.storage) if place.storage else place.out or RUNS / name
    return UsageError(
        f"--study {name}: there is no such study in {where}. Give the --out or --storage that it was begun "
        "with; or, to begin one of this name, what to optimize, e.g. --slo itl."
    )


_CHANGEABLE = {"budget", "trials"}
"""Fields of a job that may be stated anew when its study is resumed."""


def _resumed_job(record: optuna.Study, asked: RequestedJob) -> Job:
    """The study's own job, with the budget and the trials that are asked for now. Raises UsageError."""
    saved = record.user_attrs.get("job")
    if saved is None:
        raise UsageError(
            f"--study {record.study_name}: exists, but was not made by vtune. Choose another name."
        )
    job = Job.from_json(saved)
    if job.login and not asked.connection.logs_in:
        raise UsageError(
            f"--study {record.study_name} was begun with a key or another login, which no study keeps. "
            f"Give it again: --api-key-file FILE, --api-key or {KEY}; or --user, or --header."
        )
    ours, theirs = asked.job.to_json(), job.to_json()
    differing = [name for name in sorted(asked.stated - _CHANGEABLE) if ours[name] != theirs[name]]
    if differing:
        words = ", ".join(map(option_of, differing))
        raise UsageError(
            f"--study {record.study_name} was begun with other values of {words}. Leave them out to resume "
            "it, or choose another --study name."
        )
    if not asked.stated & _CHANGEABLE:
        return job
    return replace(job, budget=asked.job.budget, trials=asked.job.trials)
