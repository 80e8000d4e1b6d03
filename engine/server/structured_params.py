"""What a request's output must look like: OpenAI's ``response_format``, vLLM's ``structured_outputs``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from engine.fields import FieldError
from engine.request import StructuredOutputsParams
from engine.server.json_body import RequestError

MAX_STRUCTURE_CHARACTERS = 1 << 20
"""Of a JSON schema, regex or grammar, and of all choices together."""
MAX_CHOICES = 10_000


class JsonSchemaFormat(Struct):
    """``response_format.json_schema``."""

    schema: Any = None


class ResponseFormat(Struct):
    """``response_format``."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"] | None,
        Meta(description="must be text, json_object or json_schema"),
    ] = None
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct):
    """``structured_outputs``; vLLM's names."""

    json: Any = None
    regex: str | None = None
    choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None,
        Meta(description="must be a non-empty list of strings"),
    ] = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None
    disable_additional_properties: Any = None


class StructureFields(Struct):
    """The fields of a body that say what the output must look like."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def parse_structured_outputs(body: StructureFields) -> StructuredOutputsParams | None:
    """The structure that is asked for, if any. Raises RequestError."""
    given = body.structured_outputs or StructuredOutputs()
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(given, name):
            path = f"structured_outputs.{name}"
            raise RequestError(f"{path} is not supported by this server", path)
    kinds: dict[str, Any] = {
        "json": None if given.json is None else _schema("structured_outputs.json", given.json),
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object or None,
    }
    wanted = body.response_format or ResponseFormat()
    if wanted.type == "json_schema":
        named = wanted.json_schema or JsonSchemaFormat()
        kinds["json"] = _schema("response_format.json_schema.schema", named.schema)
    elif wanted.type == "json_object":
        kinds["json_object"] = True
    if body.structured_outputs is None and not any(kinds.values()):
        return None
    try:
        structure = StructuredOutputsParams(
            **kinds,
            disable_any_whitespace=bool(given.disable_any_whitespace),
            whitespace_pattern=given.whitespace_pattern,
        )
    except ValueError as error:
        raise RequestError(f"structured_outputs: {error}", "structured_outputs") from None
    _limit_size(structure)
    return structure


def _schema(path: str, value: Any) -> str:
    """A JSON schema as text; it may be given as text too. Its content is for the grammar's compiler."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict | bool):
        error = FieldError.of(path, "must be a JSON schema, which is an object, true or false", value)
        raise RequestError(str(error), path)
    return text


def _limit_size(structure: StructuredOutputsParams) -> None:
    """Raise RequestError for what may take more than about a second to compile."""
    texts = [structure.json, structure.regex, structure.grammar, *(structure.choice or ())]
    size = sum(len(text) for text in texts if text)
    num_choices = len(structure.choice or ())
    limits = (("characters", size, MAX_STRUCTURE_CHARACTERS), ("choices", num_choices, MAX_CHOICES))
    for what, count, most in limits:
        if count > most:
            raise RequestError(
                f"structured_outputs must have at most {most} {what}, got {count}", "structured_outputs"
            )
