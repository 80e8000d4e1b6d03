"""``--speculative-config``: how drafts are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from engine.errors import ConfigError

Method = Literal["ngram", "suffix", "draft_model", "eagle"]
METHODS: tuple[Method, ...] = get_args(Method)
MODEL_METHODS = ("draft_model", "eagle")
_METHODS_OF_KEY: dict[str, tuple[str, ...]] = {
    "model": MODEL_METHODS,
    "draft_sample_method": MODEL_METHODS,
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
}
"""Which methods look at a key of ``--speculative-config``. A key that is not named here belongs to all
methods."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """``--speculative-config`` (JSON), keys and defaults as in vLLM.

    Three differences: ``disable_by_batch_size`` is of this engine (vLLM had it until 0.16); without
    ``method`` and ``model`` the method is n-gram, where vLLM asks for one; and ``num_speculative_tokens``
    has a default, where vLLM (but for suffix decoding) asks for it.
    """

    method: Method = "ngram"
    num_speculative_tokens: int = 3
    """Drafts per step at most. Where the JSON leaves it out, suffix decoding uses its tree depth, as vLLM."""
    model: str | None = None
    """The draft model's or EAGLE head's checkpoint, named as ``--model`` is."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """How a draft model chooses: its likeliest token, or a draw at the request's own temperature."""
    prompt_lookup_min: int = 5
    """Where the JSON gives only one of min and max, it is both, as in vLLM."""
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    """Tokens of matched context and draft together."""
    suffix_decoding_max_cached_requests: int = 10000
    """Finished outputs that are drafted from; 0: none, only the request's own tokens."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Drafts at most, for each token of matched context."""
    suffix_decoding_min_token_prob: float = 0.1
    """A draft ends before its probability, by the counts of what followed its context, falls below this."""
    disable_by_batch_size: int | None = None
    """No drafts while more requests than this are running; None: always drafts."""

    def __post_init__(self) -> None:
        self._check(
            "method", self.method in METHODS, f"method must be one of {', '.join(METHODS)}", "choose one"
        )
        self._check(
            "num_speculative_tokens", self.num_speculative_tokens >= 1, "must be at least 1", "drop the flag"
        )
        if self.uses_model:
            fix = "write the draft's checkpoint as model, or choose method ngram or suffix"
            self._check("model", bool(self.model), f"method {self.method} drafts with a model", fix)
        else:
            fix = "drop model, or choose method draft_model or eagle"
            self._check("model", self.model is None, f"method {self.method} has no model", fix)
        ways = ("greedy", "probabilistic")
        self._check(
            "draft_sample_method",
            self.draft_sample_method in ways,
            f"must be {' or '.join(ways)}",
            "choose one",
        )
        self._check(
            "prompt_lookup_min",
            1 <= self.prompt_lookup_min <= self.prompt_lookup_max,
            f"1 <= prompt_lookup_min <= prompt_lookup_max ({self.prompt_lookup_max}) must hold",
            "raise prompt_lookup_max or lower prompt_lookup_min",
        )
        depth, cached = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_cached_requests
        self._check(
            "suffix_decoding_max_tree_depth", depth >= 2, "a match and a draft need 2 tokens", "e.g. 24"
        )
        self._check(
            "suffix_decoding_max_cached_requests", cached >= 0, "must not be negative", "0 turns it off"
        )
        factor, least = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        self._check("suffix_decoding_max_spec_factor", 0 < factor < math.inf, "must be above 0", "e.g. 1.0")
        self._check("suffix_decoding_min_token_prob", 0 <= least <= 1, "must lie in [0, 1]", "e.g. 0.1")
        limit = self.disable_by_batch_size
        self._check(
            "disable_by_batch_size", limit is None or limit >= 1, "must be at least 1", "drop the key"
        )

    def _check(self, key: str, holds: bool, rule: str, fix: str) -> None:
        if not holds:
            raise ConfigError("speculative_config", f"{key}={getattr(self, key)}", rule, fix)

    @property
    def uses_model(self) -> bool:
        """Whether drafts come from a network, which needs KV slots for them, weights and memory."""
        return self.method in MODEL_METHODS

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> SpeculativeConfig:
        """From the flag's JSON text or an already parsed mapping. Raises ConfigError."""
        flag = "speculative_config"
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    flag, value, f"not JSON ({error})", 'write e.g. \'{"method": "ngram"}\''
                ) from None
        if not isinstance(value, Mapping):
            raise ConfigError(flag, value, "must be a JSON object", "write {…}")
        types = get_type_hints(cls)
        unknown = sorted(set(value) - set(types))
        if unknown:
            raise ConfigError(flag, unknown[0], "unknown key", f"known keys: {', '.join(sorted(types))}")
        for key, item in value.items():
            _check_type(key, item, types[key])
        return cls(**_complete(value))


def _check_type(key: str, item: object, kind: Any) -> None:
    """Raise ConfigError where a value of ``--speculative-config`` is not of its key's type."""
    if item is None and type(None) in get_args(kind):
        return
    number = not isinstance(item, bool) and isinstance(item, int | float)
    if kind is float:
        holds, name = number, "a number"
    elif kind is int or int in get_args(kind):
        holds, name = number and isinstance(item, int), "an integer"
    else:
        holds, name = isinstance(item, str), "text"
    if not holds:
        raise ConfigError("speculative_config", item, f"{key} must be {name}", f"write {name}")


def _complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """A ``--speculative-config`` with vLLM's defaults where one key decides about another.

    Raises ConfigError for a key that the method would not look at.
    """
    config = dict(given)
    if config.get("model") is not None:
        config.setdefault("method", "draft_model")
    method = config.get("method", "ngram")
    for key in given:
        if method in METHODS and method not in _METHODS_OF_KEY.get(key, METHODS):
            rule = f"{key} is a key of method {' and '.join(_METHODS_OF_KEY[key])}, not of {method}"
            raise ConfigError("speculative_config", key, rule, "drop it, or change the method")
    lookup = [config[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in config]
    if len(lookup) == 1:
        config["prompt_lookup_min"] = config["prompt_lookup_max"] = lookup[0]
    if method == "suffix":
        default = SpeculativeConfig.suffix_decoding_max_tree_depth
        config.setdefault("num_speculative_tokens", config.get("suffix_decoding_max_tree_depth", default))
    return config
