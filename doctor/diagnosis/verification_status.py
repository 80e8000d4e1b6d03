"""Whether a prescription has been proven: read from what ``make playbooks`` measured and wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doctor.diagnosis.playbook import Playbook

FILE = "verified.json"
SCHEMA = "vtune.verified/1"
NOT_VERIFIED = "not verified"
_ORDER = ("verified", "verified in simulation", "refuted")


def verification_of(book: Playbook, remedy: int) -> str:
    """``verified``, ``verified in simulation``, ``refuted`` or ``not verified``.

    A proof counts only for the very cure that was tried: one that was reworded since is not verified.
    """
    wanted = fingerprint(book, remedy)
    found = {
        proof["standing"]
        for proof in proofs()
        if (proof["playbook"], proof["remedy_print"]) == (book.id, wanted)
    }
    return next((word for word in _ORDER if word in found), NOT_VERIFIED)


def fingerprint(book: Playbook, remedy: int) -> str:
    """Of a cure: its settings, what it unsets, and its advice; not of its conditions and reasons."""
    cure = book.remedies[remedy]
    settings = {name: item if isinstance(item, str) else item.text for name, item in cure.settings.items()}
    text = json.dumps([settings, list(cure.unset), cure.do], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def proofs() -> tuple[Mapping[str, Any], ...]:
    """What was measured, one entry an experiment; empty where nothing was."""
    file = resources.files("playbooks").joinpath(FILE)
    if not file.is_file():
        return ()
    data = json.loads(file.read_text(encoding="utf-8"))
    return tuple(data["proofs"]) if data.get("schema") == SCHEMA else ()
