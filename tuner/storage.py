"""Where a study is kept: an RDB behind a URL, which one worker or many on any machines share."""

from __future__ import annotations

import optuna

from tuner.slo import Objective


class StorageError(Exception):
    """The storage or the study cannot be used. The message says what to do."""


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """The storage behind an RDB URL such as ``sqlite:///studies.db``. Raises StorageError."""
    try:
        return optuna.storages.RDBStorage(url)
    except Exception as error:  # SQLAlchemy, the driver or Alembic, each with errors of its own
        cause = str(error).strip().splitlines()[0]
        raise StorageError(
            f"--storage {url}: cannot be opened ({cause}). Give e.g. sqlite:///studies.db."
        ) from None


def open_study(storage: optuna.storages.BaseStorage, name: str, objective: Objective) -> optuna.Study:
    """Create the study, or load it where it exists."""
    return optuna.create_study(
        storage=storage, study_name=name, direction=objective.direction, load_if_exists=True
    )
