"""How a server or a Prometheus is reached: credentials, and what to trust. Nothing of it is ever printed."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from servers.errors import UserError
from servers.input_file import read_input

TOKEN, PASSWORD = "VTUNE_TOKEN", "VTUNE_PASSWORD"
"""Environment variables that hold what should not be on a command line."""


class AccessError(UserError):
    """Credentials that contradict each other or cannot be read. The message says what to do."""


@dataclass(frozen=True)
class Access:
    """A bearer token, or a user with a password; a file of certificates to trust, or none to be checked."""

    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        if self.token is not None and self.user is not None:
            raise AccessError("a token and a user are two ways to log in; give one")
        if self.ca_file is not None and not self.verify:
            raise AccessError("--ca-file names the certificates to trust, --insecure trusts any; give one")

    def hide(self, text: str) -> str:
        """What a server answered, without the secrets that it may have repeated."""
        both = b64encode(f"{self.user}:{self.password}".encode()).decode() if self.password else None
        for secret in filter(None, (self.token, self.password, both)):
            text = text.replace(secret, "…")
        return text


def read_access(
    environment: Mapping[str, str],
    *,
    token_file: Path | None = None,
    user: str | None = None,
    password_file: Path | None = None,
    ca_file: Path | None = None,
    insecure: bool = False,
) -> Access:
    """Files before the environment. Raises AccessError."""
    if password_file is not None and user is None:
        raise AccessError("--password-file is whose? give --user NAME too")
    if ca_file is not None and not ca_file.is_file():
        raise AccessError(f"--ca-file {ca_file}: no such file")
    token = _secret("--token-file", token_file)
    if token is None and user is None:
        token = environment.get(TOKEN) or None
    password = _secret("--password-file", password_file)
    if password is None and user is not None:
        password = environment.get(PASSWORD) or None
        if password is None:
            raise AccessError(f"--user {user}: no password; give --password-file, or set {PASSWORD}")
    return Access(token, user, password, ca_file, not insecure)


def _secret(option: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = read_input(path).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise AccessError(f"{option} {path}: cannot be read ({reason})") from None
    if not text or "\n" in text:
        raise AccessError(f"{option} {path}: must hold one line")
    return text
