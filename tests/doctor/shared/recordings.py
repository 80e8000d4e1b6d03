"""Test helper: the recordings of a real server beside the repository, where they are at hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.doctor.loads import HEALTHY
from benchmarks.doctor.matrix import TRUTH as KNOWN
from servers.metrics.exposition import read_series_text, split_scrapes

FOLDER = Path(__file__).parents[4] / "shared" / "scrapes"
needs_recordings = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recordings at {FOLDER}")

TRUTH = {name: None if cause == HEALTHY else cause for name, cause in KNOWN.items()}
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
