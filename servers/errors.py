"""Errors that a user caused, or a server that was named."""

from __future__ import annotations


class SourceError(RuntimeError):
    """A source that cannot be reached or holds nothing to diagnose. The message says what to do."""
