"""Test helper: the benchmarks' Prometheus, for tests that are skipped where it is not installed."""

from __future__ import annotations

import pytest

from benchmarks.doctor.prometheus import (
    PROMETHEUS,
    PROMTOOL,
    await_first_scrape,
    free_port,
    load_recording,
    load_recordings,
    prometheus,
)

__all__ = [
    "PROMTOOL",
    "await_first_scrape",
    "free_port",
    "load_recording",
    "load_recordings",
    "needs_prometheus",
    "prometheus",
]

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="the prometheus and promtool binaries are not installed"
)
