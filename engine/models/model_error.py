"""What goes wrong with a model on disk."""

from __future__ import annotations

from engine.errors import EngineUserError


class ModelError(EngineUserError):
    """The model cannot be found or loaded. The message says what, where, and what to do."""
