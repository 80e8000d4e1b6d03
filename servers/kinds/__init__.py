"""One file per kind of server, and the table of them: a kind is added by a file and a row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
    """Whose metrics these are, by a server's own names, and which versions'; None for a stranger's."""
    for kind in KINDS.values():
        for marker, label in kind.families:
            if marker in names:
                return kind, label
    return None
