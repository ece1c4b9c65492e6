"""Tool calls as JSON: what a model writes and what a caller sends back."""

import json
import secrets
from typing import Any, NoReturn

from renderers.messages import ToolCall


class NotJson(ValueError):
    """The text is not JSON that can be sent on."""


class NotAnObject(NotJson):
    """The text is not a JSON object that can be sent on."""


def parse_value(text: str) -> object:
    """A JSON value; of a repeated key the last value. Raises `NotJson`.

    Refused beyond what Python's parser refuses: NaN and Infinity, numbers that overflow to it, half a surrogate pair
    (none of them can be written as JSON again), and nesting that Python cannot follow.
    """
    try:
        parsed: object = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as exc:
        raise NotJson(str(exc)) from exc
    return parsed


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object, as strict as `parse_value`. Raises `NotAnObject`."""
    try:
        parsed = parse_value(text)
    except NotJson as exc:
        raise NotAnObject(str(exc)) from exc
    if not isinstance(parsed, dict):
        raise NotAnObject(f"it is {_JSON_TYPES[type(parsed)]}")
    return parsed


def dump(value: object) -> str:
    """JSON as chat templates write it: `", "` and `": "`, key order kept, no escapes for other languages."""
    return json.dumps(value, ensure_ascii=False)


def parse_name_and_arguments(text: str) -> ToolCall | None:
    """A call in the form `{"name": "f", "arguments": {…}}`, with a new id; None if it is not one.

    Other keys are ignored.
    """
    try:
        call = parse_object(text)
    except NotAnObject:
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(id=new_call_id(), name=name, arguments=dump(arguments))


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


_JSON_TYPES = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
_JSON_TYPES[type(None)] = "null"


def _refuse_constant(constant: str) -> NoReturn:
    raise NotJson(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if value in (float("inf"), float("-inf")):
        raise NotJson(f"the number {number[:20]} is too large")
    return value
