"""Bodies of calls as XML: `<function=f>`, and a `<parameter=p>` for each argument, whose value is bare text."""

import re
from collections.abc import Mapping, Sequence

from renderers.deltas import Piece
from renderers.messages import Tool, ToolCall
from renderers.replies.arguments import value_of
from renderers.tools import dump, new_call_id

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"</function>\s*")
_CLOSE = "</parameter>"


def parse_xml_call(block: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """One call between its tags. Of a repeated parameter the last value; its type is the declared one."""
    text = "".join(piece.text for piece in block)
    function = _FUNCTION.match(text)
    if function is None:
        return None
    name, position = function[1], function.end()
    arguments: dict[str, object] = {}
    while parameter := _PARAMETER.match(text, position):
        end = _VALUE_END.search(text, parameter.end())
        value = None if end is None else _value(text[parameter.end() : end.start()])
        if end is None or value is None:
            return None
        arguments[parameter[1]] = value_of(value, parameter[1], tools.get(name))
        position = end.end()
    if not _FUNCTION_END.fullmatch(text, position):
        return None
    return [ToolCall(id=new_call_id(), name=name, arguments=dump(arguments))]


def _value(text: str) -> str | None:
    """Without the newlines that the format puts around it. None if something stands behind the end of the value.

    On lines of its own, as the format writes it, a value may hold the characters that end one inside a line.
    """
    on_lines = len(text) > 1 and text.startswith("\n") and text.endswith("\n")
    if _CLOSE in text and (not on_lines or f"\n{_CLOSE}" in text):
        return None
    return text.removeprefix("\n").removesuffix("\n")
