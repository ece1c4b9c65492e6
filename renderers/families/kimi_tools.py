"""How Kimi's tools are declared: with sorted keys (K2), and as a TypeScript namespace (K2.5 and later).

The model repositories bring Python code for both. It is not run: what it writes is written here. A schema that the
TypeScript form has no word for is declared as JSON, by the template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from renderers.messages import Tool

_INDENT = "  "
_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_PYTHON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class _NoWord(Exception):
    """TypeScript, as Kimi knows it, has no word for this schema."""


def with_sorted_keys(value: Any) -> Any:
    """JSON in which the keys of all objects are in order."""
    if isinstance(value, Mapping):
        return {key: with_sorted_keys(value[key]) for key in sorted(value)}
    return [with_sorted_keys(item) for item in value] if isinstance(value, list) else value


def typescript(tools: Sequence[Tool]) -> str | None:
    """The declaration of these tools; None if there are none, or if one cannot be declared so."""
    try:
        functions = [_Function().declare(with_sorted_keys(tool.declared["function"])) for tool in tools]
    except (_NoWord, RecursionError):
        return None
    if not functions:
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


class _Function:
    """One function. `definitions`: the schemas under `$defs`; they become interfaces."""

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._refers_to_itself = False

    def declare(self, function: Mapping[str, Any]) -> str:
        parameters = _mapping(function.get("parameters") or {})
        fields = self._fields(parameters, "")
        arguments = _braces(fields, "")
        interfaces = []
        if self._refers_to_itself:
            in_order = [text for _, _, text in self._properties(parameters, "")]
            interfaces.append(f"interface parameters {_braces(in_order, '')}")
            arguments = "parameters"
        for name, schema in dict(self._definitions).items():
            interfaces.append(f"{_comment(_described(schema), '')}interface {name} {self._type(schema, '')}")
        lines = [*interfaces, _comment(_described(function), "").removesuffix("\n")]
        return "\n".join(
            [line for line in lines if line] + [f"type {function.get('name', 'function')} = (_: {arguments}) => any;"]
        )

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        match _mapping(schema):
            case {"$ref": str(reference)}:
                return self._reference(reference)
            case {"anyOf": list(schemas)}:
                return " | ".join(self._type(one, indent) for one in schemas)
            case {"enum": list(values)}:
                return _enum(values, schema.get("type"))
            case {"type": list(names)}:
                return " | ".join(_name(name) for name in names)
            case {"type": "object"}:
                return _braces(self._fields(schema, indent), indent)
            case {"type": "array"}:
                return self._array(schema, indent)
            case {"type": str(name)}:
                return "number" if name == "integer" else name
            case {**rest} if not rest:
                return "any"
        raise _NoWord(schema)

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self._refers_to_itself = True
            return "parameters"
        name = reference.rpartition("/")[2]
        if reference.startswith("#/$defs/") and name in self._definitions:
            return name
        raise _NoWord(reference)

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items") or {}
        inner = indent + _INDENT
        comment = _documentation(items, inner)
        if not comment:
            return f"Array<{self._type(items, indent)}>"
        return f"Array<\n{comment}{inner}{self._type(items, inner)}\n{indent}>"

    def _fields(self, schema: Mapping[str, Any], indent: str) -> list[str]:
        """The lines between the braces: what is required comes first."""
        self._definitions |= _mapping(schema.get("$defs") or {})
        inner = indent + _INDENT
        match schema.get("additionalProperties"):
            case None:
                others = []
            case False:
                others = [f"{inner}[k: string]: never"]
            case True:
                others = [f"{inner}[k: string]: any"]
            case others_schema:
                others = [f"{inner}[k: string]: {self._type(_mapping(others_schema), inner)}"]
        return [text for _, _, text in sorted(self._properties(schema, indent))] + others

    def _properties(self, schema: Mapping[str, Any], indent: str) -> list[tuple[bool, str, str]]:
        """(whether it is optional, its name, its text) of each property."""
        inner = indent + _INDENT
        required = schema.get("required", [])
        if not isinstance(required, list):
            raise _NoWord(required)
        properties = []
        for name, declared in _mapping(schema.get("properties", {})).items():
            optional = name not in required
            comment = _documentation(declared, inner) + _default(declared, inner)
            text = f"{comment}{inner}{name}{'?' if optional else ''}: {self._type(declared, inner)}"
            properties.append((optional, name, text))
        return properties


def _braces(fields: Sequence[str], indent: str) -> str:
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _enum(values: Sequence[Any], declared: Any) -> str:
    if isinstance(declared, list):
        known = [name for name in declared if name != "null"]
        if len(declared) > 2 or len(known) != 1:
            raise _NoWord(declared)
        declared = known[0]
    python_type = _PYTHON_TYPES.get(declared, object) if isinstance(declared, str) else object
    if not all(value is None or isinstance(value, python_type) for value in values):
        raise _NoWord(values)
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _name(json_type: Any) -> str:
    if not isinstance(json_type, str) or json_type not in _NAMES:
        raise _NoWord(json_type)
    return _NAMES[json_type]


def _documentation(schema: Any, indent: str) -> str:
    """The comments above a field: its description, then its limits."""
    if isinstance(schema, bool):
        return ""
    keys: Sequence[str] = ()
    if not _mapping(schema).keys() & {"$ref", "anyOf", "enum"} and isinstance(schema.get("type"), str):
        keys = _CONSTRAINTS.get(schema["type"], ())
    limits = ", ".join(f"{key}: {schema[key]}" for key in keys if key in schema)
    return _comment(_described(schema), indent) + (f"{indent}// {limits}\n" if limits else "")


def _default(schema: Any, indent: str) -> str:
    default = schema.get("default") if isinstance(schema, Mapping) else None
    if default is None:
        return ""
    text = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
    return f"{indent}// Default: {text}\n"


def _described(schema: Any) -> str:
    description = _mapping(schema).get("description") or ""
    if not isinstance(description, str):
        raise _NoWord(description)
    return description


def _comment(text: str, indent: str) -> str:
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n")) if text else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _NoWord(value)
    return value
