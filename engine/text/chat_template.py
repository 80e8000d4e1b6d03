"""A model's chat template: where it is found, and what transformers gives it, so that it renders the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.model_error import ModelError
from engine.models.weights import read_json

if TYPE_CHECKING:
    import jinja2


def find_chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja, else tokenizer_config.json (``config``: a string, or a list of named ones),
    else chat_template.json (of multimodal models). Raises ModelError."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: not readable as UTF-8 text ({error})") from None
    template, source = config.get("chat_template"), directory / "tokenizer_config.json"
    if template is None and (file := directory / "chat_template.json").is_file():
        template, source = read_json(file).get("chat_template"), file
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{source}: chat_template is not a text")
    return template


def compile_template(text: str) -> jinja2.Template:
    """In a sandbox, with the functions and tags that templates may use. Raises jinja2.TemplateError."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}`` marks what is trained on; here it is just its content."""

        def __init__(self, environment: jinja2.Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format_: datetime.now().strftime(format_)
    return environment.from_string(text)
