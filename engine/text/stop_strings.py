"""Stop strings: found in streamed text across its pieces, and never handed out in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, up to the first of ``stops``.

    Text that may turn out to be the beginning of a stop string is held back until it is known.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be pushed after it."""

    def push(self, text: str) -> str:
        """Add ``text``; returns what may be handed out now."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(text.index(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, self.matched = min(found, key=lambda match: match[0])
            self._held = ""
            return text[: start + len(self.matched)] if self._include_stop else text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The end of the text: returns what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins (and does not end)."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
