"""Released wheels of a package index, of which only the few source files that hold facts are fetched."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from servers.facts import version_of

INDEX = "https://pypi.org/simple/{}/"
SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 180.0
_WHEEL = re.compile(
    r"[\w.]+?-(?P<version>\d[\d.]*(?:\.post\d+)?)(?:-\d+)?-[^-]+-[^-]+-(?P<platform>[^-]+)\.whl"
)


@dataclass(frozen=True)
class Wheel:
    """``files``: text of each wanted member, by its path in the wheel."""

    version: str
    files: dict[str, str]


class RangeReader(io.RawIOBase):
    """A file behind a URL, of which only what is read is fetched."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url, self._at = client, url, 0
        self._begin, self._held = 0, b""
        head = client.get(url, headers={"Range": "bytes=0-0"}).raise_for_status()
        self._size = int(head.headers["Content-Range"].rpartition("/")[2])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._size - self._at))
        if not count:
            return 0
        if not self._begin <= self._at <= self._at + count <= self._begin + len(self._held):
            end = min(self._size, self._at + max(count, CHUNK_BYTES))
            span = {"Range": f"bytes={self._at}-{end - 1}"}
            self._begin, self._held = self._at, self._client.get(self._url, headers=span).content
        first = self._at - self._begin
        buffer[:count] = self._held[first : first + count]
        self._at += count
        return count


def releases(client: httpx.Client, package: str) -> dict[str, str]:
    """Version -> URL of a wheel of it, oldest first. Pre-releases are left out."""
    page = client.get(INDEX.format(package), headers={"Accept": SIMPLE_JSON}).raise_for_status().json()
    found: dict[str, str] = {}
    for file in page["files"]:
        wheel = _WHEEL.fullmatch(file["filename"])
        if wheel and "aarch64" not in wheel["platform"] and not file.get("yanked"):
            found.setdefault(wheel["version"], file["url"])
    return dict(sorted(found.items(), key=lambda item: version_of(item[0])))


def fetch(client: httpx.Client, version: str, url: str, wanted: re.Pattern[str]) -> Wheel:
    """The members whose path matches ``wanted``. Raises httpx.HTTPError, zipfile.BadZipFile."""
    with zipfile.ZipFile(io.BufferedReader(RangeReader(client, url), CHUNK_BYTES)) as archive:
        return Wheel(version, dict(_texts(archive, wanted)))


def read(version: str, path: str, wanted: re.Pattern[str]) -> Wheel:
    """The same of a wheel on this machine."""
    with zipfile.ZipFile(path) as archive:
        return Wheel(version, dict(_texts(archive, wanted)))


def _texts(archive: zipfile.ZipFile, wanted: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    for name in archive.namelist():
        if wanted.fullmatch(name):
            yield name, archive.read(name).decode(errors="replace")
