"""A page in a headless Chromium, without a network: what it says on the console, and which plots it draws."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def check_page(page: Path, at_least: int) -> str:
    """Assert that every ``plotN`` of ``page`` is drawn, ``at_least`` so many, and that the console is silent.

    Returns the page as the browser has it in the end.
    """
    assert CHROMIUM is not None
    wanted = set(re.findall(r'<div id="(plot\d+)"', page.read_text(encoding="utf-8")))
    assert len(wanted) >= at_least
    browser = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", "--virtual-time-budget=10000",
            f"--user-data-dir={page.parent / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    said = [line for line in browser.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    places = [*re.finditer(r'id="(plot\d+)"', browser.stdout), None]
    drawn = {
        place[1]
        for place, following in pairwise(places)
        if place
        and 'class="main-svg"' in browser.stdout[place.start() : following.start() if following else None]
    }
    assert drawn == wanted
    return browser.stdout
