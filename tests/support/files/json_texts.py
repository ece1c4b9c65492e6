"""JSON values, and all ways to write one."""

import json
from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["model", "usage", "price", "choices", 'a"b', "é", "x", "\\", "}", '"model":'])
STRINGS = st.text(st.characters(codec="utf-8"), max_size=6) | NAMES
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)


@st.composite
def spelled(draw: st.DrawFn, value: object) -> bytes:
    """Other blanks, other escapes and another order of members each time."""
    return _spelled(draw, value, draw(st.sampled_from(["", " ", "\n "])), draw(st.booleans())).encode()


def _spelled(draw: st.DrawFn, value: Any, blank: str, escapes: bool) -> str:
    def inner(item: Any) -> str:
        return blank + _spelled(draw, item, blank, escapes) + blank

    if isinstance(value, dict):
        items = draw(st.permutations(list(value.items())))
        return "{" + ",".join(f"{inner(name)}:{inner(item)}" for name, item in items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(inner, value)) + "]"
    return json.dumps(value, ensure_ascii=escapes)
