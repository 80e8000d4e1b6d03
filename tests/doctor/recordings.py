"""Test helper: the recordings of a real server beside the repository, where they are at hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from doctor.exposition import read_series_text, split_scrapes

FOLDER = Path(__file__).parents[2].parent / "shared" / "scrapes"
needs_recordings = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recordings at {FOLDER}")

TRUTH: dict[str, str | None] = {
    "healthy-steady": None,
    "spec-none": None,
    "kv-starved": "kv-pressure",
    "seq-cap": "seq-cap",
    "overload": "overload",
    "long-prefill-itl-spikes": "itl-spikes-long-prefill",
    "long-prefill-small-chunks": "itl-spikes-long-prefill",
    "small-budget-ttft": "prefill-slow",
    "prefix-unshared": "prefix-misses",
    "spec-ngram-bad": "speculation-loses",
}
"""The true cause of each recording; None where nothing is wrong."""


def series_path(name: str) -> Path:
    return FOLDER / name / "series.prom.gz"


def log_path(name: str) -> Path:
    return FOLDER / name / "server.log.gz"


@cache
def meta(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / name / "meta.json").read_text())
    return loaded


@cache
def scrapes(name: str) -> tuple[tuple[int, str], ...]:
    """(unix ms, text) of every scrape."""
    text, notes = read_series_text(series_path(name))
    assert not notes
    return tuple(split_scrapes(text))
