"""A kind of server: what vtune knows of one program, as a record. The records stand in ``servers.kinds``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from servers.facts import releases_of
from servers.flags.defaults import USUAL, Platform, Spread
from servers.flags.offered_flags import OfferedFlags, released_flags
from servers.flags.rules import RULES, Rule
from servers.flags.spelling import Spelling
from servers.logs.log_facts import LogFormat
from servers.reading import Number


def usual(name: str, platform: Platform) -> Spread:
    """vLLM's range of a default, whatever the machine."""
    return USUAL[name]


@dataclass(frozen=True, eq=False, repr=False)
class ServerKind:
    """Everything that differs between servers. A name of a flag is vLLM's throughout (see ``spelling``)."""

    name: str
    """As ``--target`` has it."""
    label: str
    """For people."""
    program: str
    serve: tuple[str, ...]
    """The words between the program and its flags."""
    module: str = ""
    """How the module begins that ``python -m`` starts it by; "": there is none."""
    start: str = ""
    """The command up to the model; "": ``program`` and ``serve``."""
    positional_model: bool = True
    """Whether the model stands behind ``serve`` as it is, without a flag."""
    always: tuple[str, ...] = ()
    """Switches that it is started with, beside the user's flags."""
    key_variable: str = ""
    """The environment variable that it takes its API key from, beside ``--api-key``; "": there is none."""
    public: bool = False
    """It listens on every address of the machine unless it is told otherwise."""
    exclusive: bool = True
    """Two on one device would each claim their share of it."""
    help: tuple[tuple[str, ...], ...] = (("--help",),)
    """Ways to ask it for its flags, in order."""
    help_cached: bool = True
    """False: quick to ask, and its flags change without its program."""
    version_path: str = "/version"
    """Where it tells its version over HTTP; "": nowhere."""
    spelling: Spelling = field(default_factory=lambda: Spelling("vLLM"))
    flags: frozenset[str] | None = None
    """Those of vLLM's flags that it has; None: as ``spelling`` says."""
    defaults: Callable[[str, Platform], Spread] = usual
    memory_step: float | None = None
    """How much ``gpu_memory_utilization`` may be raised at a time; None: to any value."""
    memory_note: str = ""
    """What is said of such a step."""
    budget_counts_decodes: bool = True
    """Whether ``max_num_batched_tokens`` covers the tokens that decode as well, or prompts alone."""
    prompt_lookup: bool = True
    """Whether it can speculate by n-grams of the prompt, without a draft model."""
    drafts_show: bool = True
    """Whether its metrics of speculation exist exactly while it speculates."""
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key of ``servers.metrics.catalog`` -> sample names, newest first; a histogram's without the suffix."""
    families: tuple[tuple[str, str], ...] = ()
    """(sample name, what exposes it), decisive names first: the first that is there says which version."""
    log: LogFormat | None = None
    """None: as vLLM's (``servers.logs.vllm_log``)."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Reason of ``servers.failures`` -> pattern of the lines that show it, beside those of every server."""

    def __repr__(self) -> str:
        return f"<{self.label}>"

    @property
    def command(self) -> str:
        """The command up to the model."""
        return self.start or " ".join((self.program, *self.serve))

    def begins(self, words: Sequence[str], at: int) -> tuple[int, int] | None:
        """(first word of the server's program, first word of its flags) where that stands at ``at``."""
        after = at + 1 + len(self.serve)
        if PurePath(words[at]).name == self.program and tuple(words[at + 1 : after]) == self.serve:
            return at, after
        if (
            self.module
            and at
            and words[at] == "-m"
            and "".join(words[at + 1 : at + 2]).startswith(self.module)
        ):
            return at - 1, at + 2
        return None

    def default(self, name: str, platform: Platform) -> Number:
        """What a flag is where it is not set: exact where the platform leaves no choice, else a range."""
        return Number(*self.defaults(name, platform), "flag")

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Between its flags."""
        return tuple(rule for rule in RULES if self.budget_counts_decodes or not rule.budget)

    def has(self, flag: str) -> bool:
        return self.spelling.has(flag) if self.flags is None else flag in self.flags

    def offered(self, version: str | None) -> OfferedFlags | None:
        """What a release takes, in its own names; None where that is not known."""
        return released_flags(self.name, version) if version else None

    def unavailable(self, flag: str, version: str | None, value: Any = None) -> str | None:
        """Why a server of this kind and version cannot take vLLM's ``flag``, or this value of it; None where
        it can."""
        if not self.has(flag):
            return f"{self.label} has no such flag"
        offered = self.offered(version)
        if offered is None:
            return None
        name = self.spelling.own(flag, offered)
        written = {name: None} if value is None else self.spelling.to_own({flag: value}, offered)
        return next(filter(None, (self._refusal(n, v, offered) for n, v in written.items())), None)

    def _refusal(self, name: str, value: Any, offered: OfferedFlags) -> str | None:
        spelled, server = "--" + name.replace("_", "-"), f"{self.label} {offered.version}"
        if name in offered:
            return None if offered.takes(name, value) else f"{server} has no {spelled} {value}"
        releases = releases_of(self.name)
        spans = releases.flags.get(name, ()) if releases else ()
        if not spans:
            return f"{server} has no {spelled}"
        until = f" to {spans[-1][1]}" if spans[-1][1] else ""
        return f"{server} has no {spelled} (releases from {spans[0][0]}{until} have)"
