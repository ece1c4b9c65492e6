"""Bodies of calls as JSON: `{"name": "f", "arguments": {…}}`."""

from collections.abc import Mapping, Sequence

from renderers.deltas import Piece
from renderers.messages import Tool, ToolCall
from renderers.tools import parse_name_and_arguments


def parse_json_call(block: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """One call between its tags. The types of its arguments are JSON's: the declaration changes none."""
    del tools
    call = parse_name_and_arguments("".join(piece.text for piece in block))
    return None if call is None else [call]
