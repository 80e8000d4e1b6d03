"""Files with a schema: JSON back to the frozen dataclass that it was written from, each value checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from servers.errors import UserError

T = TypeVar("T")
_HEAD = 200
"""Bytes among which a damaged file of ours still has its schema."""


class SavedFileError(UserError):
    """A file that is missing, damaged, or of another kind or version."""


class _Marked(msgspec.Struct):
    """The one member of every saved file that says what the others are."""

    schema: Any = None


def is_ours(file: Path) -> bool:
    """Whether a file has one of our schemas, or cannot be read at all (:func:`read` says why)."""
    try:
        data = file.read_bytes()
        return msgspec.json.decode(data, type=_Marked).schema is not None
    except OSError:
        return True
    except (msgspec.DecodeError, RecursionError):
        return b'"schema"' in data[:_HEAD]


def read(kind: type[T], file: Path, schema: str, *, if_missing: str, if_unusable: str) -> T:
    """An instance of ``kind`` from ``file``; ``if_missing`` and ``if_unusable`` say what to do then.

    Raises SavedFileError; the message names the file, and the place in it.
    """
    try:
        data = file.read_bytes()
        marked = msgspec.json.decode(data, type=_Marked).schema
    except OSError as error:
        raise SavedFileError(f"{file}: {error.strerror}; {if_missing}") from None
    except msgspec.ValidationError:  # not even an object
        marked = None
    except (msgspec.DecodeError, RecursionError) as error:
        raise SavedFileError(f"{file}: not JSON ({error})") from None
    if marked != schema:
        raise SavedFileError(f"{file}: schema is {marked!r}, this version reads {schema!r}; {if_unusable}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SavedFileError(f"{file}: damaged ({error}); {if_unusable}") from None
