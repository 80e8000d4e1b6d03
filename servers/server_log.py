"""A server's own log, whichever kind of server wrote it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from servers.errors import SourceError
from servers.input_file import GZIP, gunzipped, read_input
from servers.kinds import KINDS, LABELS
from servers.logs import vllm_log
from servers.logs.incidents import incidents
from servers.logs.lines import own_lines, without_colours, writers
from servers.logs.log_facts import LogFacts


def read_log(path: Path) -> LogFacts:
    """Read a log file, plain or gzip. Raises SourceError."""
    try:
        raw = read_input(path)
        raw, complaint = gunzipped(raw) if raw[:2] == GZIP else (raw, "")
    except OSError as error:
        raise SourceError(f"--log {path}: cannot be read ({error.strerror or error})") from None
    if complaint and not raw:
        raise SourceError(f"--log {path}: damaged gzip data ({complaint}); nothing could be read")
    if b"\x00" in raw[:4096]:
        raise SourceError(f"--log {path}: binary data, neither text nor gzip")
    text = without_colours(raw.decode("utf-8", errors="replace"))
    if len(names := writers(text)) > 1:
        raise SourceError(
            f"--log {path}: several servers write in it ({', '.join(names[:5])}); give one's lines"
        )
    facts = parse_log(text)
    if not facts.flags and facts.version is None and not facts.scrapes:
        raise SourceError(f"--log {path}: no line of a {LABELS} log in it")
    return facts


def parse_log(text: str) -> LogFacts:
    """The facts in a log's text; one that no other kind of server claims is read as vLLM's. Of a restarted
    server the last start counts."""
    text = own_lines(without_colours(text))
    for kind in KINDS.values():
        if kind.log is not None and kind.log.wrote(text):
            facts = kind.log.parse(text)
            flags = kind.spelling.from_own(facts.flags)
            return replace(facts, flags=flags, kind=kind.name, incidents=incidents(text))
    return replace(vllm_log.parse_log(text), incidents=incidents(text))
