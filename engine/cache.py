"""The cache folder: fetched models and compiled kernels, made once and by one process at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import EngineUserError


class FetchError(EngineUserError):
    """What belongs in the cache cannot be fetched or made. The message says why, and what to do."""


def cache_dir() -> Path:
    """``$VTUNE_CACHE``, or ``~/.cache/vtune``. Raises FetchError for a user without a home."""
    try:
        return Path(os.environ.get("VTUNE_CACHE") or "~/.cache/vtune").expanduser()
    except RuntimeError as error:
        raise FetchError(
            f"no place for the cache: {error} Set VTUNE_CACHE to a writable directory."
        ) from None


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock that the system drops when the process dies. ``on_wait`` is called while another
    process holds it."""
    import fcntl

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
