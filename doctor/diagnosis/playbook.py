"""Playbooks: Markdown files whose front matter is the rule that the doctor runs.

Keys: ``id title severity when for prescribe expect``; ``cost``, by which findings are ranked and which a
page of severity info may lack (requests held up at any time; or ``{tokens: …}``, lost per second; or
``{misplaced: …}``, requests on the wrong instance); and where wanted ``titles`` (what a finding is called
instead, ``if`` a condition holds), ``explains`` (findings that this one causes), ``explained_by`` (the
same, said on the page of the consequence), ``show`` (more signals as
evidence) and ``reproduce``. A file that breaks the schema is refused with the file, the key and what to write
instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, cast, get_args

from doctor.diagnosis.cost import Cost
from doctor.diagnosis.expectation import ExpectationError, parse_expectation
from doctor.diagnosis.experiment import ExperimentError, Reproduction, read_reproduction
from doctor.diagnosis.judged_objectives import MISSED
from doctor.diagnosis.judged_objectives import OBJECTIVE_NAMES as SLO_NAMES
from doctor.metrics.signals import SIGNALS
from servers import expression
from servers.errors import UserError
from servers.expression import All, AnyOf, Clause, Expression, ExpressionError, Lookup, Relation
from servers.known_flags import FLAG_NAMES
from servers.logs.incidents import SIGNS

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

ASSUMPTIONS: Mapping[str, str] = {
    "shared_prefix": "tokens that prompts share; metrics cannot show it, pass --assume shared-prefix=TOKENS"
}
"""What only the user knows, by name."""

LOG = "needs the server's log (--log FILE)"
_BASELINE = "needs a baseline recording (--baseline FILE)"
BENCH = "needs a benchmark's result (--bench FILE)"
_LABELS = "needs the labels of its series"
BASELINE = "baseline_"
"""What the names of an earlier time's figures begin with."""
TOLD: Mapping[str, str] = {
    "startup_seconds": LOG,
    "compile_seconds": LOG,
    "load_seconds": LOG,
    **dict.fromkeys(SIGNS, LOG),
    "model_changed": _BASELINE,
    "pool_change": _BASELINE,
    "bench_requests": BENCH,
    "bench_failed": BENCH,
    "bench_seconds": BENCH,
    "bench_rate_share": BENCH,
    "ranks": _LABELS,
    "servers": _LABELS,
    "adapters_running": _LABELS,
    "adapters_waiting": _LABELS,
    "adapters_seen": _LABELS,
    "reasons_told": _LABELS,
}
"""What neither signals nor flags hold, by name, with who says. ``ranks``: how many data-parallel ranks the
server has; ``servers``: how many servers share its load; ``adapters_running``, ``adapters_waiting``: LoRA
adapters, most at once; ``adapters_seen``: different ones in the window; ``reasons_told``:
1 where the server says what its requests wait for. Beside them, ``baseline_X`` is the
signal or flag X of an earlier recording."""


def told_by(name: str) -> str | None:
    """Who says ``name``, where it is none of the server's metrics and flags."""
    return _BASELINE if name.startswith(BASELINE) else TOLD.get(name)


_REQUIRED = ("id", "title", "severity", "when", "for", "prescribe", "expect")
_OPTIONAL = ("cost", "titles", "explains", "explained_by", "show", "reproduce", "refutes")
_REMEDY_KEYS = frozenset({"set", "unset", "do", "needs", "because"})
FIGURE_IN_TEXT = re.compile(r"\{([^{}]+)\}")
"""An expression in a remedy's ``because``: its value stands there in the output."""
_DURATION = re.compile(r"[1-9]\d*[smh]")
_TEXT_FLAGS = frozenset({"kv_cache_dtype", "scheduling_policy"})
_SETTABLE = frozenset({*FLAG_NAMES, *_TEXT_FLAGS, "speculative_config"}) - {
    "num_gpu_blocks",
    "kv_cache_tokens",
}


class PlaybookError(UserError):
    """A playbook that breaks the schema. The message says file, key, and what to write."""


@dataclass(frozen=True)
class Remedy:
    """One thing to do: flags to set or drop, or advice in words (``do``); ``needs`` must hold for it."""

    settings: Mapping[str, Expression | str]
    unset: tuple[str, ...]
    do: str | None
    needs: All
    because: str | None


@dataclass(frozen=True)
class Playbook:
    """One symptom: its rule, its remedies, and the prose for people."""

    id: str
    title: str
    severity: Severity
    when: All
    hold: str
    """How long an alert waits (``for:``)."""
    remedies: tuple[Remedy, ...]
    expect: Mapping[str, str]
    cost: Cost | None
    explains: tuple[str, ...]
    explained_by: tuple[str, ...]
    show: tuple[str, ...]
    reproduction: Reproduction
    prose: str
    refutes: str | None = None
    """The folklore that this page answers. Such a page may have no rule."""
    titles: tuple[tuple[Clause, str], ...] = ()
    """For symptoms with several faces: what a finding is called where a condition holds."""

    def named(self, lookup: Lookup) -> str:
        """What a finding on one engine is called."""
        return next((title for case, title in self.titles if case.judge(lookup).value), self.title)

    @property
    def signals(self) -> tuple[str, ...]:
        """Signals that serve as evidence, in the order in which the rule names them."""
        named = [name for clause in _leaves(self.when) for name in _in_order(clause)]
        return tuple(dict.fromkeys([*(name for name in named if name in SIGNALS), *self.show]))


@cache
def load_all() -> tuple[Playbook, ...]:
    """Every playbook of the package, by id. Raises PlaybookError."""
    files = [item for item in resources.files("playbooks").iterdir() if item.name.endswith(".md")]
    books = together(parse_playbook(item.read_text(encoding="utf-8"), item.name) for item in files)
    return tuple(sorted(books, key=lambda book: book.id))


def together(books: Iterable[Playbook]) -> list[Playbook]:
    """What a page says to be explained by others, said of those as well. Raises PlaybookError."""
    joined = {book.id: book for book in books}
    for book in list(joined.values()):
        for cause in book.explained_by:
            if cause not in joined:
                raise PlaybookError(
                    f"{book.id}.md: explained_by: no playbook {cause!r}{_near(cause, joined)}"
                )
            joined[cause] = replace(joined[cause], explains=(*joined[cause].explains, book.id))
    check_together(joined.values())
    return list(joined.values())


def check_together(books: Collection[Playbook]) -> None:
    """Refuse playbooks that explain unknown ones, or each other in a circle. Raises PlaybookError."""
    by_id = {book.id: book for book in books}
    for book in by_id.values():
        for other in book.explains:
            if other not in by_id:
                raise PlaybookError(f"{book.id}.md: explains: no playbook {other!r}{_near(other, by_id)}")
        reached, frontier = set[str](), set(book.explains)
        while frontier:
            reached |= frontier
            frontier = {after for step in frontier for after in by_id[step].explains} - reached
        if book.id in reached:
            raise PlaybookError(f"{book.id}.md: explains: leads back to itself")


def parse_playbook(text: str, filename: str) -> Playbook:
    """Read one file. Raises PlaybookError."""
    import yaml

    parts = re.split(r"^---[ \t]*$", text, maxsplit=2, flags=re.MULTILINE)
    if len(parts) != 3 or parts[0].strip():
        raise PlaybookError(f"{filename}: must begin with front matter between two '---' lines")
    try:
        matter = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise PlaybookError(f"{filename}: front matter is not YAML ({error})") from None
    if not isinstance(matter, dict):
        raise PlaybookError(f"{filename}: front matter must be a mapping")
    return _Reader(filename, matter).playbook(parts[2].strip())


class _Reader:
    """Checks one file's front matter, key by key."""

    def __init__(self, filename: str, matter: Mapping[Any, Any]) -> None:
        self.filename = filename
        self.matter = matter

    def playbook(self, prose: str) -> Playbook:
        known = (*_REQUIRED, *_OPTIONAL)
        for key in self.matter:
            if key not in known:
                raise self.error(str(key), f"unknown key{_near(str(key), known)}; known: {', '.join(known)}")
        for key in _REQUIRED:
            if key not in self.matter:
                raise self.error(key, "is missing")
        if self.text("id") != self.filename.removesuffix(".md"):
            raise self.error("id", f"is {self.text('id')!r}, but the file is {self.filename}")
        if not prose:
            raise self.error("prose", "say below the front matter what goes on and why the fix works")
        if self.text("severity") not in SEVERITIES:
            raise self.error("severity", f"must be one of {', '.join(SEVERITIES)}")
        if not _DURATION.fullmatch(self.text("for")):
            raise self.error("for", "write a duration such as 2m")
        return Playbook(
            id=self.text("id"),
            title=self.text("title"),
            severity=cast(Severity, self.text("severity")),
            when=self.all_of("when", self.matter["when"]),
            hold=self.text("for"),
            remedies=tuple(
                self.remedy(f"prescribe[{index}]", item)
                for index, item in enumerate(self.sequence("prescribe", self.matter["prescribe"]))
            ),
            expect=self.expect(),
            cost=self.cost(),
            explains=self.ids("explains"),
            explained_by=self.ids("explained_by"),
            show=self.show(),
            reproduction=self.reproduction(),
            prose=prose,
            refutes=None if "refutes" not in self.matter else self.text("refutes"),
            titles=self.titles(),
        )

    def error(self, key: str, message: str) -> PlaybookError:
        return PlaybookError(f"{self.filename}: {key}: {message}")

    def text(self, key: str) -> str:
        value = self.matter[key]
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"must be text, not {value!r}")
        return value

    def sequence(self, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(key, "must be a list")
        return value

    def mapping(self, key: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.error(key, "must be a mapping")
        return value

    def expect(self) -> Mapping[str, str]:
        expected = self.mapping("expect", self.matter["expect"])
        for name in expected:
            if name not in SIGNALS:
                raise self.error("expect", f"no signal {name!r}{_near(name, SIGNALS)}")
            try:
                parse_expectation(str(expected[name]))
            except ExpectationError as error:
                raise self.error(f"expect.{name}", str(error)) from None
        return {name: str(change) for name, change in expected.items()}

    def reproduction(self) -> Reproduction:
        if "reproduce" not in self.matter:
            return Reproduction(why_none="no experiment was written yet")
        try:
            return read_reproduction(self.matter["reproduce"])
        except ExperimentError as error:
            raise self.error("reproduce", str(error)) from None

    def cost(self) -> Cost | None:
        given = self.matter.get("cost")
        if given is None:
            if self.text("severity") != "info":
                raise self.error("cost", "is missing; say how many requests are held up, or {tokens: …}")
            return None
        if isinstance(given, dict):
            unit = next(iter(given), None)
            if len(given) != 1 or unit not in ("tokens", "misplaced"):
                raise self.error("cost", "write an expression, or {tokens: an expression}, or {misplaced: …}")
            return Cost(self.expression(f"cost.{unit}", given[unit]), unit)
        return Cost(self.expression("cost", given))

    def ids(self, key: str) -> tuple[str, ...]:
        return tuple(map(str, self.sequence(key, self.matter.get(key, []))))

    def titles(self) -> tuple[tuple[Clause, str], ...]:
        cases = self.sequence("titles", self.matter.get("titles", []))
        for number, case in enumerate(cases):
            if (
                not isinstance(case, dict)
                or set(case) != {"if", "title"}
                or not isinstance(case["title"], str)
            ):
                raise self.error(f"titles[{number}]", "write {if: a condition, title: text}")
        return tuple(
            (self.clause(f"titles[{n}].if", case["if"]), case["title"]) for n, case in enumerate(cases)
        )

    def show(self) -> tuple[str, ...]:
        names = [str(name) for name in self.sequence("show", self.matter.get("show", []))]
        for name in names:
            if name not in SIGNALS:
                raise self.error("show", f"no signal {name!r}{_near(name, SIGNALS)}")
        return tuple(names)

    def all_of(self, key: str, value: Any) -> All:
        items = self.sequence(key, value)
        if not items and key.startswith("when") and "refutes" not in self.matter:
            raise self.error(key, "must name at least one condition")
        return All(tuple(self.clause(f"{key}[{index}]", item) for index, item in enumerate(items)))

    def clause(self, key: str, value: Any) -> Clause:
        if isinstance(value, str):
            return self.comparison(key, value)
        if isinstance(value, dict) and len(value) == 1 and set(value) <= {"any", "all"}:
            ((word, parts),) = value.items()
            inner = self.all_of(f"{key}.{word}", parts)
            if not inner.parts:
                raise self.error(f"{key}.{word}", "must name at least one condition")
            return inner if word == "all" else AnyOf(inner.parts)
        raise self.error(key, "write a comparison, or a mapping with 'any:' or 'all:' and a list")

    def comparison(self, key: str, text: str) -> Relation:
        try:
            comparison = expression.parse_comparison(text)
        except ExpressionError as error:
            raise self.error(key, str(error)) from None
        self.check_names(key, comparison.names)
        return comparison

    def expression(self, key: str, value: Any) -> Expression:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.error(key, f"must be a number or an expression, not {value!r}")
        try:
            parsed = expression.parse_expression(str(value))
        except ExpressionError as error:
            raise self.error(key, str(error)) from None
        self.check_names(key, parsed.names)
        return parsed

    def check_names(self, key: str, names: Iterable[str]) -> None:
        known = {*SIGNALS, *FLAG_NAMES, *SLO_NAMES, *MISSED, *ASSUMPTIONS, *TOLD}
        for name in sorted(names):
            if name not in known and name.removeprefix("baseline_") not in {*SIGNALS, *FLAG_NAMES}:
                raise self.error(key, f"unknown name {name!r}{_near(name, known)}")

    def remedy(self, key: str, value: Any) -> Remedy:
        given = self.mapping(key, value)
        unknown = set(given) - _REMEDY_KEYS
        if unknown:
            raise self.error(
                f"{key}.{min(unknown)}", f"unknown key; known: {', '.join(sorted(_REMEDY_KEYS))}"
            )
        if not {"set", "unset", "do"} & set(given):
            raise self.error(key, "needs one of set, unset, do")
        needs = given.get("needs", [])
        because = None if "because" not in given else str(given["because"]).strip()
        for figure in FIGURE_IN_TEXT.findall(because or ""):
            self.expression(f"{key}.because", figure)
        unset = tuple(map(str, self.sequence(f"{key}.unset", given.get("unset", []))))
        for name in unset:
            self.check_settable(f"{key}.unset", name)
        return Remedy(
            settings={
                name: self.setting(f"{key}.set.{name}", name, wanted)
                for name, wanted in self.mapping(f"{key}.set", given.get("set", {})).items()
            },
            unset=unset,
            do=None if "do" not in given else str(given["do"]).strip(),
            needs=self.all_of(f"{key}.needs", [needs] if isinstance(needs, str) else needs),
            because=because,
        )

    def setting(self, key: str, name: str, value: Any) -> Expression | str:
        self.check_settable(key, name)
        return str(value) if name in _TEXT_FLAGS else self.expression(key, value)

    def check_settable(self, key: str, name: str) -> None:
        if name not in _SETTABLE:
            raise self.error(key, f"no flag {name!r}{_near(name, _SETTABLE)}")


def _leaves(clause: Clause) -> Iterable[Relation]:
    if isinstance(clause, Relation):
        yield clause
        return
    for part in clause.parts:
        yield from _leaves(part)


def _in_order(comparison: Relation) -> list[str]:
    return re.findall(r"[a-z_][a-z0-9_]*", comparison.text)


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
