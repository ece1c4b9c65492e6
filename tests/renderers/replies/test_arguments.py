"""Bare text to JSON values by the declared schema."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers.messages import Tool
from renderers.replies.arguments import value_of


def value(text, schema, **definitions):
    parameters = {"type": "object", "properties": {"p": schema}, **definitions}
    return value_of(text, "p", Tool("f", parameters, {}))


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "5.5", 5.5),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, "[a]", "[a]"),
        ({"type": "object"}, '{"a":{"b":null},"a":2}', {"a": 2}),
        ({"type": "object"}, '"\\ud800"', '"\\ud800"'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "number"]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[5]", [5]),
        ({"anyOf": [{"type": "string"}, {}]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "2"]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/Zip~1Code"}, "01067", "01067"),
        ({"$ref": "#/$defs/Zip~1Code"}, "5", "5"),
        ({"$ref": "#/$defs/missing"}, "5", 5),
        ({"$ref": "https://example.com/schema"}, "5", 5),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({}, "5", 5),
        ({}, "True", "True"),
        ({}, "five", "five"),
        (True, "5", 5),
        ({"type": 3}, "5", 5),
    ],
)
def test_the_schema_decides_what_a_text_is(schema, text, expected):
    definitions = {"Zip/Code": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    found = value(text, schema, **{"$defs": definitions})
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("parameters", [{}, {"properties": None}, {"properties": []}, {"properties": {"q": {}}}])
def test_without_a_declaration_a_text_is_json_if_it_parses(parameters):
    assert value_of("5", "p", Tool("f", parameters, {})) == 5
    assert value_of("five", "p", None) == "five"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
)
TYPES = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


@given(JSON)
def test_what_is_written_as_its_type_is_written_comes_back(given_value):
    text = given_value if isinstance(given_value, str) else json.dumps(given_value, ensure_ascii=False)
    assert value(text, {"type": TYPES[type(given_value)]}) == given_value
