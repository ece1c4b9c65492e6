"""Arguments that a model writes as bare text: the declared schema says which JSON value each is."""

from collections.abc import Iterable, Mapping

from renderers.messages import Tool
from renderers.tools import NotJson, parse_value

_MAX_DEPTH = 8
"""Of references and combinations that are followed in a schema; what is deeper may be anything."""
_COMBINATIONS = ("anyOf", "oneOf")
_IN_PYTHON = {"True": True, "False": False, "None": None}
"""Some templates write these in a history, so models do too."""

Types = frozenset[str] | None
"""Names of JSON Schema; None for any."""


def value_of(text: str, name: str, tool: Tool | None) -> object:
    """The value of the argument `name`. `tool` None: its function is not declared.

    A declared string is the text, whatever it looks like. Otherwise the text is JSON if it parses, of a declared type
    if one of them is a string too. What is of no declared type is not corrected.
    """
    types = _declared(tool, name)
    if types == frozenset(("string",)):
        return text
    try:
        value = parse_value(text)
    except NotJson:
        if types is not None and text in _IN_PYTHON and _fits(_IN_PYTHON[text], types):
            return _IN_PYTHON[text]
        return text
    if types is None or "string" not in types or _fits(value, types):
        return value
    return text


def _declared(tool: Tool | None, name: str) -> Types:
    if tool is None:
        return None
    properties = tool.parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, tool.parameters, 0)


def _types(schema: object, root: Mapping[str, object], depth: int) -> Types:
    if not isinstance(schema, Mapping) or depth == _MAX_DEPTH:
        return None
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(item for item in declared if isinstance(item, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"]))
    if "const" in schema:
        return frozenset((_type_of(schema["const"]),))
    for combination in _COMBINATIONS:
        if isinstance(schema.get(combination), list):
            return _union(_types(item, root, depth + 1) for item in schema[combination])
    return None


def _union(alternatives: Iterable[Types]) -> Types:
    found: frozenset[str] = frozenset()
    for types in alternatives:
        if types is None:
            return None
        found |= types
    return found


def _referred(pointer: str, root: Mapping[str, object]) -> object:
    """What `#/$defs/Place` points to; None if it points to nothing here."""
    found: object = root
    first, *steps = pointer.split("/")
    for step in steps if first == "#" else ["?"]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
