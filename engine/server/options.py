"""Options of the HTTP server beside the engine's config, and the error of a failed start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineUserError


class ServeError(EngineUserError):
    """The server cannot start. The message says why, and what to do."""


@dataclass(frozen=True)
class ServerOptions:
    """What concerns HTTP and not the engine."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    access_log: bool = True
    prompt_tokens_details: bool = False
    """Usage tells how many tokens of the prompts came out of the prefix cache."""
    per_request_metrics: bool = False
    """Answers tell how long the engine took for them."""


@dataclass(frozen=True)
class ModelPaths:
    """Where the model and its tokenizer are on disk."""

    model: Path
    tokenizer: Path
    load_format: str


def cannot_listen(host: str, port: int, error: Exception) -> ServeError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ServeError(
        f"cannot listen on {host}:{port}: {reason}. Choose another --port, or stop the server that has it."
    )
