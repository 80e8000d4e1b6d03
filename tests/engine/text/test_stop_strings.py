"""Stop strings in streamed text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop_strings import StopMatcher


def feed(matcher: StopMatcher, pieces: list[str]) -> list[str]:
    """What comes out for each piece, and at the end."""
    out = []
    for piece in pieces:
        out.append(matcher.push(piece))
        if matcher.matched is not None:
            return out
    return [*out, matcher.finish()]


def test_without_stops_text_passes_untouched() -> None:
    assert feed(StopMatcher(()), ["ab", "c"]) == ["ab", "c", ""]


def test_a_stop_across_pieces_is_not_handed_out() -> None:
    matcher = StopMatcher(("END",))
    assert feed(matcher, ["one E", "N", "Dtwo"]) == ["one ", "", ""]
    assert matcher.matched == "END"


def test_what_only_looked_like_a_stop_is_handed_out_later() -> None:
    assert feed(StopMatcher(("END",)), ["one E", "N", "Xtwo EN"]) == ["one ", "", "ENXtwo ", "EN"]


def test_include_stop() -> None:
    assert feed(StopMatcher(("END",), include_stop=True), ["a EN", "D b"]) == ["a ", "END"]


def test_the_first_stop_in_the_text_wins() -> None:
    matcher = StopMatcher(("later", "sooner"))
    assert feed(matcher, ["x sooner later"]) == ["x "]
    assert matcher.matched == "sooner"


@pytest.mark.parametrize("stop", ["aab", "aa", "a"])
def test_a_stop_that_overlaps_itself(stop: str) -> None:
    assert "".join(feed(StopMatcher((stop,)), list("baaab"))) == "baaab".split(stop)[0]


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_pieces_do_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    """However the text is cut, what comes out is the text up to the stop that is complete first."""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    fed = "".join(feed(StopMatcher(stops), pieces))
    assert text.startswith(fed)
    assert not any(stop in fed for stop in stops)
    if not any(stop in text for stop in stops):
        assert fed == text
