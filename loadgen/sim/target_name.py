"""How simulated targets are called on the command line."""

from __future__ import annotations

from servers.errors import UserError

PREFIX = "simulated:"
HERE = "bundled"
"""``simulated:bundled``: this machine and the bundled model, as measured on it."""


class SimulatedTargetError(UserError):
    """A device, a model, step times or flags that cannot be simulated."""
