"""The engine in a process of its own, and the asyncio handle on it.

A socket pair carries length-prefixed pickles of the dataclasses below. Only this module writes to it, and the
peer is always our own child, so nothing from outside is ever unpickled. A thread in the child reads: when the
parent is gone, however it went, the read ends and the child leaves, in the middle of a step if need be.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from engine.config import EngineConfig
from engine.errors import EngineUserError
from engine.metrics import log
from engine.metrics.stats import StepStats
from engine.request import Request, RequestStatus
from engine.step import Outputs, RequestOutput

if TYPE_CHECKING:
    from engine.core import EngineCore

logger = logging.getLogger("vtune.process")
LENGTH = struct.Struct("!I")
STOP_SECONDS = 5.0
"""How long a child may take to notice that the channel is closed before it is killed."""
TIDY_SECONDS = 1.0
"""How long a child that has noticed it gives its main thread, which may be in a compiled operation."""


class _ParentGone(BaseException):
    """Raised in the child's main thread, wherever it is, so that what it has begun is tidied up."""


class EngineDeadError(RuntimeError):
    """The engine process is gone; no request can be served."""


class EngineStartError(RuntimeError):
    """The engine did not come up. ``expected``: the user's input is the cause; the message says it all."""

    def __init__(self, message: str, expected: bool) -> None:
        super().__init__(message)
        self.expected = expected


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the HTTP side needs to know about an engine that is up."""

    config: EngineConfig
    """With ``max_model_len`` resolved."""
    num_blocks: int
    kv_tokens: int
    kv_bytes: int
    max_concurrency: float


@dataclass(frozen=True, slots=True)
class Submit:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[str, ...]
    status: RequestStatus


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget cached prefixes; a Stepped with ``prefix_cache_reset`` answers."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step, or a command that no step follows: all that is new since the last message."""

    outputs: Outputs
    stats: StepStats
    admitted: dict[str, int] = field(default_factory=dict)
    """Prefix-hit tokens of each request that was admitted or resumed."""
    prefix_cache_reset: bool | None = None
    """The answer to a ResetPrefixCache: whether it was done."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last message of an engine that cannot start, or cannot go on."""

    message: str
    expected: bool


def encode_message(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


# ---------------------------------------------------------------- the child


def run_engine(channel_fd: int) -> int:
    """The child's whole life: config in, model up, steps until the parent is gone. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGUSR1, _stop)
    log.configure("EngineCore")
    channel = socket.socket(fileno=channel_fd)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_forever, args=(channel, inbox), daemon=True).start()
    try:
        code = _live(inbox, channel)
        # The interpreter's own end is not to be interrupted by a parent that goes meanwhile.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    except _ParentGone:
        os._exit(0)  # without waiting for threads
    return code


def _live(inbox: queue.SimpleQueue[Any], channel: socket.socket) -> int:
    try:
        _serve(inbox.get(), inbox, channel)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the parent is gone
    except Exception as error:
        # What is left is to say so and to end; a parent that goes meanwhile must not interrupt the end.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        expected, message = _explain(error)
        if not expected:
            traceback.print_exc()
        channel.sendall(encode_message(Failed(message, expected)))
        return 2 if expected else 1
    return 0


def _read_forever(channel: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    """Messages into ``inbox``; leaves the process as soon as the parent has closed its end, or died."""
    try:
        stream = channel.makefile("rb")
        while len(header := stream.read(LENGTH.size)) == LENGTH.size:
            (size,) = LENGTH.unpack(header)
            body = stream.read(size)
            if len(body) < size:
                break
            inbox.put(pickle.loads(body))
    except OSError:
        pass  # reset: the parent died with unread messages of ours
    except Exception:
        traceback.print_exc()
    _leave()


def _leave() -> NoReturn:
    """Out of this process, with what it has started: a compiler, say."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGUSR1)
    time.sleep(TIDY_SECONDS)
    os._exit(0)


def _stop(signum: int, frame: object) -> NoReturn:
    raise _ParentGone


def _serve(config: EngineConfig, inbox: queue.SimpleQueue[Any], channel: socket.socket) -> None:
    from engine.core import EngineCore  # torch; after the reader runs, so that a Ctrl-C during it is seen
    from engine.sim.step_log import StepLog

    core = EngineCore(config)
    steps = StepLog(core, os.environ["VTUNE_STEP_LOG"]) if os.environ.get("VTUNE_STEP_LOG") else None
    plan = core.memory_plan
    for line in plan.describe().splitlines():
        logger.info(line)
    logger.info(
        f"CPU KV cache size: {plan.num_tokens:,} tokens, Maximum concurrency for {plan.max_model_len:,} "
        f"tokens per request: {plan.max_concurrency:.2f}x"
    )
    info = EngineInfo(core.config, plan.num_blocks, plan.num_tokens, plan.kv_bytes, plan.max_concurrency)
    channel.sendall(encode_message(info))
    gc.collect()
    gc.freeze()  # weights and modules live for ever: not to be looked at by every collection
    while True:
        if steps is not None and not core.has_unfinished:
            steps.pause()
        for message in _drain(inbox, wait=not core.has_unfinished):
            if isinstance(message, Submit):
                _add(core, message.requests, channel)
            elif isinstance(message, ResetPrefixCache):
                reset = core.reset_prefix_cache()
                channel.sendall(
                    encode_message(Stepped(Outputs(), core.metrics.idle(), prefix_cache_reset=reset))
                )
            else:
                core.abort(message.request_ids, message.status)
                channel.sendall(encode_message(Stepped(Outputs(), core.stats)))
        if core.has_unfinished:
            step, output = core.step()
            admitted = step.admitted_with_computed
            channel.sendall(encode_message(Stepped(Outputs.of(output.outputs), core.stats, admitted)))


def _add(core: EngineCore, requests: Iterable[Request], channel: socket.socket) -> None:
    """Queue requests; one that the scheduler refuses fails alone."""
    for request in requests:
        try:
            core.add(request)
        except ValueError as error:
            logger.error(f"refused: {error}")
            request.error = str(error)
            channel.sendall(
                encode_message(Stepped(Outputs.of([RequestOutput.refused(request)]), core.metrics.idle()))
            )


def _drain(inbox: queue.SimpleQueue[Any], wait: bool) -> Iterator[Any]:
    """Everything that has arrived; with ``wait`` at least one message."""
    try:
        yield inbox.get(block=wait)
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return


def _explain(error: Exception) -> tuple[bool, str]:
    """Is this the user's to mend, and what to tell them."""
    if isinstance(error, EngineUserError):
        return True, str(error)
    if _is_out_of_memory(error):
        return True, (
            "this machine has not enough memory for the model with these flags. Lower --device-memory (or "
            "--num-gpu-blocks-override), --max-num-batched-tokens or --max-num-seqs, or use a smaller model."
        )
    return False, f"{type(error).__name__}: {error}"


def _is_out_of_memory(error: Exception) -> bool:
    """torch says it in a RuntimeError of its own words."""
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return refused or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


# ---------------------------------------------------------------- the parent


class EngineProcess:
    """Handle on an engine process.

    The constructor starts it and returns at once, so that the caller imports what it needs while the model
    loads. Then, on the event loop: ``await ready()``, and ``async for step in steps()`` until it is gone.
    ``close()`` from anywhere; it leaves no process behind.
    """

    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        ours.sendall(encode_message(config))
        self._socket = ours
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None
        self.alive = False
        self._last_words = ""
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.server.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**thread_environment(), **os.environ},
                process_group=0,  # signals for our group are ours to handle; the child follows the channel
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ready(self) -> EngineInfo:
        """Wait for the model. Raises EngineStartError."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        message = await self._receive()
        if isinstance(message, EngineInfo):
            self.alive = True
            return message
        if isinstance(message, Failed):
            raise EngineStartError(message.message, message.expected)
        raise EngineStartError(f"the engine process died while starting ({self.exit_reason()})", False)

    async def steps(self) -> AsyncIterator[Stepped]:
        """What the engine reports, until it is gone; then ``alive`` is False."""
        try:
            while isinstance(message := await self._receive(), Stepped):
                yield message
            if isinstance(message, Failed):
                self._last_words = f": {message.message}"
        finally:
            self.alive = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises EngineDeadError."""
        self._send(Submit(tuple(requests)))

    def abort(
        self, request_ids: Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> None:
        """Drop requests; ``status`` as in EngineCore.abort. Raises EngineDeadError."""
        self._send(Abort(tuple(request_ids), status))

    def reset_prefix_cache(self) -> None:
        """Ask for it; one of the next steps has the answer. Raises EngineDeadError."""
        self._send(ResetPrefixCache())

    def exit_reason(self) -> str:
        """How the child ended, for people."""
        try:
            code = self._child.wait(STOP_SECONDS)  # the channel has just closed: it is about to end, or has
        except subprocess.TimeoutExpired:
            return "closed its channel"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}{self._last_words}"

    def close(self) -> None:
        """Stop the child: it leaves when the channel closes, and is killed if it does not."""
        self.alive = False
        with contextlib.suppress(OSError):  # it may be closed, or the child gone
            self._socket.shutdown(socket.SHUT_RDWR)  # at once, whatever the event loop still holds of it
        if self._writer is not None:
            self._writer.transport.abort()
        self._socket.close()
        try:
            self._child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _send(self, message: Submit | Abort | ResetPrefixCache) -> None:
        if not self.alive or self._writer is None:
            raise EngineDeadError("the engine process is not running")
        self._writer.write(encode_message(message))

    async def _receive(self) -> object:
        """The next message; None when the child is gone."""
        assert self._reader is not None
        try:
            header = await self._reader.readexactly(LENGTH.size)
            return pickle.loads(await self._reader.readexactly(LENGTH.unpack(header)[0]))
        except (asyncio.IncompleteReadError, OSError):
            return None


def thread_environment() -> dict[str, str]:
    """Defaults for the child's environment, to be there before torch is imported.

    PASSIVE: without it OpenMP threads that wait for work spin, and steal the cores from the HTTP side.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(cores)}


if __name__ == "__main__":
    # Under its own name, or the messages it unpickles would be of other classes than those it knows.
    from engine.server.process import run_engine as run

    sys.exit(run(int(sys.argv[1])))
