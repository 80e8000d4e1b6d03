"""How a server or a Prometheus is reached: who asks, what is trusted, how long an answer may take."""

from __future__ import annotations

import re
import ssl
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from servers.errors import OptionError
from servers.input_file import read_input

KEY, TOKEN, PASSWORD, HEADERS = "VTUNE_API_KEY", "VTUNE_TOKEN", "VTUNE_PASSWORD", "VTUNE_HEADERS"
"""Environment variables that hold what should not be on a command line: the key by either name, the password
of --user, and headers, one per line."""
GIVE_KEY = f"give its key with --api-key-file FILE, --api-key or {KEY}, or --user and --password-file"
HIDDEN = "***"
"""What stands for a secret in everything that is printed or written."""
_SHORTEST_HIDDEN_HEADER = 6
"""Characters of a header's value; shorter ones are words that texts hold by chance."""
_HEADER = re.compile(r"([!#$%&'*+.^`|~\w-]+):\s*(.*?)\s*", re.ASCII)
_FRAMING = {"host", "content-length", "content-type", "transfer-encoding", "connection"}
_WORD = r"""(?:'[^']*'|"[^"]*"|[^\s'"-][^\s'"]*)"""
_KEY_WORDS = re.compile(
    rf"(--api[-_]keys(?:=|\s+)){_WORD}(?:\s+{_WORD})*"
    rf"|(--api[-_]key(?:=|\s+)|\b\w*(?:API_KEY|TOKEN|PASSWORD|SECRET)=){_WORD}",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Tls:
    """Certificates (PEM files): those to trust, and the client's own. ``verify`` False: trust all."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    """None: the key is in ``cert_file``."""
    verify: bool = True

    def __post_init__(self) -> None:
        if self.ca_file is not None and not self.verify:
            raise OptionError("--ca-file names the certificates to trust, --insecure trusts any; give one")
        if self.key_file is not None and self.cert_file is None:
            raise OptionError("--client-key needs --client-cert, the certificate that it belongs to")
        for option, file in (
            ("--ca-file", self.ca_file),
            ("--client-cert", self.cert_file),
            ("--client-key", self.key_file),
        ):
            if file is not None and not file.is_file():
                raise OptionError(f"{option} {file}: no such file")

    def context(self) -> ssl.SSLContext:
        """For one or more connections. Raises OptionError for files that hold no certificate or key."""
        context = ssl.create_default_context()
        try:
            if self.ca_file is not None:
                context.load_verify_locations(self.ca_file)
        except OSError as error:
            raise OptionError(f"--ca-file {self.ca_file}: no certificates in PEM form ({error})") from None
        try:
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        except OSError as error:
            raise OptionError(
                f"--client-cert {self.cert_file}: not a PEM certificate with an unencrypted key ({error})"
            ) from None
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


@dataclass(frozen=True)
class Connection:
    """Everything but the URL: an API key (bearer token), or a user with a password; further headers; TLS.

    ``timeout``: seconds to connect, and for one answer about health, models or metrics; None: the usual ones.
    """

    api_key: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tls: Tls = Tls()
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and self.user is not None:
            raise OptionError("an API key (or token) and a user are two ways to log in; give one")
        if any(name.lower() == "authorization" for name, _ in self.headers) and self.authorization:
            raise OptionError("--header Authorization and a key or a user are two ways to log in; give one")
        for what, text in (
            ("the API key", self.api_key),
            ("the user or the password", self._pair),
            *((f"--header {name}", value) for name, value in self.headers),
        ):
            if text is not None and not (text.isprintable() and _fits_latin1(text)):
                raise OptionError(f"{what}: holds a character that no HTTP header can hold")

    @property
    def _pair(self) -> str | None:
        return None if self.user is None else f"{self.user}:{self.password or ''}"

    @property
    def authorization(self) -> str | None:
        """The header of that name, for a key or a user."""
        if self.api_key is not None:
            return f"Bearer {self.api_key}"
        return None if self._pair is None else f"Basic {_base64(self._pair)}"

    @property
    def logs_in(self) -> bool:
        """Whether it says who asks; any header may."""
        return self.authorization is not None or bool(self.headers)

    @property
    def refused(self) -> str:
        """What HTTP 401 or 403 means, and what to do."""
        return f"{'it refuses who asks' if self.logs_in else 'it wants to know who asks'}; {GIVE_KEY}"

    def sent(self) -> dict[str, str]:
        """The headers of each request."""
        login = {} if self.authorization is None else {"Authorization": self.authorization}
        return {**dict(self.headers), **login}

    def within(self, usual: float) -> float:
        """Seconds that a question may take which usually may take ``usual``."""
        return usual if self.timeout is None else self.timeout

    def hide(self, text: str) -> str:
        """``text`` without the secrets that a server may have repeated in it."""
        for secret in self._secrets():
            text = text.replace(secret, HIDDEN)
        return text

    def _secrets(self) -> Iterator[str]:
        if self._pair is not None and self.password:
            yield _base64(self._pair)
        yield from filter(None, (self.api_key, self.password))
        yield from (value for _, value in self.headers if len(value) >= _SHORTEST_HIDDEN_HEADER)

    def environment(self) -> dict[str, str]:
        """Its secrets, for a child that is this program: see :func:`read_connection`."""
        secrets = {
            KEY: self.api_key,
            PASSWORD: self.password,
            HEADERS: "\n".join(f"{name}: {value}" for name, value in self.headers),
        }
        return {name: value for name, value in secrets.items() if value}

    def words(self) -> list[str]:
        """What is no secret, as options for such a child."""
        options = {
            "--user": self.user,
            "--ca-file": self.tls.ca_file,
            "--client-cert": self.tls.cert_file,
            "--client-key": self.tls.key_file,
            "--connect-timeout": None if self.timeout is None else f"{self.timeout:g}s",
        }
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return words if self.tls.verify else [*words, "--insecure"]


NO_LOGIN = Connection()
"""What a server on this machine usually asks for."""


def read_connection(
    environment: Mapping[str, str],
    *,
    api_key: str | None = None,
    api_key_file: Path | None = None,
    user: str | None = None,
    password_file: Path | None = None,
    headers: Iterable[str] = (),
    tls: Tls | None = None,
    timeout: float | None = None,
) -> Connection:
    """From options, files and the environment, in this order. Raises OptionError."""
    if api_key is not None and api_key_file is not None:
        raise OptionError("--api-key and --api-key-file are two keys; give one")
    if password_file is not None and user is None:
        raise OptionError("--password-file is whose? give --user NAME too")
    given = {
        name.lower(): (name, value) for name, value in _headers(environment.get(HEADERS, "").splitlines())
    }
    given |= {name.lower(): (name, value) for name, value in _headers(headers)}
    key = _secret("--api-key-file", api_key_file) if api_key is None else api_key
    if key is None and user is None and "authorization" not in given:
        key = environment.get(KEY) or environment.get(TOKEN)
    password = _secret("--password-file", password_file)
    if password is None and user is not None:
        password = environment.get(PASSWORD)
        if not password:
            raise OptionError(f"--user {user}: no password; give --password-file, or set {PASSWORD}")
    return Connection(key or None, user, password, tuple(given.values()), tls or Tls(), timeout)


def masked(command: str) -> str:
    """A command line as it may be shown and stored: without the keys in it."""
    return _KEY_WORDS.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", command)


def _headers(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Raises OptionError, which does not repeat a value."""
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise OptionError("--header: write 'Name: value', such as 'X-Team: search'")
        if match[1].lower() in _FRAMING:
            raise OptionError(f"--header {match[1]}: is set by each request itself; leave it out")
        yield match[1], match[2]


def _secret(option: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = read_input(path).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise OptionError(f"{option} {path}: cannot be read ({reason})") from None
    if not text or "\n" in text:
        raise OptionError(f"{option} {path}: must hold one line")
    return text


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()


def _fits_latin1(text: str) -> bool:
    return all(ord(character) < 256 for character in text)
