"""The directory that a process writes to, which no other may write to at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from servers.errors import UserError

LOCK = ".lock"
MAX_WORKERS = 1000


class OutputError(UserError):
    """The directory cannot be used. The message says what to do."""


@contextmanager
def locked(out: Path, shared: bool = False) -> Iterator[Path]:
    """``out``, created and held by a lock that ends with the process, however that ends.

    Where workers share a study, one that finds ``out`` taken gets ``out/worker-2``, or the next that is free.
    A directory that was made here and in which nothing was written is removed. Raises OutputError.
    """
    made = [place for place in (out, *out.parents) if not place.exists()]
    places = itertools.chain([out], (out / f"worker-{number}" for number in range(2, MAX_WORKERS)))
    for place in places if shared else [out]:
        lock = _open(place)
        if _holds(lock):
            break
        lock.close()
    else:
        raise OutputError(f"{out} is in use by another vtune. Wait for it, or choose another --study.")
    with lock:
        try:
            yield place
        finally:
            if [entry.name for entry in place.iterdir()] == [LOCK]:
                (place / LOCK).unlink()
                for empty in dict.fromkeys((place, *made) if place != out or made else made):
                    with contextlib.suppress(OSError):  # another process has written to it
                        empty.rmdir()


def _open(place: Path) -> TextIO:
    try:
        place.mkdir(parents=True, exist_ok=True)
        return open(place / LOCK, "w")
    except OSError as error:
        raise OutputError(
            f"--out {place}: {error.strerror}. Choose a directory that can be written."
        ) from None


def _holds(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
