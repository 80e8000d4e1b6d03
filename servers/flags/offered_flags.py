"""Which flags a server's program takes: as the facts of its release say, or read from its own help.

The help is read once for each installed version, then cached.

The cache is one JSON file a program in ``$VTUNE_CACHE/offered-flags`` (default ``~/.cache/vtune``), under the
program's path and modification time, which an installation of another version changes.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from servers.facts import releases_of
from servers.files import write_atomically

HELP_SECONDS = 120.0
"""For one call of the program: importing vLLM from a cold disk takes half a minute."""
_WIDE = "200"
"""Columns: narrow tables cut names off."""
_OPTION = re.compile(r"[ │]{0,4}(-.*)")
_NAME = re.compile(r"--([A-Za-z0-9][\w-]*)")
_CHOICES = re.compile(r"\{([^{}]*)\}")
_VERSION = re.compile(r"\d+\.\d+[\w.+-]*")


@dataclass(frozen=True)
class OfferedFlags:
    """``flags``: name in snake case -> the values it can have, () where the help does not list them."""

    program: str
    version: str | None
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __contains__(self, flag: object) -> bool:
        return flag in self.flags

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that the program does not take, in order."""
        return [name for name in dict.fromkeys(names) if name not in self.flags]

    def takes(self, flag: str, value: object) -> bool:
        """Whether the program has the flag, and lists ``value`` for it or lists none. None, "not given",
        needs no flag."""
        choices = self.flags.get(flag)
        return value is None or (choices is not None and (not choices or str(value) in choices))

    def near(self, flag: str) -> str:
        """The most similar flag, or ""."""
        return next(iter(difflib.get_close_matches(flag, self.flags, n=1)), "")


@cache
def released_flags(server: str, version: str) -> OfferedFlags | None:
    """Of a release of a kind of server by its name; None for one that has no wheels."""
    releases = releases_of(server)
    if releases is None:
        return None
    flags = releases.flags_at(version)
    return OfferedFlags(
        server, version, {name: tuple(map(str, flag.choices)) for name, flag in flags.items()}
    )


def read_offered_flags(
    program: Sequence[str],
    help_words: Sequence[Sequence[str]],
    env: Mapping[str, str] | None = None,
    *,
    cached: bool = True,
) -> OfferedFlags | None:
    """Ask ``program`` (a path, and the words before its own flags) for its help and its version.

    ``help_words`` are the ways to ask, in order, until one answers with flags. None where none does, or where
    the program does not answer in HELP_SECONDS.
    """
    path = Path(program[0]).resolve()
    try:
        saved = _cache_file(path, program[1:])
    except OSError:
        return None
    if cached and (known := _load(saved)) is not None:
        return known
    whole = {**os.environ, **(env or {}), "COLUMNS": _WIDE, "TERM": "dumb", "NO_COLOR": "1"}
    with ThreadPoolExecutor(max_workers=2) as pool:  # each takes as long as importing the server does
        told = pool.submit(_output, [program[0], "--version"], whole)
        flags = next(filter(None, (parse_help(_output([*program, *w], whole)) for w in help_words)), None)
        version = _VERSION.search(told.result())
    if not flags:
        return None
    found = OfferedFlags(str(path), version[0] if version else None, flags)
    if cached:
        with contextlib.suppress(OSError):  # without a cache it is asked again
            write_atomically(saved, [json.dumps(asdict(found))])
    return found


def parse_help(text: str) -> dict[str, tuple[str, ...]]:
    """The flags of a help text as argparse, click or typer print it: lines that begin with an option.

    ``--no-…`` stands under the name that it negates.
    """
    flags: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        if match := _OPTION.match(line):
            invocation = _invocation(match[1].rstrip(" │"))
            choices = _CHOICES.search(invocation)
            values = tuple(v.strip() for v in choices[1].split(",")) if choices else ()
            for name in _NAME.findall(invocation):
                flags.setdefault(name.removeprefix("no-").replace("-", "_"), values)
    return flags


def _invocation(line: str) -> str:
    """The beginning of an option's line, up to its description: what two spaces set off."""
    parts = re.split(r"\s{2,}", line)
    count = next((at for at, part in enumerate(parts) if not part.startswith("-")), len(parts))
    return " ".join(parts[:count])


def _output(command: Sequence[str], env: Mapping[str, str]) -> str:
    """What it prints; "" where it fails."""
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=HELP_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def _cache_file(path: Path, words: Sequence[str]) -> Path:
    """Raises OSError where there is no such program."""
    state = json.dumps([str(path), path.stat().st_mtime_ns, *words])
    digest = hashlib.sha256(state.encode()).hexdigest()[:16]
    base = os.environ.get("VTUNE_CACHE")
    root = Path(base) if base else Path.home() / ".cache" / "vtune"
    return root / "offered-flags" / f"{path.name}-{digest}.json"


def _load(saved: Path) -> OfferedFlags | None:
    """None for a file that is not there or not whole."""
    try:
        data = json.loads(saved.read_text(encoding="utf-8"))
        flags = {name: tuple(values) for name, values in data["flags"].items()}
        return OfferedFlags(data["program"], data["version"], flags)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
