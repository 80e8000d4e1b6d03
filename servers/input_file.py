"""Files that users name: read whole, or refused at once where that would hang or never end."""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
import zlib
from pathlib import Path

LARGEST = 2 << 30
"""Bytes. What is larger is a mistake, or has to be cut first."""
GZIP = b"\x1f\x8b"


def read_input(path: Path) -> bytes:
    """The bytes of a file or of a pipe (``<(zcat …)``). Raises OSError, its ``strerror`` in plain words.

    A pipe without a writer at its other end is empty; opening it in the usual way would wait for a writer.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a null byte in the name
        raise OSError(errno.EINVAL, str(error)) from None
    with io.BufferedReader(io.FileIO(descriptor), 1 << 20) as file:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise OSError(errno.EINVAL, "neither a file nor a pipe")
        first = file.raw.read(1)  # None: there is a writer, but no data yet
        if first == b"":
            return b""
        os.set_blocking(descriptor, True)
        return (first or b"") + _limited(file)


def _limited(stream: io.BufferedIOBase) -> bytes:
    data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(errno.EFBIG, f"larger than {LARGEST >> 30} GiB; cut it first")
    return data


def gunzipped(raw: bytes) -> tuple[bytes, str]:
    """As much of gzip data as decompresses, and what went wrong after it. Raises OSError where it is larger
    than any file that is read."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            return _limited(file), ""
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise
        complaint = str(error)
    except (EOFError, zlib.error) as error:
        complaint = str(error)
    out, rest = bytearray(), raw
    try:
        while rest[:2] == GZIP and len(out) <= LARGEST:
            stream = zlib.decompressobj(wbits=31)
            for at in range(0, len(rest), 4096):
                out += stream.decompress(rest[at : at + 4096])
            rest = stream.unused_data
    except zlib.error:
        pass
    return bytes(out), complaint
