"""Which structure a request asks for, and which requests for one are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.request import StructuredOutputsParams
from engine.server.json_body import RequestError, read_body
from engine.server.structured_params import (
    MAX_CHOICES,
    MAX_STRUCTURE_CHARACTERS,
    StructureFields,
    parse_structured_outputs,
)


def parse(**body: Any) -> StructuredOutputsParams | None:
    return parse_structured_outputs(read_body(body, StructureFields))


def json_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def structure(**kinds: Any) -> dict[str, Any]:
    return {"structured_outputs": kinds}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": json_schema({"type": "null"})}, {"json": '{"type": "null"}'}),
        (structure(json={"const": 1}), {"json": '{"const": 1}'}),
        (structure(json='{"const":1}'), {"json": '{"const": 1}'}),
        (structure(json=True), {"json": "true"}),
        (structure(json_object=True), {"json_object": True}),
        (structure(regex="a+", json=None, json_object=False), {"regex": "a+"}),
        (structure(choice=["a", ""]), {"choice": ["a", ""]}),
        (structure(grammar='root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (
            {
                **structure(disable_any_whitespace=True, whitespace_pattern=" "),
                "response_format": json_schema(False),
            },
            {"json": "false", "disable_any_whitespace": True, "whitespace_pattern": " "},
        ),
    ],
)
def test_what_is_asked_for(body: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert parse(**body) == (None if expected is None else StructuredOutputsParams(**expected))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "JSON schema"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema", "JSON schema"),
        (
            structure(),
            "structured_outputs",
            "give one of json, regex, choice, grammar, json_object, not none",
        ),
        (structure(regex="a", choice=["a"]), "structured_outputs", "not regex and choice"),
        (
            {**structure(regex="a"), "response_format": {"type": "json_object"}},
            "structured_outputs",
            "not regex and json_object",
        ),
        (structure(json="{"), "structured_outputs.json", "must be a JSON schema"),
        (structure(json="[1]"), "structured_outputs.json", "object, true or false"),
        (structure(json=nested(100_000)), "structured_outputs.json", "must be a JSON schema"),
        (structure(json=5), "structured_outputs.json", "must be a JSON schema"),
        (structure(regex=5), "structured_outputs.regex", "must be a string"),
        (structure(choice="a"), "structured_outputs.choice", "list of strings"),
        (structure(choice=[]), "structured_outputs.choice", "list of strings"),
        (structure(choice=[1]), "structured_outputs.choice[0]", "must be a string, got 1"),
        (structure(choice=["a"] * (MAX_CHOICES + 1)), "structured_outputs", "at most 10000 choices"),
        (
            structure(regex="a" * (MAX_STRUCTURE_CHARACTERS + 1)),
            "structured_outputs",
            "at most 1048576",
        ),
        (structure(structural_tag="x"), "structured_outputs.structural_tag", "not supported"),
        (
            structure(json={}, disable_additional_properties=True),
            "structured_outputs.disable_additional_properties",
            "not supported",
        ),
    ],
)
def test_refusals_name_field_and_rule(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert caught.value.param == param
    assert words in caught.value.message


def test_a_schema_keeps_what_it_says() -> None:
    schema = {"properties": {"é": {"enum": [1.5, None, "\u0000"]}}}
    params = parse(response_format=json_schema(schema))
    assert params is not None
    assert isinstance(params.json, str)
    assert json.loads(params.json) == schema
