"""The form that an answer must have: OpenAI's ``response_format``, vLLM's ``structured_outputs``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.request import StructuredOutputsParams
from engine.server.fields import Fields, RequestError

MAX_FORM = 1 << 20
"""Characters of a JSON schema, regex or grammar, and of all choices together."""
MAX_CHOICES = 10_000


def parse_structured_outputs(fields: Fields) -> StructuredOutputsParams | None:
    """The form, if one is asked for. Raises RequestError."""
    schema, any_object = _response_format(fields.nested("response_format"))
    given = fields.nested("structured_outputs")
    for name in ("structural_tag", "disable_additional_properties"):
        if given.raw(name):
            raise given.refuse(name, "is not supported by this server")
    own = given.raw("json")
    kinds: dict[str, Any] = {
        "json": None if own is None else _schema(given, "json", own),
        "regex": given.text("regex"),
        "choice": _choices(given),
        "grammar": given.text("grammar"),
        "json_object": given.boolean("json_object") or None,
    }
    if schema is not None:
        kinds["json"] = schema
    if any_object:
        kinds["json_object"] = True
    if fields.raw("structured_outputs") is None and not any(kinds.values()):
        return None
    try:
        form = StructuredOutputsParams(
            **kinds,
            disable_any_whitespace=given.boolean("disable_any_whitespace"),
            whitespace_pattern=given.text("whitespace_pattern"),
        )
    except ValueError as error:
        raise RequestError(f"structured_outputs: {error}", "structured_outputs") from None
    _limit_form(kinds)
    return form


def _response_format(given: Fields) -> tuple[str | None, bool]:
    """The JSON schema it names, and whether it asks for any JSON object."""
    kind = given.text("type")
    if kind in (None, "text", "json_object"):
        return None, kind == "json_object"
    if kind != "json_schema":
        raise RequestError(
            "response_format.type must be text, json_object or json_schema", "response_format.type"
        )
    named = given.nested("json_schema")
    return _schema(named, "schema", named.raw("schema")), False


def _schema(fields: Fields, name: str, value: Any) -> str:
    """A JSON schema as text; it may be given as text too. What it says is for the grammar's compiler."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema)
    except (ValueError, RecursionError):
        raise fields.refuse(name, "must be a JSON schema") from None
    if not isinstance(schema, dict | bool):
        raise fields.refuse(name, "must be a JSON schema, which is an object, true or false")
    return text


def _choices(fields: Fields) -> tuple[str, ...] | None:
    value = fields.raw("choice")
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise fields.refuse("choice", "must be a non-empty list of strings")
    return tuple(value)


def _limit_form(kinds: Mapping[str, Any]) -> None:
    """What can be compiled in about a second."""
    choices = kinds["choice"] or ()
    size = sum(len(kinds[name] or "") for name in ("json", "regex", "grammar")) + sum(map(len, choices))
    for what, count, most in (("characters", size, MAX_FORM), ("choices", len(choices), MAX_CHOICES)):
        if count > most:
            raise RequestError(
                f"structured_outputs must have at most {most} {what}, got {count}", "structured_outputs"
            )
