"""What servers and files say is shown, and does nothing else: in terminals, Markdown, HTML and plots."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import records
from plotly.offline import get_plotlyjs
from typer.testing import CliRunner

from loadgen.compare import Pair, compare_runs
from loadgen.measure.record import Records
from loadgen.output import comparison
from loadgen.output.comparison_page import comparison_page
from loadgen.output.escape import code, code_block, markdown_text, printable
from loadgen.output.report import print_run, run_markdown
from loadgen.output.run_page import run_page
from vtune_cli import app

HOSTILE = "\x1b[31m[red]<img src=x>\u202e|x"


def hostile_run() -> Records:
    """Its model, its reasons and one of its classes are hostile text."""
    run = records()
    renamed = tuple(replace(r, cls="[/red]<b>" + HOSTILE) if r.cls == "short" else r for r in run.requests)
    environment = {**run.environment, "model": HOSTILE}
    return replace(run, requests=renamed, environment=environment, reasons=(HOSTILE,))


def without_library(page: str) -> str:
    return page.replace(get_plotlyjs(), "")


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.add(tag)


@pytest.mark.parametrize("char", ["\x00", "\x1b", "\x9b", "\r", "\n", "\u2028", "\u202e", "\ud800", "\ufffe"])
def test_what_is_not_printable_is_shown_as_an_escape(char: str) -> None:
    shown = printable(f"a{char}b")
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert printable(f"a{char}b", char) == f"a{char}b"


def test_markdown_has_no_tag_link_code_or_column_of_a_value() -> None:
    assert markdown_text("a|b <img> </p> &copy; [x](u) `c` \\\n# d") == (
        r"a\|b &lt;img> &lt;/p> &amp;copy; \[x](u) \`c\` \\ # d"
    )
    assert markdown_text("itl_p99 < 50 ms, a<5 & b") == "itl_p99 < 50 ms, a<5 & b"


def test_code_ends_where_its_fence_is() -> None:
    assert code("a|b") == "`a|b`"
    assert code("a|b", cell=True) == r"`a\|b`"
    assert code("x``y`") == "``` x``y` ```"
    assert code_block("```\nrm\x1b", "sh") == "````sh\n```\nrm\\x1b\n````"


def test_a_run_shows_hostile_text_as_text() -> None:
    run = hostile_run()
    out = io.StringIO()
    print_run(run, out)
    for text in (out.getvalue(), run_markdown(run), without_library(run_page(run))):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert r"\x1b" in text
        assert "[red]" in text or r"\[red]" in text
    assert "<img" not in run_markdown(run)
    assert "img" not in Tags(run_page(run)).found
    plots = re.findall(r"Plotly\.newPlot\((.*?)</script>", run_page(run), re.DOTALL)
    assert any("&lt;img src" in plot for plot in plots)
    assert not any("u003cimg" in plot for plot in plots)


def test_a_comparison_shows_hostile_text_as_text() -> None:
    found = compare_runs([Pair(0, hostile_run(), hostile_run())], ["itl_p50"])
    found = replace(found, a={"server": HOSTILE}, b={"server": "b"}, notes=(HOSTILE,))
    for text in (
        comparison.comparison_text(found),
        comparison.comparison_markdown(found),
        without_library(comparison_page(found)),
    ):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert r"\x1b" in text
    assert "img" not in Tags(comparison_page(found)).found


def test_a_trace_shows_hostile_text_as_text(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text('ts,in,out,kind\n0,5,5,"\x1b[31m<img>"\n1,5,5,b\n')
    columns = ("--trace-columns", "time=ts:s,prompt=in,output=out,class=kind")
    for format, shown in (("text", r"\x1b[31m<img> 1"), ("markdown", r"\\x1b\[31m&lt;img> 1")):
        words = ["bench", "trace", str(file), *columns, "--format", format]
        assert shown in CliRunner().invoke(app, words).stdout
