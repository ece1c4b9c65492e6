"""An object that is edited keeps the bytes of all other members."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.json_structure import edited, members
from tests.support.files.json_texts import OBJECTS, spelled

NAMES = ["model", "price", 'a"b', "é"]


@given(OBJECTS, st.dictionaries(st.sampled_from(NAMES), st.none() | st.just(b'"new"')), st.data())
def test_only_the_named_members_change(value: dict[str, Any], changes: dict[str, bytes | None], data: Any) -> None:
    text = data.draw(spelled(value))
    others = {name: raw for name, raw in members(text).items() if name not in changes}
    result = members(edited(text, changes))
    assert {name: raw for name, raw in result.items() if name not in changes} == others
    assert {name: raw for name, raw in result.items() if name in changes} == {
        name: raw for name, raw in changes.items() if raw is not None
    }


@given(OBJECTS, st.data())
def test_the_members_are_those_of_the_object(value: dict[str, Any], data: Any) -> None:
    text = data.draw(spelled(value))
    assert {name: json.loads(raw) for name, raw in members(text).items()} == value


def test_a_name_is_found_in_any_spelling_and_left_once() -> None:
    text = rb'{"mod\u0065l":1,"x":1,"x":2,"model": 2 ,"price":0.10}'
    assert edited(text, {"model": b"3", "price": None}) == b'{"model":3,"x":1,"x":2}'
    assert edited(b" { } ", {"model": b"3"}) == b' {"model":3} '
