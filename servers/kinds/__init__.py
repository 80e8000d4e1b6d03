"""One file per kind of server, and the table of them: a kind is added by a file and a row."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from servers.kind import ServerKind
from servers.kinds.bundled import BUNDLED
from servers.kinds.lmdeploy import LMDEPLOY
from servers.kinds.sglang import SGLANG
from servers.kinds.vllm import VLLM

KINDS: Mapping[str, ServerKind] = {
    kind.name: kind
    for kind in (
        BUNDLED,
        VLLM,
        SGLANG,
        LMDEPLOY,
    )
}
_MEASURED = [kind.label for kind in KINDS.values() if kind.metrics]
LABELS = f"{', '.join(_MEASURED[:-1])} or {_MEASURED[-1]}"
"""The servers that have metrics and logs of their own, for people."""


PREFIXES = tuple(sorted({name.partition(":")[0] for kind in KINDS.values() for name, _ in kind.families}))
"""What a server's own names begin with, before the colon."""
_SPELLED = re.compile(rf"(?:\w*?_)??({'|'.join(PREFIXES)})[:_](\w+)")


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """A sample name as the server has it: without what a pipeline put before it, and with its colon.

    Ray writes ``ray_vllm_num_requests_running`` or ``ray_vllm:num_requests_running``, OpenTelemetry and
    SGLang's gateway an underscore for the colon. A prefix with a colon is a recording rule's, whose series
    are sums of others.
    """
    match = _SPELLED.fullmatch(name)
    return f"{match[1]}:{match[2]}" if match else name


@dataclass(frozen=True)
class Start:
    """Where a command names a server. ``begin``: the first word of its program; ``end``: of its flags."""

    kind: ServerKind
    begin: int
    end: int


def find_start(words: Sequence[str]) -> Start | None:
    """The first server that a command's words name."""
    for at in range(len(words)):
        for kind in KINDS.values():
            if (found := kind.begins(words, at)) is not None:
                return Start(kind, *found)
    return None


def find_family(names: Collection[str]) -> tuple[ServerKind, str] | None:
    """Whose metrics these sample names are, and which versions'; None for a stranger's."""
    own = set(map(plain, names))
    for kind in KINDS.values():
        for marker, label in kind.families:
            if marker in own:
                return kind, label
    return None
