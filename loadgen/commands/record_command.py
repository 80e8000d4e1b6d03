"""``vtune bench record``: a proxy that writes the traffic it passes as a trace. Light to import."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.commands.connection_options import TlsOptions
from loadgen.commands.options import seconds, with_options
from servers.errors import UserError

if TYPE_CHECKING:
    from loadgen.recording.proxy import Observer
    from loadgen.recording.recorder import Recorder, Tally
    from loadgen.wire.messages import Endpoint


def mount(bench: typer.Typer) -> None:
    """Add the command to ``bench``."""
    bench.command("record")(with_options(record_command))


def record_command(
    url: Annotated[str, typer.Option(help="The server that is recorded.")],
    out: Annotated[Path, typer.Option(help="The trace to write, e.g. traffic.jsonl; it must not exist.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8010,
    duration: Annotated[
        float | None, typer.Option(parser=seconds, metavar="TIME", help="Stop by itself after this: 1h.")
    ] = None,
    *,
    reached: TlsOptions,
) -> None:
    """Pass traffic through to a server and write it as a trace: times, lengths, shared prefixes, settings.

    Never the text: blocks of prompts become numbers by a keyed hash whose key is forgotten. Point the clients
    at this port instead of the server's; Ctrl-C (or --duration) ends the recording and writes the file.
    Replay it with vtune bench run --trace, describe it with vtune bench trace.

    Examples:

      vtune bench record --url http://127.0.0.1:8000 --port 8010 --out traffic.jsonl

      vtune bench record --url http://127.0.0.1:8000 --out traffic.jsonl --duration 1h

    Exit codes: 0 the recording has ended, 2 bad usage, server unreachable or port in use.
    """
    from loadgen.recording.recorder import Recorder
    from loadgen.wire.driver import event_loop
    from loadgen.wire.probe import Url, reach
    from servers.connection import Connection

    if out.exists():
        raise UserError(f"{out} exists: give another name, or remove it")
    endpoint = reach(Url.parse(url), Connection(tls=reached.tls, timeout=reached.connect_timeout))
    try:
        recorder = Recorder(out)
    except FileExistsError:
        raise UserError(
            f"{out}.partial exists: a recording was killed, or is running; keep it under another name"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    try:
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(_serve(endpoint, recorder.observe, host, port, duration, url))
    except OSError as error:
        _close(recorder, out)
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port") from None
    _close(recorder, out)
    typer.echo(_conclusion(recorder.tally, out), err=True)


async def _serve(
    endpoint: Endpoint, observer: Observer, host: str, port: int, duration: float | None, url: str
) -> None:
    """Until a signal or the end of ``duration``. Raises OSError where it cannot listen."""
    from loadgen.recording.proxy import Proxy

    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    proxy = Proxy(endpoint, observer)
    listening = await proxy.start(host, port)
    name = f"[{host}]" if ":" in host else host
    typer.echo(f"recording: http://{name}:{listening} -> {url}; Ctrl-C ends it", err=True)
    try:
        async with asyncio.timeout(duration):
            await over.wait()
    except TimeoutError:
        pass
    finally:
        await proxy.close()
        await asyncio.sleep(0)  # what hung up is told to the observer


def _close(recorder: Recorder, out: Path) -> None:
    try:
        recorder.close()
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror}; what was recorded is in {out}.partial"
        ) from None


def _conclusion(tally: Tally, out: Path) -> str:
    if not tally.recorded:
        return f"no request was recorded, {tally.failed} failed: no file written"
    notes = [
        f"{count} {what}"
        for count, what in (
            (tally.failed, "failed and not recorded"),
            (tally.cut, "broken off"),
            (
                tally.estimated,
                "prompts of an estimated length, as their answers had no usage (chats without "
                "what the template adds)",
            ),
            (
                tally.uncounted,
                "answers counted by their chunks, for the same reason: at least so many tokens",
            ),
        )
        if count
    ]
    return f"{tally.recorded} requests recorded in {out}" + "".join(f"; {note}" for note in notes)
