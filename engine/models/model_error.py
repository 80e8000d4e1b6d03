"""What goes wrong with a model on disk."""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be found or loaded. The message says what, where, and what to do."""
