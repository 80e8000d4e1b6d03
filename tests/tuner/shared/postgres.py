"""A PostgreSQL of our own: a new cluster in a directory, on a free port of the loopback, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import psycopg.sql
from quiet_port import quiet_port

PASSWORD = "s3cret/word"
USER = "vtune"


def programs() -> Path | None:
    """Where ``initdb`` is: on the path, or where Debian puts it."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    return next((p.parent for p in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))[::-1]), None)


def reason_to_skip() -> str:
    if programs() is None:
        return "PostgreSQL is not installed (Debian: postgresql)"
    if os.geteuid() == 0 and _account() is None:
        return "PostgreSQL does not run as root, and there is no user postgres"
    return ""


class Postgres:
    """One server. ``start`` and ``stop`` may follow each other: the data stay."""

    def __init__(self, place: Path) -> None:
        bin_directory = programs()
        assert bin_directory is not None, "see reason_to_skip"
        self._bin, self._place, self.port = bin_directory, place, quiet_port()
        self._process: subprocess.Popen[bytes] | None = None
        password = place / "password"
        password.write_text(PASSWORD)
        if account := self._user():
            os.chown(place, account.pw_uid, account.pw_gid)
            os.chown(password, account.pw_uid, account.pw_gid)
        self._run(
            "initdb", "-D", str(place / "data"), "-U", USER, f"--pwfile={password}",
            "--auth=scram-sha-256", "--no-sync", "--no-instructions", "--encoding=UTF8", "--locale=C",
        )  # fmt: skip

    def url_of(self, database: str) -> str:
        quoted = PASSWORD.replace("/", "%2F")
        return f"postgresql+psycopg://{USER}:{quoted}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> None:
        with psycopg.connect(self.url_of("postgres").replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(database)))

    def start(self) -> None:
        settings = {
            "port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": self._place,
            "fsync": "off", "shared_buffers": "8MB", "max_connections": 40,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with open(self._place / "log", "ab") as log:
            self._process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(self._place / "data"), *words],
                stdout=log,
                stderr=log,
                cwd=self._place,
                start_new_session=True,
                **self._identity(),
            )
        ready = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        deadline = time.monotonic() + 240
        while subprocess.run(ready).returncode:
            assert self._process.poll() is None, (self._place / "log").read_text()
            assert time.monotonic() < deadline, (self._place / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """At once: clients are cut off."""
        if self._process is not None:
            self._process.send_signal(3)  # SIGQUIT: immediate shutdown
            self._process.wait()
            self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._bin / program), *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self._place,
            **self._identity(),
        )

    def _user(self) -> pwd.struct_passwd | None:
        return _account() if os.geteuid() == 0 else None

    def _identity(self) -> dict[str, Any]:
        account = self._user()
        return {"user": account.pw_uid, "group": account.pw_gid} if account else {}


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A server that runs. Not below pytest's directory, which no other user may enter."""
    with tempfile.TemporaryDirectory(prefix="vtune-postgres-") as place:
        server = Postgres(Path(place))
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _account() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return None
