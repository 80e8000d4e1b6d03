"""The articles' claims: how a verdict is reached, and that the page shows what the experiments find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.doctor.claims import markdown, tried, verdict
from benchmarks.doctor.claims_catalog import (
    CLAIMS,
    long_prompt_beside_decodes,
    shared_copy,
    twice_the_devices,
)
from benchmarks.doctor.claims_figures import Figure

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
QUICK = (long_prompt_beside_decodes, shared_copy, twice_the_devices)


def change(claimed: float, found: float) -> Figure:
    return Figure("TTFT", claimed, found)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ([change(3.0, 2.0), change(0.5, 0.4)], "reproduced"),
        ([change(3.0, 1.2), change(0.5, 0.9)], "direction only"),
        ([change(3.0, 2.0), change(0.5, 1.1)], "partly"),
        ([change(3.0, 1.02), change(0.5, 1.1)], "refuted"),
        ([Figure("step", 100, 60, "amount", "ms"), Figure("loss", 8, 7, "at most")], "reproduced"),
        ([Figure("step", 100, 40, "amount", "ms")], "refuted"),
        ([Figure("saved", 300, -5, "at least", "ms")], "refuted"),
    ],
)
def test_a_verdict_weighs_every_figure(figures: list[Figure], expected: str) -> None:
    assert verdict(figures) == expected


def test_a_change_is_shown_as_a_share_or_a_factor() -> None:
    assert (change(0.88, 3.0).claimed_text, change(0.88, 3.0).found_text) == ("-12%", "x3")
    assert Figure("gap", 300, 1072, "at most", "ms").claimed_text == "<= 300 ms"


def rows() -> Iterator[str]:
    return (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| "))


def test_the_page_has_every_claim_once_and_in_order() -> None:
    said = [row.split(" | ")[0].removeprefix("| ") for row in rows()]
    assert said[1:] == [claim.says for claim in CLAIMS]


def test_the_page_shows_what_is_found() -> None:
    quick = [claim for claim in CLAIMS if claim.experiment in QUICK]
    assert len(quick) == len(QUICK)
    assert set(list(markdown(list(tried(quick))))[2:]) <= set(rows())
