"""What an upstream is sent: the caller's bytes, except for what must differ."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.json_structure import members
from serve_app.config.marketplace import UpstreamConfig
from serve_app.marketplace.outgoing import outgoing
from tests.support.files.json_texts import OBJECTS, VALUES, spelled

OWN = {"model", "price", "prompt_cache_key", "stream_options"}


def upstream(**takes: bool) -> UpstreamConfig:
    return UpstreamConfig.model_validate({"url": "https://example.com/v1", "model": 'their "name"', "takes": takes})


def sent(text: bytes | str, *, stream: bool = True, **takes: bool) -> Any:
    return json.loads(outgoing(text.encode() if isinstance(text, str) else text, upstream(**takes), stream=stream))


@given(OBJECTS, st.fixed_dictionaries({}, optional={name: VALUES for name in OWN}), st.booleans(), st.data())
def test_all_other_fields_keep_their_bytes(other: dict[str, Any], own: dict[str, Any], stream: bool, data: Any) -> None:
    text = data.draw(spelled(other | own | {"model": "acme/tri"}))
    result = outgoing(text, upstream(), stream=stream)
    assert {name: raw for name, raw in members(result).items() if name not in OWN} == {
        name: raw for name, raw in members(text).items() if name not in OWN
    }
    asked = json.loads(result)
    assert asked["model"] == 'their "name"'
    assert not asked.keys() & {"price", "prompt_cache_key"}
    if stream:
        given_options = own.get("stream_options")
        options = given_options if isinstance(given_options, dict) else {}
        assert asked["stream_options"] == options | {"include_usage": True}
    else:
        assert asked.get("stream_options") == own.get("stream_options")


@pytest.mark.parametrize(
    ("options", "stream_usage", "expected"),
    [
        ("", True, {"include_usage": True}),
        (',"stream_options":null', True, {"include_usage": True}),
        (',"stream_options":{"include_usage":false,"x":1}', True, {"include_usage": True, "x": 1}),
        ("", False, None),
        (',"stream_options":{"include_usage":true}', False, None),
        (',"stream_options":{"include_usage":true,"x":1}', False, {"x": 1}),
    ],
)
def test_usage_is_asked_for_where_the_upstream_knows_it(options: str, stream_usage: bool, expected: Any) -> None:
    assert sent(f'{{"model":"m"{options}}}', stream_usage=stream_usage).get("stream_options") == expected


def test_the_prompt_cache_key_goes_only_to_those_that_take_it() -> None:
    text = '{"model":"m","prompt_cache_key":"k"}'
    assert "prompt_cache_key" not in sent(text)
    assert sent(text, prompt_cache_key=True)["prompt_cache_key"] == "k"


def test_numbers_and_spellings_stay_and_repeated_fields_are_left_once() -> None:
    text = rb'{"model":"a","seed":12345678901234567890123,"x":1.0e-7,"\u006dodel":"b","price":{},"pric\u0065":1}'
    expected = rb'{"model":"their \"name\"","seed":12345678901234567890123,"x":1.0e-7}'
    assert outgoing(text, upstream(), stream=False) == expected


@pytest.mark.parametrize("name", ["Model", "MODEL", "\\u004dodel", "Price", "Prompt_Cache_Key", "Stream_options"])
def test_no_other_spelling_of_a_field_reaches_an_upstream_that_would_take_it(name: str) -> None:
    """Go's JSON reader takes `Model` for `model`: callers could choose another model for the operator's key."""
    text = f'{{"model":"a","{name}":"b","MODELS":1}}'
    assert sent(text) == {"model": 'their "name"', "MODELS": 1, "stream_options": {"include_usage": True}}
    assert sent(f'{{"{name}":"b","model":"a","MODELS":1}}') == sent(text)


@pytest.mark.parametrize(
    "name", ["stream", "max_tokens", "max_completion_tokens", "n", "best_of", "messages", "prompt"]
)
@pytest.mark.parametrize("spell", [str, str.upper, str.capitalize, lambda name: name.replace("s", "\u017f")])
def test_an_upstream_reads_once_what_the_service_reads(name: str, spell: Callable[[str], str]) -> None:
    before, after = (f'"{spell(name)}":9', f'"{name}":1')
    for text in (f'{{"model":"a",{before},{after}}}', f'{{"model":"a",{after},"{spell(name).upper()}":9}}'):
        read = outgoing(text.encode(), upstream(), stream=False)
        assert read.count(b'"') == 4 + 2 * read.count(b'\\"')
        assert json.loads(read)[name] == 1


def test_other_spellings_in_the_options_of_a_stream_go_too() -> None:
    assert sent('{"model":"a","stream_options":{"Include_Usage":false,"x":1}}')["stream_options"] == {
        "include_usage": True,
        "x": 1,
    }
