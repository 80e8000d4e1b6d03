"""Why a server ended, read from its log and exit status."""

from __future__ import annotations

import re
from dataclasses import dataclass

from servers.kinds import KINDS

CANNOT_START = 127
"""Exit status where there is no such program: a shell's, and ``loadgen.targets.supervise``'s."""


@dataclass(frozen=True)
class ServerFailure:
    """``reason`` as in TargetFailed; ``detail`` is the line of the log that says so, or a sentence."""

    reason: str
    detail: str


_SIGNS = {
    "not_found": r"^cannot start .*",
    "port_taken": r"address already in use|Errno 98\b|Errno 48\b|port \d+ is (already )?(in use|taken)",
    "kv_cache_too_small": "",
    "out_of_memory": r"out of memory|OutOfMemory|MemoryError|bad_alloc|can't allocate memory"
    r"|Cannot allocate memory",
    "bad_flag": r"unrecognized arguments?|error: argument|No such option|Invalid value|invalid choice",
    "model_not_found": r"not a valid model identifier|Repository Not Found"
    r"|does not appear to have a file named|can't load the configuration"
    r"|model .*(not found|does not exist|no such file)"
    r"|Repo id must be in the form|Cannot find an appropriate cached snapshot folder"
    r"|Cannot find the requested files in the (local cache|disk cache)",
    "disk_full": r"No space left on device|Disk quota exceeded",
    "killed": "",
}
"""Reason -> what every server's lines show it by; each kind of server has its own beside these."""
REASONS = _SIGNS.keys()


def _pattern(reason: str, sign: str) -> re.Pattern[str]:
    own = (kind.failures.get(reason, "") for kind in KINDS.values())
    return re.compile("|".join(filter(None, (sign, *own))), re.IGNORECASE)


_PATTERNS = [(reason, _pattern(reason, sign)) for reason, sign in _SIGNS.items()]
_ERROR = re.compile(r"\b\w*(Error|Exception): |\berror: ")
_NOT_INSTALLED = re.compile(rf"No module named '?({'|'.join(kind.program for kind in KINDS.values())})\b")
_HEADLINE = re.compile(r"\bvalidation errors? for \w+$")
_NO_CAUSE = re.compile("See (root cause|stack trace)|check the stack trace above|WARNING")
"""Errors that only point to another one, or that might have been."""
_BLANK = " \t│╭╮╰╯─"
"""Around a message: blanks, and the box that some programs draw."""
_SIGNALS = {6: "SIGABRT", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def classify(log: str, status: int) -> ServerFailure:
    """The most telling cause in the log: the first in order that any line shows, with its last such line."""
    lines = [text for line in log.splitlines() if (text := line.strip(_BLANK))]
    if missing := next((line for line in lines if _NOT_INSTALLED.search(line)), ""):
        return ServerFailure("not_found", missing[:400])
    for reason, pattern in _PATTERNS:
        if (reason == "not_found") != (status == CANNOT_START):
            continue
        for at in reversed(range(len(lines))):
            if pattern.search(lines[at]):
                # pydantic says below its headline which field it is, and why
                more = lines[at + 1 : at + 3] if _HEADLINE.search(lines[at]) else []
                return ServerFailure(reason, " ".join([lines[at], *more])[:400])
    if status > 128:
        number = status - 128
        name = _SIGNALS.get(number, f"signal {number}")
        hint = ": often the kernel, short of memory" if number == 9 else ""
        return ServerFailure("killed", f"the server was ended by {name}{hint}")
    return ServerFailure("exited", f"the server exited with status {status}; {_last_words(lines)}")


def _last_words(lines: list[str]) -> str:
    """The last error that a log names, else its last line: what follows an error is often only tidying up."""
    errors = [line for line in lines if _ERROR.search(line) and not _NO_CAUSE.search(line)]
    if errors:
        return f"its last error: {errors[-1][:300]}"
    return f"its last line: {lines[-1][:300]}" if lines else "it printed nothing"
