"""``--lora-modules``, and the rules of the flags for LoRA adapters."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of ``--max-lora-rank``, as in vLLM (``MaxLoRARanks``)."""
MAX_LORAS, MAX_LORA_RANK = 1, 16
"""Defaults, as in vLLM."""
_FLAG, _EXAMPLE = "lora_modules", "write sql=./sql-adapter"


@dataclass(frozen=True)
class LoRAModule:
    """An adapter that the server has from its start."""

    name: str
    """What clients ask for as ``model``."""
    path: str
    """A directory in PEFT's format, or a hub id."""
    base_model_name: str | None = None
    """What ``/v1/models`` calls its ``parent``; None: the served model."""

    @classmethod
    def parse(cls, text: str) -> LoRAModule:
        """From ``name=path``, or vLLM's JSON object of name, path and base_model_name. Raises ConfigError."""
        if not text.lstrip().startswith("{"):
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise ConfigError(_FLAG, text, "must be name=path, or a JSON object", _EXAMPLE)
            return cls(name, path)
        try:
            given: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise ConfigError(_FLAG, text, f"not JSON ({error})", _EXAMPLE) from None
        unknown = sorted(given.keys() - {"name", "path", "base_model_name"})
        if unknown:
            raise ConfigError(
                _FLAG, text, f"{unknown[0]} is no key of it", "name, path and base_model_name are"
            )
        if not all(given.get(key) for key in ("name", "path")) or not all(
            isinstance(value, str) for value in given.values()
        ):
            raise ConfigError(_FLAG, text, "name and path must be there, and all values be texts", _EXAMPLE)
        return cls(**given)


def check_lora(
    enabled: bool, max_loras: int, max_lora_rank: int, modules: Sequence[LoRAModule], taken: Collection[str]
) -> None:
    """The rules of the flags. ``taken``: names of the served model. Raises ConfigError."""
    if max_loras < 1:
        raise ConfigError("max_loras", max_loras, "must be at least 1", "give a positive number")
    if max_lora_rank not in RANKS:
        rule = f"must be one of {', '.join(map(str, RANKS))}"
        raise ConfigError("max_lora_rank", max_lora_rank, rule, "choose the next above your adapters' ranks")
    if not enabled and (max_loras, max_lora_rank) != (MAX_LORAS, MAX_LORA_RANK):
        warnings.warn("--max-loras and --max-lora-rank have no effect without --enable-lora", stacklevel=3)
    names = [module.name for module in modules]
    if modules and not enabled:
        raise ConfigError(_FLAG, names[0], "needs --enable-lora", "add it, or drop the adapters")
    for place, name in enumerate(names):
        if name in names[:place] or name in taken:
            owner = "another adapter" if name in names[:place] else "the model"
            raise ConfigError(_FLAG, name, f"is the name of {owner}", "give another name")
        if "," in name or not name.isprintable():  # metrics list names with commas in between
            raise ConfigError(_FLAG, ascii(name), "must be printable and without commas", "give another name")
