"""What the user asked for, kept in the study so that it can be resumed by its name alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from loadgen.targets.simulated import PREFIX, gpu_defaults
from servers.errors import UserError
from servers.kinds import KINDS, find_start
from servers.shell_words import split_words

SCHEMA = "vtune.job/1"
DEFAULT_BUDGET_SECONDS = 600.0
DEFAULT_SIMULATED_BUDGET_SECONDS = 1800.0
"""Simulated seconds, of which some 30 pass in a real one."""
DEFAULT_RUN_SECONDS = 20.0


class UsageError(UserError):
    """Options that contradict each other or the study that they resume; the message says what to write."""


@dataclass(frozen=True)
class Job:
    """One ``vtune optimize``. Seconds, requests/s."""

    slo: str = "itl"
    target: str = "bundled"
    """A name in ``servers.kinds.KINDS``, ``simulated:DEVICE``, a URL, or a command with ``{flags}``."""
    model: str = "bundled"
    flags: Mapping[str, Any] = field(default_factory=dict)
    """The user's current flags, as given: the baseline."""
    workload: str = "mixed"
    scale: float | None = None
    """Factor on the workload's prompt lengths; None: by context and device."""
    rate: float | None = None
    concurrency: int | None = None
    budget: float | None = DEFAULT_BUDGET_SECONDS
    trials: int | None = None
    run_seconds: float | None = None
    """Length of a run; None: by what a start costs (see ``tuner.study.load_selection``)."""
    pairs: int | None = None
    command: str = ""
    """How ``--flags`` starts a server of the target's kind, without its flags; "": as it is installed."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The environment before the command in ``--flags``."""
    login: str = ""
    """How to log in, which is not stored: "" (no need), "sent" (by the client: a key, a user, headers) or
    "started" (the server is started with the key that is sent, too)."""
    space: Mapping[str, Any] | None = None
    """A space file's content (see ``tuner.space.file``)."""
    fix: tuple[str, ...] = ()
    vary: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    seed: int = 0
    strategy: str = "auto"
    """Who decides what to try (see tuner.search.strategies)."""
    from_doctor: tuple[Mapping[str, Any], ...] = ()
    """Prescriptions to try first (see tuner.search.from_doctor); empty: those for the baseline."""
    prior: str = "auto"
    """What simulates configs beforehand (see tuner.search.prior.make_simulator)."""
    replay: Mapping[str, Any] | None = None
    """Recorded traffic in place of the workload: ``job.options.Replay`` as JSON, and the file's sha256."""
    baseline: Mapping[str, Any] | None = None
    """The ``tuner.study.regression.Recommendation`` of an earlier study, as JSON; ``flags`` are its flags."""
    loads: tuple[float, ...] | None = None
    """Levels of load to compare configs at afterwards; None: those of a replayed trace; empty: none."""

    @property
    def server(self) -> str:
        """Whose flags and defaults apply: a name in ``servers.kinds.KINDS``."""
        if self.simulated:
            return "vllm" if gpu_defaults(self.target) else "bundled"
        if self.target in KINDS or self.running:
            return self.target if self.target in KINDS else "vllm"
        start = find_start(split_words(self.target)[1])
        return start.kind.name if start else "vllm"

    @property
    def running(self) -> bool:
        """Whether the target is a server that was there before us."""
        return self.target.startswith(("http://", "https://"))

    @property
    def simulated(self) -> bool:
        """Whether the study's seconds are those of a simulation."""
        return self.target.startswith(PREFIX)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises UsageError for a study that another version made."""
        if data.get("schema") != SCHEMA:
            raise UsageError(f"the study's schema is {data.get('schema')!r}, this version reads {SCHEMA!r}")
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        vary = {flag: None if items is None else tuple(items) for flag, items in values["vary"].items()}
        loads = values.get("loads")
        known = {"fix": tuple(values["fix"]), "vary": vary, "loads": None if loads is None else tuple(loads)}
        return cls(**{**values, **known, "from_doctor": tuple(values.get("from_doctor", ()))})
