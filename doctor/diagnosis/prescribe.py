"""From a playbook's remedies to exact flags for one server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from re import Match
from typing import Any

from doctor.diagnosis.allowed_changes import allowed
from doctor.diagnosis.engine_view import EngineView
from doctor.diagnosis.finding import Prescription
from doctor.diagnosis.playbook import FIGURE_IN_TEXT, Playbook, Remedy
from doctor.diagnosis.verification_status import NOT_VERIFIED, verification_of
from loadgen.measure.rounding import significant
from servers.expression import Lookup, Relation, parse_expression
from servers.kinds import BUNDLED, VLLM
from servers.known_flags import SWITCHES, Flags
from servers.reading import Number, Reading


def prescriptions(book: Playbook, view: EngineView) -> tuple[Prescription, ...]:
    """The remedies that apply here, as exact flags; last those whose condition fails on the best figures."""
    built: list[Prescription] = []
    doubtful: list[Prescription] = []
    for number, remedy in enumerate(book.remedies):
        asked = view.asked(remedy.needs)
        if asked is None:
            continue
        needed = asked.judge(view.lookup)
        if needed.value is False or any(item.kind != "flag" for item in needed.missing):
            continue
        # Undecided only because a flag is not known: prescribed with the condition in words.
        condition = None if needed.value else _condition(remedy, view)
        likely = remedy.needs.judge(_points(view.lookup)).value
        if condition is not None and not likely and not _computable(remedy, view):
            continue
        prescription = _prescription(remedy, view, condition)
        if prescription is not None:
            holds = condition is None and _as_proven(remedy, view)
            status = verification_of(book, number) if holds else NOT_VERIFIED
            (built if likely else doubtful).append(replace(prescription, remedy=number, verification=status))
    return (*built, *doubtful)


def _as_proven(remedy: Remedy, view: EngineView) -> bool:
    """Whether a proof speaks of this server: the proofs are of vLLM's scheduling, and of values that were
    computed from flags that were stated."""
    settings = [setting for setting in remedy.settings.values() if not isinstance(setting, str)]
    used = set().union(*(setting.names for setting in settings)) & view.flags.known.keys()
    return view.flags.kind in (VLLM, BUNDLED) and all(view.flags.known[name].certain for name in used)


def _computable(remedy: Remedy, view: EngineView) -> bool:
    """Whether a conditional cure sets a flag to a value that does not come from a guess that breaks it."""
    settings = [setting for setting in remedy.settings.values() if not isinstance(setting, str)]
    known = view.flags.known
    guessed = {name for name, flag in known.items() if not flag.number.exact}
    return bool(settings) and not any(setting.names & guessed for setting in settings)


def _condition(remedy: Remedy, view: EngineView) -> str:
    """The needs that depend on an unknown flag, with their limits as numbers where they can be computed."""
    words = []
    for part in remedy.needs.parts:
        if part.judge(view.lookup).value is None and isinstance(part, Relation):
            limit = part.right.value(_points(view.lookup))
            shown = significant(limit.point) if isinstance(limit, Number) else part.right.text
            words.append(f"{part.left.text} {part.operator} {shown}")
    return "only if " + " and ".join(words)


def _points(lookup: Lookup) -> Lookup:
    """A lookup that takes every range for its best single figure."""

    def point(name: str) -> Reading:
        reading = lookup(name)
        return Number.exactly(reading.point) if isinstance(reading, Number) else reading

    return point


def _prescription(remedy: Remedy, view: EngineView, condition: str | None) -> Prescription | None:
    """None where the server has none of the flags, or where nothing would change."""
    flags = view.flags
    wanted = _wanted(remedy, view)
    if wanted is None:
        return None
    reasons = {name: reason for name, v in wanted.items() if (reason := flags.unavailable(name, v))}
    checked = allowed({name: v for name, v in wanted.items() if name not in reasons}, flags)
    if checked is None:
        return None
    changes, notes = checked
    if wanted and not changes and not remedy.do:
        return None
    if changes and all(_is_so(value, flags.value(name)) for name, value in changes.items()):
        return None
    used = {*remedy.needs.names, *changes}.union(
        *(setting.names for setting in remedy.settings.values() if not isinstance(setting, str))
    )
    known = flags.known
    uncertain = {n: known[n].origin for n in sorted(used & known.keys()) if not known[n].certain}
    because = None if remedy.because is None else _filled(remedy.because, view)
    text = "; ".join(filter(None, [remedy.do, because, condition, *notes, *dict.fromkeys(reasons.values())]))
    changes, was = _as_typed(changes, {name: flags.value(name) for name in changes}, flags)
    words = flags.kind.spelling.arguments(changes, flags.kind.offered(flags.version))
    return Prescription(changes, was, words, text, uncertain)


def _filled(text: str, view: EngineView) -> str:
    """A reason with the figures of this server for the expressions in braces."""

    def figure(match: Match[str]) -> str:
        value = parse_expression(match[1]).value(_points(view.lookup))
        return significant(value.point) if isinstance(value, Number) else "an unknown number"

    return FIGURE_IN_TEXT.sub(figure, text)


def _wanted(remedy: Remedy, view: EngineView) -> dict[str, Any] | None:
    """New flag values (None: drop the flag); None where one of them cannot be computed."""
    wanted: dict[str, Any] = dict.fromkeys(remedy.unset)
    for name, setting in remedy.settings.items():
        if isinstance(setting, str):
            wanted[name] = setting
            continue
        number = setting.value(_points(view.lookup))
        if not isinstance(number, Number) or not math.isfinite(number.point):
            return None
        wanted[name] = _rounded(name, number.point, view)
    return wanted


def _is_so(wanted: Any, current: Any) -> bool:
    """Whether a flag has the wanted value already; fp8_e4m3 is an fp8."""
    if isinstance(wanted, str):
        return str(current).startswith(wanted)
    return wanted is not None and wanted == current


def _rounded(name: str, value: float, view: EngineView) -> int | float | bool:
    if name == "gpu_memory_utilization":
        return math.floor(value * 100 + 1e-9) / 100
    if name in SWITCHES:
        return bool(value)
    whole = math.floor(value + 1e-9)
    if name == "max_num_seqs":
        return _graph_size(whole, view)
    return whole // 16 * 16 if name == "max_num_batched_tokens" and whole >= 64 else whole


def _graph_size(wanted: int, view: EngineView) -> int:
    """A batch that vLLM captures a graph for: of a cap to be lowered the next below ``wanted``, of one to be
    raised the next above, where the KV pool has room for it.

    Between two of these sizes a step is padded to the larger one, or runs without a graph. Source:
    ``VllmConfig._set_cudagraph_sizes`` (1, 2, 4, multiples of 8, from 256 on of 16).
    """
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, wanted + 32, 16))
    below = max(size for size in sizes if size <= max(wanted, 1))
    above = min(size for size in sizes if size >= wanted)
    current = view.flags.value("max_num_seqs")
    if not isinstance(current, int | float) or wanted <= current:
        return below
    running, usage = (view.lookup(name) for name in ("running_max", "kv_max"))
    if below <= current:
        return above
    if not isinstance(running, Number) or not isinstance(usage, Number):
        return below
    return above if above * usage.point <= 0.9 * running.point else below


def _as_typed(
    changes: Mapping[str, Any], was: Mapping[str, Any], flags: Flags
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The number of draft tokens is a key of ``speculative_config``, not a flag of its own."""
    key, config = "num_speculative_tokens", "speculative_config"
    if key not in changes:
        return dict(changes), dict(was)
    current = flags.raw.get(config)
    current = dict(current) if isinstance(current, Mapping) else {}
    return {config: {**current, key: changes[key]}}, {config: {**current, key: was[key]}}
