"""One validation error as one sentence that names the path, the limit and the value."""

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Final

from pydantic_core import ErrorDetails

_SHOWN_CHARACTERS = 80
_COMPARED_CHARACTERS = 200
_COMPARED_NAMES = 200  # 25 ms
_ALIKE = 0.7  # of 1: "sauce" and "source" are
# Fields that hold conversation text or a secret, and names that callers may confuse with them.
_PRIVATE: Final = frozenset(
    {"content", "text", "prompt", "prompt_chunks", "tokens", "reasoning_content"}
    | {"tool_calls", "function", "arguments", "image_url", "url"}
    | {"sha256", "env", "file", "key"}
)
_PRIVATE_AS_A_WHOLE: Final = frozenset({"messages", "keys"})
_UNKNOWN_OF_KEY: Final = re.compile(r"keys\[\d+\]\.")
_PREDICATES: Final = {
    "missing": "is required",
    "extra_forbidden": "is not a known key",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "mapping_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_pattern_mismatch": "must match {pattern}",
    "literal_error": "must be {expected}",
}


class Complaint(ValueError):
    """The error that one of our validators raises for a value or a part of it; `suffix` is the rest of the path."""

    def __init__(self, predicate: str, value: object, suffix: str = "") -> None:
        super().__init__(predicate)
        self.predicate = predicate
        self.value = value
        self.suffix = suffix


def near(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """A sentence that suggests similar names, whatever their case, with a leading space; empty if there is none."""
    by_lower = {each.lower(): each for each in islice(known, _COMPARED_NAMES)}
    asked = name.lower()[:_COMPARED_CHARACTERS]
    found = [asked] if asked in by_lower else get_close_matches(asked, by_lower, n=most, cutoff=_ALIKE)
    return f" Did you mean {' or '.join(repr(by_lower[each]) for each in found)}?" if found else ""


def path_of(location: Iterable[int | str]) -> str:
    """`messages[0].content`; empty for the whole."""
    path = ""
    for part in location:
        if part == "[key]":  # how pydantic marks that a key of a mapping is at fault, not its value
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{_printable(part)}"
    return path.removeprefix(".")


def explain(error: ErrorDetails, whole: str) -> tuple[str, str]:
    """The path of the invalid value, and the sentence; `whole`: the name of a value that has no path."""
    path, value = path_of(error["loc"]), error["input"]
    context = error.get("ctx", {})
    complaint = context.get("error")
    if isinstance(complaint, Complaint):
        path, value, predicate = (path + complaint.suffix).removeprefix("."), complaint.value, complaint.predicate
    elif error["type"] in ("too_short", "string_too_short") and context["min_length"] == 1:
        predicate = "must not be empty"
    elif error["type"] in _PREDICATES:
        predicate = _PREDICATES[error["type"]].format(**{name: _plain(limit) for name, limit in context.items()})
    else:
        predicate = re.sub(r"^Input should ", "must ", error["msg"].removeprefix("Value error, "))
    if error["type"] == "missing":
        return path, f"{path} {predicate}."
    if error["type"] == "extra_forbidden" and _UNKNOWN_OF_KEY.match(path):  # it may be the key itself
        return path, f"{path} {predicate}."
    return path, f"{path or whole} {predicate}, got {show(value, path)}."


def show(value: object, path: str = "") -> str:
    """The value for an error message: short, and without private content such as conversation text."""
    if isinstance(value, str):
        name = re.sub(r"(\[\d+\])+$", "", path)
        if name in _PRIVATE_AS_A_WHOLE or name.rpartition(".")[2] in _PRIVATE:
            return f"a string of {len(value)} characters"
        return json.dumps(value) if len(value) <= _SHOWN_CHARACTERS else json.dumps(value[:_SHOWN_CHARACTERS]) + "…"
    if value is None or isinstance(value, bool | int | float):
        too_long = isinstance(value, int) and abs(value) >= 10**_SHOWN_CHARACTERS
        return f"an integer of more than {_SHOWN_CHARACTERS} digits" if too_long else json.dumps(value)
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else f"{value!r}"[:_SHOWN_CHARACTERS]


def _plain(limit: object) -> object:
    """1 rather than 1.0: limits are shown as they are usually written."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _printable(name: str) -> str:
    return name[:_SHOWN_CHARACTERS] if name.isprintable() else json.dumps(name[:_SHOWN_CHARACTERS])
