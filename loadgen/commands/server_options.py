"""The options that name the server to load: the same for every command that loads one. Light to import."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.commands.connection_options import ConnectionOptions
from loadgen.commands.options import Load, seconds

if TYPE_CHECKING:
    from loadgen.measure.record import Records
    from loadgen.plan.load_policy import Progress
    from loadgen.plan.workload import Schedule

_DEFAULT_CONTEXT = 4096
"""Of a server that does not say."""


@dataclass(frozen=True)
class Server:
    """The server that is loaded, and how the client behaves. Times in seconds."""

    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")]
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None
    max_model_len: Annotated[int | None, typer.Option(help="Default: what /v1/models says.", min=1)] = None
    vocab_size: Annotated[
        int | None, typer.Option(help="Prompts use token ids below this. Default: 32000.", min=8)
    ] = None
    reached: ConnectionOptions = field(default_factory=ConnectionOptions)
    warmup: Annotated[
        int | None, typer.Option(help="Unmeasured requests first. Default: one of each class.", min=0)
    ] = None
    timeout: Annotated[
        float, typer.Option(help="For one request, to its last byte.", parser=seconds, metavar="TIME")
    ] = 600.0
    drain: Annotated[
        float | None,
        typer.Option(
            help="Wait for answers after the last request. Default: --timeout.",
            parser=seconds,
            metavar="TIME",
        ),
    ] = None
    workers: Annotated[int, typer.Option(help="Client processes.", min=1)] = 1
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Send generated prompts to /v1/chat/completions, as a word for each token: for servers "
            "that have nothing else. What they count is in the records.",
        ),
    ] = False
    salt: Annotated[
        bool,
        typer.Option(
            "--salt/--no-salt",
            help="Replace the first tokens of all prompts by ones that no earlier run had, so that no prefix "
            "cache knows them. Prompts that are text are sent as they are.",
        ),
    ] = True
    chunk_usage: Annotated[
        bool, typer.Option("--chunk-usage", help="Ask for token counts in each chunk (vLLM, SGLang).")
    ] = False

    def asked(self) -> Server:
        """With the model and its context as the server says, where they were not given.

        Raises Unreachable, UrlError, OptionError.
        """
        from loadgen.wire.probe import NoModels, ServerInfo, Url, probe

        if self.model is not None and self.max_model_len is not None:
            return self
        try:
            info = probe(Url.parse(self.url), self.reached.connection)
        except NoModels:
            if self.model is None:
                raise
            info = ServerInfo(self.model, None, None)
        length = self.max_model_len or info.max_model_len or _DEFAULT_CONTEXT
        return replace(self, model=self.model or info.model, max_model_len=length)

    def source(self, load: Load) -> Callable[[int], Schedule]:
        """What makes the schedule of a seed for this server, which must have been asked."""
        assert self.max_model_len is not None
        import numpy as np

        source = load.source(self.max_model_len, self.vocab_size, self.warmup)

        def schedule(seed: int) -> Schedule:
            drawn = source(seed) if load.sends_priorities else source(seed).without_priorities()
            if load.natural_stop:
                drawn = drawn.ended_by_the_model()
            if self.salt:
                drawn = drawn.salted(np.random.default_rng())
            return drawn.as_chat() if self.chat else drawn

        return schedule

    def run(
        self,
        schedule: Schedule,
        progress: Callable[[Progress], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Records:
        """Send ``schedule``, and scrape the server's metrics meanwhile.

        Raises Unreachable, UrlError, OptionError.
        """
        from loadgen.measure.warm_cache import judge_cache
        from loadgen.plan.sharing import repeated_share
        from loadgen.targets.http import Http
        from loadgen.targets.scraper import Scraper, scrape
        from loadgen.wire.client import ClientOptions, run_schedule

        http = Http(self.url, self.reached.connection)
        options = ClientOptions(
            timeout=self.timeout,
            drain=self.drain,
            workers=self.workers,
            chunk_usage=self.chunk_usage,
        )
        with Scraper(lambda: scrape(http)) as scraper:
            records = run_schedule(
                self.url,
                schedule,
                model=self.model,
                connection=self.reached.connection,
                progress=progress,
                stop=stop,
                options=options,
            )
        return judge_cache(replace(records, scrapes=tuple(scraper.scrapes)), repeated_share(schedule))
