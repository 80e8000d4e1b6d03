"""The running server: the HTTP side over an engine process, until a signal or the engine's end.

When the engine dies, requests in flight fail at once and ``/health`` answers 503 for :data:`DEAD_SECONDS`;
then the server leaves with code 1, so that whatever supervises it can start it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import resource
import signal
import socket
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import uvicorn
import uvloop

from engine.metrics.http import HttpMetrics
from engine.metrics.log import StatLogger
from engine.metrics.prometheus import PrometheusMetrics
from engine.models.checkpoint import load_model_config
from engine.models.model_config import ModelConfig
from engine.server.api import Api
from engine.server.asgi import build_app
from engine.server.frontend import Frontend
from engine.server.header_timeout import HeaderTimeoutProtocol
from engine.server.options import ModelPaths, ServerOptions, cannot_listen
from engine.server.process import EngineDeadError, EngineInfo, EngineProcess
from engine.server.responses import Tells
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("vtune.service")
DEAD_SECONDS = 5.0
"""How long the server answers 503 after its engine has died."""
GRACE_SECONDS = 3
"""How long a stopping server waits for connections that do not read what they are sent."""
BACKLOG = 2048
MAX_OPEN_FILES = 65_535
"""Where the system lets us; every connection is one, and the usual soft limit is 1,024."""
KEEP_ALIVE_SECONDS = 65
"""Longer than the idle time after which common clients and proxies drop a connection themselves."""


def run_service(
    process: EngineProcess, paths: ModelPaths, listener: socket.socket, options: ServerOptions
) -> int:
    """Returns the exit code. Raises ModelError, EngineStartError or ServeError."""
    _raise_open_files_limit()
    model = load_model_config(paths.model, paths.load_format)
    tokenizer = Tokenizer.load(paths.tokenizer, paths.load_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(process, model, tokenizer, listener, options))


async def _run(
    process: EngineProcess,
    model: ModelConfig,
    tokenizer: Tokenizer,
    listener: socket.socket,
    options: ServerOptions,
) -> int:
    stop = _stop_signal()
    ready = asyncio.create_task(process.ready())
    await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        ready.cancel()
        return stop.result()
    info = ready.result()
    logger.info(f"Using max model len {info.config.max_model_len}")
    frontend = Frontend(process, info, model, tokenizer, _metrics(info), StatLogger())
    server = _HttpServer(frontend, options)
    gc.collect()
    gc.freeze()
    return await _serve(frontend, server, listener, stop)


async def _serve(
    frontend: Frontend, server: _HttpServer, listener: socket.socket, stop: asyncio.Future[int]
) -> int:
    """From the first connection to the end of the last."""
    host, port = listener.getsockname()[:2]
    try:
        # Here, for uvloop says nothing when another server that was bound to the port listens already.
        listener.listen(BACKLOG)
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    engine_task = asyncio.create_task(frontend.run())
    http_task = asyncio.create_task(server.serve(sockets=[listener]))
    shown = f"[{host}]" if ":" in host else host
    logger.info(f"Starting vtune server on http://{shown}:{port}")
    await asyncio.wait((engine_task, http_task, stop), return_when=asyncio.FIRST_COMPLETED)
    if engine_task.done() and not stop.done():
        engine_task.result()  # a fault of ours on this side of the channel is raised, not waited out
        logger.error(f"the engine is gone; answering 503 for {DEAD_SECONDS:.0f} s, then leaving")
        await asyncio.wait((stop, http_task), timeout=DEAD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    frontend.fail_all(EngineDeadError("the server is shutting down"))
    frontend.close()
    server.should_exit = True
    _, failure = await asyncio.gather(engine_task, http_task, return_exceptions=True)
    if failure is not None:
        raise failure
    return stop.result() if stop.done() else 1


class _HttpServer(uvicorn.Server):
    """uvicorn, with the signals left to us: its own handling ends the process by the signal it caught."""

    def __init__(self, frontend: Frontend, options: ServerOptions) -> None:
        tells = Tells(options.prompt_tokens_details, options.per_request_metrics)
        api = Api(frontend, version("vtune-llm"), tells)
        super().__init__(
            uvicorn.Config(
                build_app(api.routes(), options.api_keys, HttpMetrics(frontend.metrics.registry)),
                http=HeaderTimeoutProtocol,
                lifespan="off",
                log_config=_log_config(),
                access_log=options.access_log,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _raise_open_files_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit than it tells
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _log_config() -> dict[str, Any]:
    """uvicorn's own, with the access log on stderr too: stdout is for answers."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config


def _stop_signal() -> asyncio.Future[int]:
    """Done when a signal asks the server to stop; its result is the exit code."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def ask(code: int) -> None:
        if not stop.done():
            stop.set_result(code)

    loop.add_signal_handler(signal.SIGINT, ask, 130)
    loop.add_signal_handler(signal.SIGTERM, ask, 0)
    return stop


def _metrics(info: EngineInfo) -> PrometheusMetrics:
    config = info.config
    assert config.max_model_len is not None
    return PrometheusMetrics(
        config.served_name,
        max_model_len=config.max_model_len,
        num_speculative_tokens=config.num_speculative_tokens,
        max_loras=config.max_loras if config.enable_lora else 0,
        cache_info={
            "block_size": config.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "kv_cache_max_concurrency": f"{info.max_concurrency:.2f}",
            "kv_cache_memory_bytes": info.kv_bytes,
            "kv_cache_size_tokens": info.kv_tokens,
            "num_gpu_blocks": info.num_blocks,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
            "prefix_caching_hash_algo": "sha256",
        },
    )
