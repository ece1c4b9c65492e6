"""Calls as XML: what is one, and what is not."""

import json
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from renderers.deltas import Piece
from renderers.messages import Tool
from renderers.replies.xml_calls import parse_xml_call

F = Tool("f", {"properties": {"s": {"type": "string"}, "t": {"type": "string"}, "n": {"type": "integer"}}}, {})


def parse(text):
    calls = parse_xml_call([Piece(part) for part in text.partition("=")], {"f": F})
    return calls and [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("\n<function=f>\n</function>\n", {}),
        ("<function=f></function>", {}),
        ("<function=f>\n<parameter=s>\n5\n</parameter>\n</function>", {"s": "5"}),
        ("<function=f><parameter=s>5</parameter><parameter=n>5</parameter></function>", {"s": "5", "n": 5}),
        ("<function=f>\n<parameter=s>\n\n a\n\n</parameter>\n</function>", {"s": "\n a\n"}),
        ("<function=f>\n<parameter=s>\n\n</parameter>\n</function>", {"s": ""}),
        ("<function=f>\n<parameter=s>\n</parameter>\n</function>", {"s": ""}),
        (
            "<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=s>\nb\n</parameter>\n</function>",
            {"s": "b"},
        ),
        (
            "<function=f>\n<parameter=s>\na</parameter>b\n<parameter=t>\n</function>\n</parameter>\n</function>",
            {"s": "a</parameter>b\n<parameter=t>\n</function>"},
        ),
        ("<function=f>\n<parameter=s>\n1</parameter>\n<parameter=t>\n2\n</parameter></function>", {"s": "1", "t": "2"}),
        ("<function=f>\n<parameter=other>\n[1]\n</parameter>\n</function>", {"other": [1]}),
    ],
)
def test_a_call_has_its_arguments(text, arguments):
    assert parse(text) == [("f", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "<function=f>",
        "<function=>\n</function>",
        "junk<function=f></function>",
        "<function=f>junk</function>",
        "<function=f></function>junk",
        "<function=f></function><function=f></function>",
        "<function=f>\n<parameter=s>\n5\n</function>",
        "<function=f>\n<parameter=s>\n5\n</parameter>",
        "<function=f>\n<parameter=>\n5\n</parameter>\n</function>",
        "<function=f>\n<parameter=s>\n5\n</parameter>junk</function>",
        "<function=f>\n<parameter=s>5</parameter>junk<parameter=t>6</parameter>\n</function>",
        "<function=f>\n<parameter=s>\n5\n</parameter>\njunk\n<parameter=t>\n6\n</parameter>\n</function>",
        "<parameter=s>\n5\n</parameter>",
    ],
)
def test_anything_else_is_no_call(text):
    assert parse(text) is None


@given(st.text(), st.integers())
def test_any_text_is_an_argument_and_comes_back_as_it_was_written(text, number):
    assume(not re.search(r"^</parameter>|</parameter>\s*(<parameter=|</function>)", text, re.MULTILINE))
    written = f"<function=f>\n<parameter=s>\n{text}\n</parameter>\n<parameter=n>\n{number}\n</parameter>\n</function>"
    assert parse(written) == [("f", {"s": text, "n": number})]
