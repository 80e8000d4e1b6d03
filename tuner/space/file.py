"""``--space FILE``: the knobs to search and further rules, as YAML or JSON.

knobs:
  max_num_seqs: [8, 16, 32, 64]
  max_num_batched_tokens: {low: 256, high: 4 * max_num_batched_tokens}
  gpu_memory_utilization: {low: 0.8, high: 0.95, step: 0.05}
  speculative_config.num_speculative_tokens: [0, 2, 4]
constraints:
  - holds: max_num_batched_tokens <= 64 * max_num_seqs
    because: must not exceed 64 tokens a sequence
    when: {enable_prefix_caching: true}
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from servers.expression import ExpressionError, parse_expression
from servers.flags.rules import Rule
from tuner.space.axis import Value, is_number
from tuner.space.knobs import KNOBS, Knob, SpaceError

_KNOB_KEYS = ("values", "low", "high", "step", "last", "needs", "needs_value")
_RULE_KEYS = ("holds", "because", "when")


@dataclass(frozen=True)
class SpaceFile:
    """What a file says: the knobs in its order, and the rules beside the usual ones."""

    knobs: tuple[Knob, ...]
    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, data: Any, name: str = "--space") -> SpaceFile:
        """From a parsed file. Raises SpaceError; its message begins with ``name``."""
        if not isinstance(data, dict) or not isinstance(data.get("knobs"), dict) or not data["knobs"]:
            raise SpaceError(f"{name}: needs a mapping 'knobs' of flags to their values.")
        _check_keys(data, ("knobs", "constraints", "file"), name)
        knobs = tuple(
            _knob(str(flag).replace("-", "_"), given, f"{name}: knobs: {flag}")
            for flag, given in data["knobs"].items()
        )
        constraints = data.get("constraints", [])
        if not isinstance(constraints, list):
            raise SpaceError(f"{name}: constraints: must be a list.")
        rules = [_rule(item, f"{name}: constraints[{at}]") for at, item in enumerate(constraints)]
        return cls(knobs, tuple(rules))


def read_space_file(path: Path) -> Mapping[str, Any]:
    """The file's content, checked, and its name, as plain data that a study can keep. Raises SpaceError."""
    import yaml

    name = f"--space {path}"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise SpaceError(f"{name}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpaceError(f"{name}: neither YAML nor JSON ({' '.join(str(error).split())}).") from None
    SpaceFile.of(data, name)
    return {"file": str(path), **data}


def _knob(name: str, given: Any, where: str) -> Knob:
    if isinstance(given, list):
        given = {"values": given}
    if not isinstance(given, dict):
        raise SpaceError(f"{where}: write the list of values, or a mapping with low and high.")
    _check_keys(given, _KNOB_KEYS, where)
    usual = next((knob for knob in KNOBS if knob.name == name), Knob(name))
    values, last = (_values(given.get(key, []), f"{where}: {key}") for key in ("values", "last"))
    low, high = (_expression(given, key, where) for key in ("low", "high"))
    if bool(low) != bool(high):
        raise SpaceError(f"{where}: low and high belong together.")
    if not values and not low:
        raise SpaceError(f"{where}: has neither values nor low and high.")
    step = given.get("step", 0)
    if not is_number(step) or not 0 <= step < math.inf:
        raise SpaceError(f"{where}: step: must be a number above 0; leave it out for powers of two.")
    ordered = all(map(is_number, (*values, *last)))
    return Knob(
        name,
        values,
        low,
        high,
        step,
        last,
        ordered=ordered,
        default=usual.default,
        needs=given.get("needs", usual.needs),
        needs_value=given.get("needs_value", usual.needs_value),
    )


def _values(given: Any, where: str) -> tuple[Value, ...]:
    if not isinstance(given, list):
        raise SpaceError(f"{where}: must be a list.")
    for value in given:
        finite = not isinstance(value, float) or math.isfinite(value)
        if not isinstance(value, str | int | float) or not finite:
            raise SpaceError(f"{where}: {value!r} is neither a number nor a switch nor a word.")
    return tuple(dict.fromkeys(given))


def _expression(given: Mapping[str, Any], key: str, where: str) -> str:
    if key not in given:
        return ""
    text = str(given[key])
    try:
        parse_expression(text)
    except ExpressionError as error:
        raise SpaceError(f"{where}: {key}: {error}.") from None
    return text


def _rule(given: Any, where: str) -> Rule:
    if isinstance(given, str):
        given = {"holds": given}
    if not isinstance(given, dict) or not isinstance(given.get("holds"), str):
        raise SpaceError(f"{where}: write a comparison, or a mapping with 'holds: a comparison'.")
    _check_keys(given, _RULE_KEYS, where)
    when = given.get("when", {})
    if not isinstance(when, dict):
        raise SpaceError(f"{where}: when: must map flags to the values they must have.")
    text = str(given.get("because") or f"must hold {given['holds']}")
    named = {str(flag).replace("-", "_"): value for flag, value in when.items()}
    try:
        rule = Rule("", given["holds"], text, named)
    except ExpressionError as error:
        raise SpaceError(f"{where}: holds: {error}.") from None
    first = next((name for name in _in_order(rule.holds) if name in rule.compared), "")
    return Rule(first, rule.holds, text, named)


def _in_order(text: str) -> list[str]:
    return re.findall(r"[a-z_]\w*", text)


def _check_keys(given: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            _unknown(str(key), known, where)


def _unknown(key: str, known: tuple[str, ...], where: str) -> NoReturn:
    close = difflib.get_close_matches(key, known, n=1)
    near = f" Did you mean {close[0]}?" if close else ""
    raise SpaceError(f"{where}: unknown key {key!r}; known are {', '.join(known)}.{near}")
