"""Lines of a log as the server wrote them: without what a terminal, a container runtime or a collector of
logs has put around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

_COLOUR = re.compile(r"(?:\x1b|\^\[|\\u001[bB]|\\x1[bB]|\\033|#033|␛)\[[\d;?]*[A-Za-z]|\[\d+(?:;\d+)*m")
"""Escape sequences, also where the escape character was spelt out, or lost, when the text was copied."""
_STAMP = re.compile(
    r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d\b"
    r"|\[(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?: [A-Z]+\d+)*\]"
)
"""How a line of vLLM, SGLang or LMDeploy begins."""
_ISO = re.compile(r"\b\d{4}-(\d\d-\d\d)T(\d\d:\d\d:\d\d)")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SYSLOG = re.compile(rf"\b({'|'.join(_MONTHS)}) +(\d\d?) (\d\d:\d\d:\d\d) ")
_DATED = re.compile(r"\b\d\d-\d\d \d\d:\d\d:\d\d")
_PART = re.compile(r"^\S+ (?:stdout|stderr) ([PF]) (.*)$")
"""Of the Container Runtime Interface: P for a part of a line, F for its last part."""
_MESSAGES = ("log", "message", "msg", "MESSAGE", "textPayload", "line", "body", "event")
_TIMES = ("time", "@timestamp", "timestamp", "asctime", "ts", "created", "__REALTIME_TIMESTAMP")
_WRITER = re.compile(r"^(?:([\w.-]+)\s*\| |\[pod/([^\]]+)\] )", re.MULTILINE)
_LOAD = re.compile(r"Avg prompt throughput|(?:Prefill|Decode) batch|Avg thr \(in/out\)")


def own_lines(text: str) -> str:
    """The text of a log without colours, each line from its own stamp on. A line without one gets what stands
    around it."""
    lines: Iterable[str] = text.splitlines()
    if '{"' in text:
        lines = _unwrapped(lines)
    if "stdout P " in text or "stderr P " in text:
        lines = _whole(lines)
    return "\n".join(map(_from_stamp, lines))


def without_colours(text: str) -> str:
    return _COLOUR.sub("", text) if "\x1b" in text or "[0" in text or "[m" in text else text


def writers(text: str) -> list[str]:
    """Whose lines on load are in the text without colours, where each line begins with a container's name, as
    Compose and ``kubectl logs --prefix`` write it."""
    if not _WRITER.search(text):
        return []
    found = (
        match[1] or match[2]
        for line in text.splitlines()
        if _LOAD.search(line) and (match := _WRITER.match(line))
    )
    return list(dict.fromkeys(found))


def _unwrapped(lines: Iterable[str]) -> Iterator[str]:
    """Lines that are JSON objects as their message, after the time that the object has."""
    for line in lines:
        if "{" in line and line.rstrip().endswith("}"):
            begin = line.index("{")
            if line[begin : begin + 2] == '{"' and (said := _message(line[begin:])) is not None:
                yield from said
                continue
        yield line


def _message(text: str) -> list[str] | None:
    try:
        item = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    message = next((item[key] for key in _MESSAGES if isinstance(item.get(key), str)), None)
    if message is None:
        return None
    time = _time(item)
    return [f"{time} {line}".strip() for line in message.splitlines()]


def _time(item: Mapping[str, Any]) -> str:
    """The time of an object, as ISO 8601 where it is a number."""
    value = next((item[key] for key in _TIMES if isinstance(item.get(key), str | int | float)), "")
    try:
        seconds = float(value)
    except ValueError:
        return str(value)
    while seconds > 1e11:  # in milli-, micro- or nanoseconds
        seconds /= 1000
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """Parts of lines put together."""
    begun = ""
    for line in lines:
        if (part := _PART.match(line)) and (begun or part[1] == "P"):
            begun = begun + part[2] if begun else line
            if part[1] == "P":
                continue
            line, begun = begun, ""
        yield line


def _from_stamp(line: str) -> str:
    """From the last stamp of a server on. Without one, a line on load has the date of the runtime."""
    if line[:1].isalpha() and _STAMP.match(line):
        return line
    stamps = list(_STAMP.finditer(line))
    if stamps:
        return line[stamps[-1].start() :]
    return _dated(line) if _LOAD.search(line) and not _DATED.search(line) else line


def _dated(line: str) -> str:
    if match := _ISO.search(line):
        return f"{match[1]} {match[2]} {line}"
    if match := _SYSLOG.search(line):
        return f"{_MONTHS.index(match[1]) + 1:02}-{int(match[2]):02} {match[3]} {line}"
    return line
