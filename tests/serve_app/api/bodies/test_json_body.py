"""A body without what is ignored: the same as the body read whole, at a bounded cost."""

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_core import from_json

from serve_app.api.bodies.ignored_fields import IgnoredFields, ignored_fields
from serve_app.api.bodies.json_body import parse_object
from serve_app.api.schema.chat import ChatBody
from serve_app.base.errors import InvalidRequest
from serve_app.base.json_structure import Structure

NAMES = ChatBody.names()
LARGE = 1 << 17
PADDING = ',"user":"' + "x" * LARGE + '"'


def structure_by_hand(text: bytes) -> list[tuple[int, int]]:
    """A backslash outside of strings, which is no JSON, escapes too."""
    found, depth, inside, escaped = [], 0, False, False
    for place, byte in enumerate(text):
        if byte == ord('"') and not escaped:
            inside = not inside
        elif byte in b"[]{},:" and not inside:
            depth += (byte in b"[{") - (byte in b"]}")
            found.append((place, depth))
        escaped = byte == ord("\\") and not escaped
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_structure_is_that_of_reading_byte_by_byte(seed: int) -> None:
    rng = random.Random(seed)
    text = bytes(rng.choice(b'"\\[]{},: a') for _ in range(2000))
    structure = Structure.of(text, piece_bytes=rng.choice((1, 2, 3, 7, 64, 5000)))
    assert list(zip(structure.positions.tolist(), structure.depths.tolist(), strict=True)) == structure_by_hand(text)


def without_ignored(value: Any, names: Any) -> Any:
    if names is None:
        return value
    if isinstance(value, list):
        return [without_ignored(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: without_ignored(inner, names[name]) for name, inner in value.items() if name in names}


MESSAGE = {
    "role": "assistant",
    "content": [{"type": "text", "text": 'a"],}{\\', "cache": {"a": ["x" * 100]}}, "x"],
    "junk": [{"a": [1, 2]}] * 30,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}", "strict": "x" * 90}, "index": [0] * 50}],
}
BODY = {"model": "m", "messages": [MESSAGE] * 3, "metadata": {"n\u00e4me": "y" * 70}, "n": 1, "tools": [{"any": 1}]}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_a_large_body_is_read_as_a_small_one(indent: int | None, ensure_ascii: bool) -> None:
    for padding in ({}, {"user": "x" * LARGE}):
        body = {**BODY, **padding}
        found = parse_object(json.dumps(body, indent=indent, ensure_ascii=ensure_ascii).encode(), NAMES)
        assert without_ignored(found, NAMES) == without_ignored(body, NAMES)
        assert set(ignored_fields(found, NAMES).names) == {
            *padding,
            "metadata",
            "n",
            "messages[].junk",
            "messages[].content[].cache",
            "messages[].tool_calls[].index",
            "messages[].tool_calls[].function.strict",
        }


@pytest.mark.parametrize(
    "ignored",
    [
        "[1,]",
        "[1 2]",
        '{"a" 1}',
        '{"a":}',
        "{1:2}",
        "[}",
        "[NaN]",
        "[01]",
        '["\\ud800"]',
        '["\x01"]',
        "[1],",
        "tru",
        "[1]x",
    ],
)
@pytest.mark.parametrize("size", [0, LARGE])
def test_what_is_ignored_is_judged_like_the_rest(ignored: str, size: int) -> None:
    """Also where it is so long that it is read in pieces."""
    longer = [f'["{"y" * size}",{ignored}]', f'[{ignored},"{"y" * size}"]', f'{{"a":"{"y" * size}","b":{ignored}}}']
    for text in longer:
        with pytest.raises(InvalidRequest, match=r"^The request body is not valid JSON: "):
            parse_object(f'{{"model":"m","junk":{text}{PADDING}}}'.encode(), NAMES)


def test_text_that_is_no_utf_8_is_refused_in_what_is_ignored_too() -> None:
    for at in (b'{"junk":["%b\xff"]%b}', b'{"junk":["%b",["\xff"]]%b}'):
        with pytest.raises(InvalidRequest, match="not valid JSON"):
            parse_object(at % (b"y" * LARGE, PADDING.encode()), NAMES)


def big(count: int, item: str) -> str:
    return ",".join([item] * count)


@pytest.mark.parametrize("shape", ["junk", "messages[].junk", "nested"])
def test_what_is_ignored_takes_no_memory(shape: str) -> None:
    """Six bodies of 7.6 MB with a list of objects that nobody reads took 184 MB each, until their replies had ended."""
    junk = "[" + big(850_000, '{"a": 1}') + "]"
    text = {
        "junk": f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"junk":{junk}}}',
        "messages[].junk": f'{{"model":"m","messages":[{{"role":"user","content":"x","junk":{junk}}}]}}',
        "nested": f'{{"model":"m","messages":[],"junk":{{"a":{{"b":{junk}}},"c":1}}}}',
    }[shape].encode()
    assert len(text) > 7_500_000
    tracemalloc.start()
    try:
        found = parse_object(text, NAMES)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found["model"] == "m"
    assert kept < 100_000
    assert peak < 100_000_000, "while it is read; the text is not counted"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: '{"junk":1,"tools":[' + big(300_000, "{}") + "]}", "at most 100000 values that are read, got 600003."),
        (lambda: "{" + big(300_000, '"n":1') + "}", "at most 100000 values that are read, got 299999."),
        (lambda: f"[{big(300_000, '[]')}]", "at most 100000 values that are read, got 600001."),
        (lambda: '{"a":' + "[" * 300_000 + "}", "be nested at most 200 deep, got 300001."),
        (lambda: '{"a":' + "[" * 40_000 + "]" * 40_000 + "}", "be nested at most 200 deep, got 40001."),
    ],
)
def test_a_body_of_very_many_values_is_refused_before_they_are_made(make: Callable[[], str], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_object(make().encode(), NAMES)
    assert str(refused.value) == f"The request body must {'' if 'nested' in message else 'have '}{message}"


def test_only_the_first_names_are_kept_and_the_others_are_counted() -> None:
    raw = {f"f{index}": 0 for index in range(40)} | {"model": "m", "messages": [{"x": 1}, {"x": 1}], "user": None}
    found = ignored_fields(raw, NAMES)
    assert found == IgnoredFields(tuple(f"f{index}" for index in range(32)), more=9)


def test_the_reader_agrees_with_its_reference_on_what_is_read() -> None:
    text = json.dumps(
        {"model": "m", "messages": [], "seed": 2**64 - 1, "temperature": 0.1, "user": "x" * LARGE}
    ).encode()
    found = parse_object(text, NAMES)
    assert {**found, "user": None} == {**from_json(text), "user": None}
