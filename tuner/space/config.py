"""A config: flag names (vLLM's, snake case) and their values, *effective* where every knob has one in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tuner.space.knobs import ALWAYS_NAMED, DRAFTS, SPECULATION, default_of, knobs_of

Config = Mapping[str, Any]
LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")
LOOKUP_DEFAULT = 5
"""Of both, where a speculative config gives neither; where it gives one, that is both."""


def effective(flags: Config, server: str) -> dict[str, Any]:
    """What a ``server`` of this kind runs with when it is started with ``flags``: defaults filled in."""
    own = knobs_of(server)
    named = [knob for knob in own if knob.main or knob.name in ALWAYS_NAMED]
    defaults = {k.flag: None if k.flag == SPECULATION else default_of(k, server) for k in named}
    config: dict[str, Any] = {**defaults, **flags}
    speculation = config.get(SPECULATION)
    if speculation and speculation.get("method") == "ngram":
        given = [speculation[key] for key in LOOKUPS if key in speculation]
        lookup = dict.fromkeys(LOOKUPS, given[0] if given else LOOKUP_DEFAULT)
        lookup = lookup if any(knob.name.endswith(LOOKUPS) for knob in own) else {}
        drafts = speculation.get("num_speculative_tokens", 1)
        config[SPECULATION] = {"num_speculative_tokens": drafts, **lookup, **speculation}
    return config


def flatten(config: Config) -> dict[str, Any]:
    """Nested flags as ``flag.key``; speculation that is off has 0 drafts."""
    flat = dict(config)
    speculation = flat.get(SPECULATION)
    flat[DRAFTS] = speculation.get("num_speculative_tokens", 1) if speculation else 0
    for flag, value in config.items():
        if isinstance(value, dict):
            del flat[flag]
            for key, item in value.items():
                flat[f"{flag}.{key}"] = item
    return flat


def numbers_of(flat: Mapping[str, Any]) -> dict[str, float]:
    """What expressions can compute with: numbers, switches as 0 and 1, of ``flag.key`` the key."""
    return {
        name.rpartition(".")[2]: float(value)
        for name, value in flat.items()
        if isinstance(value, int | float)
    }


def speculation_of(config: Config) -> dict[str, Any] | None:
    """A speculative config as it is given; None where nothing is drafted."""
    if not config.get("num_speculative_tokens"):
        return None
    whole = {"method": "ngram", **config}
    unused = () if whole["method"] == "ngram" else LOOKUPS
    return {key: value for key, value in whole.items() if key not in unused}


def config_key(config: Config) -> str:
    """A canonical text: two configs have the same key exactly when they set the same."""
    return json.dumps(config, sort_keys=True)


def render_value(value: Any) -> str:
    """A value as the command line has it; objects as compact JSON, None as ``off``."""
    if value is None:
        return "off"
    return json.dumps(value) if isinstance(value, bool | Mapping) else str(value)
