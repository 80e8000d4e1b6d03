"""The options that say how a server or a Prometheus is reached: one set for all commands. Light."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.commands.options import seconds

if TYPE_CHECKING:
    from servers.connection import Connection, Tls


@dataclass(frozen=True)
class TlsOptions:
    """Certificates and time-outs."""

    ca_file: Annotated[
        Path | None, typer.Option(help="Certificates (PEM) to trust for https, such as your own CA's.")
    ] = None
    client_cert: Annotated[
        Path | None, typer.Option(help="Certificate (PEM) that this client shows a server that asks for one.")
    ] = None
    client_key: Annotated[
        Path | None, typer.Option(help="The client certificate's key (PEM), where it is in another file.")
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Skip TLS certificate checks (testing only).")
    ] = False
    connect_timeout: Annotated[
        float | None,
        typer.Option(
            parser=seconds,
            metavar="TIME",
            help="To connect, and for each answer about health, models or metrics: 5s. [2s to 30s]",
        ),
    ] = None

    @cached_property
    def tls(self) -> Tls:
        """Raises OptionError."""
        from servers.connection import Tls

        return Tls(self.ca_file, self.client_cert, self.client_key, not self.insecure)


@dataclass(frozen=True)
class ConnectionOptions(TlsOptions):
    """Who asks, beside that. Secrets are better in a file or in the environment than on a command line."""

    api_key: Annotated[
        str | None,
        typer.Option(
            help="Sent as bearer token; other users of this machine may see it in the list of processes. "
            "[$VTUNE_API_KEY, or $VTUNE_TOKEN]"
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", "--token-file", help="A file that holds the API key.")
    ] = None
    user: Annotated[str | None, typer.Option(help="For basic authentication, with a password.")] = None
    password_file: Annotated[
        Path | None, typer.Option(help="A file that holds the user's password. [$VTUNE_PASSWORD]")
    ] = None
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'NAME: VALUE'",
            help="Sent with each request, such as 'X-Team: search'. Repeatable. [$VTUNE_HEADERS, one per "
            "line]",
        ),
    ] = None

    @cached_property
    def connection(self) -> Connection:
        """Read once: a file may be a pipe. Raises OptionError."""
        from servers.connection import read_connection

        return read_connection(
            os.environ,
            api_key=self.api_key,
            api_key_file=self.api_key_file,
            user=self.user,
            password_file=self.password_file,
            headers=self.header or (),
            tls=self.tls,
            timeout=self.connect_timeout,
        )
