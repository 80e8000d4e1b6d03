"""``vtune serve``: takes the port, starts the engine process, and then everything that answers HTTP.

In this order, so that a wrong flag or port fails at once, and both processes get ready at the same time:
:mod:`engine.server.service`, heavy to import, is imported while the engine loads its model.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NoReturn

from engine.config import EngineConfig
from engine.metrics import log
from engine.models.weights import resolve_model
from engine.server.options import ModelPaths, ServeError, ServerOptions, cannot_listen
from engine.server.process import EngineProcess, EngineStartError

logger = logging.getLogger("vtune.server")


def run_server(config: EngineConfig, options: ServerOptions, non_default: Mapping[str, Any]) -> int:
    """Serve until a signal, or the engine's death. Returns the exit code.

    ``non_default`` is what the user asked for, for the log. Raises ServeError, ModelError, FetchError.
    """
    log.configure("APIServer")
    signal.signal(signal.SIGTERM, _leave)
    logger.info(f"vtune version {version('vtune-llm')}, model {config.model}")
    logger.info(f"non-default args: {dict(non_default)}")
    listener = _bind(options)
    process = None
    try:
        paths = _resolve(config)
        process = EngineProcess(config)
        from engine.server.service import run_service

        return run_service(process, paths, listener, options)
    except EngineStartError as error:
        if error.expected:
            raise ServeError(str(error)) from None
        logger.error(f"the engine did not start: {error}")
        return 1
    except OSError as error:
        raise ServeError(str(error)) from None
    finally:
        if process is not None:
            process.close()
        listener.close()


def _resolve(config: EngineConfig) -> ModelPaths:
    """Find the model before two processes look for it. Raises ModelError or FetchError."""
    model = resolve_model(config.model, logger.info)
    tokenizer = resolve_model(config.tokenizer, logger.info) if config.tokenizer else model
    return ModelPaths(model, tokenizer, config.load_format)


def _bind(options: ServerOptions) -> socket.socket:
    """Take the port before anything slow is done. Raises ServeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, ValueError, OverflowError) as error:
        raise cannot_listen(options.host, options.port, error) from None
    return listener


def _leave(signum: int, frame: object) -> NoReturn:
    """SIGTERM before the event loop runs: leave through the finally clauses."""
    sys.exit(0)
