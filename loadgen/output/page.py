"""Reports from Jinja2 templates: HTML pages that open offline, Markdown and JUnit.

Every value that a template prints is escaped for the template's kind (``.html.j2``, ``.xml.j2``, ``.md.j2``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from loadgen.output.escape import BLOCK, code, code_block, markdown_text, printable

if TYPE_CHECKING:
    import plotly.graph_objects as go


def render(template: str, package: str = "loadgen.output", **values: Any) -> str:
    """``template`` of ``package``, which may extend and import those of this package. Raises
    jinja2.UndefinedError for a name that is not given."""
    return _environment(package).get_template(template).render(values)


def render_page(
    template: str, figures: Iterable[go.Figure] = (), package: str = "loadgen.output", **values: Any
) -> str:
    """An HTML page that extends ``page.html.j2``: ``figures`` as ``charts``, with Plotly's script inside."""
    from plotly.offline import get_plotlyjs

    charts = [_plot(figure, place) for place, figure in enumerate(figures)]
    return render(template, package, charts=charts, plotly=Markup(get_plotlyjs()) if charts else "", **values)


@cache
def _environment(package: str) -> jinja2.Environment:
    folders = [jinja2.PackageLoader(name) for name in dict.fromkeys((package, "loadgen.output"))]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(folders),
        autoescape=True,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code"] = lambda text, cell=False: Markup(code(str(text), cell))
    environment.filters["code_block"] = lambda text, language="": Markup(code_block(str(text), language))
    return environment


@jinja2.pass_context
def _escaped(context: jinja2.runtime.Context, value: Any) -> str:
    """For the template that prints it; Jinja escapes HTML in what is no Markup."""
    if hasattr(value, "__html__"):
        return Markup(value)
    name = context.name or ""
    return Markup(markdown_text(str(value))) if name.endswith(".md.j2") else printable(str(value), BLOCK)


def _plot(figure: go.Figure, place: int) -> Markup:
    """``div`` number ``place`` (``plot0``, ``plot1`` …) of a page that holds Plotly's script.

    The theme is laid in as data: a figure that is given it copies and checks all of it, which takes longer
    than all else about a figure.
    """
    import plotly.io

    drawn = _inert(figure.to_dict())
    drawn["layout"]["template"] = plotly.io.templates["plotly_white"].to_plotly_json()
    html = plotly.io.to_html(
        drawn,
        config={"responsive": True, "displayModeBar": False},
        include_plotlyjs=False,
        full_html=False,
        validate=False,
        div_id=f"plot{place}",
    )
    return Markup(html)


def _inert(value: Any) -> Any:
    """``value`` with no markup in its texts, which Plotly would draw as bold type, links and the like."""
    if isinstance(value, str):
        return printable(value).replace("<", "&lt;")
    if isinstance(value, dict):
        return {key: _inert(item) for key, item in value.items()}
    return [_inert(item) for item in value] if isinstance(value, list | tuple) else value
