"""Errors that a user caused, or a server that was named."""

from __future__ import annotations


class UserError(Exception):
    """What was asked for cannot be done, for a reason outside this program: the base of every such error.

    The message says what was wrong, where, why, and what to do. Commands print it and nothing else; any other
    exception is a bug of ours and keeps its traceback.
    """


class OptionError(UserError):
    """Options that cannot be used, alone or together."""


class SourceError(UserError):
    """A source that cannot be reached or holds nothing to diagnose."""
