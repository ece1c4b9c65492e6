"""XTML, the markup of Kimi K3's replies: each tag is a marker, a name with attributes in ordinary text, and a marker.

    <|open|>think<|sep|>…<|close|>think<|sep|>
    <|open|>response<|sep|>…<|close|>response<|sep|>
    <|open|>tools<|sep|>
      <|open|>call tool="f" index="1"<|sep|>
        <|open|>argument key="city" type="string"<|sep|>Köln<|close|>argument<|sep|>
      <|close|>call<|sep|>
    <|close|>tools<|sep|>
    <|close|>message<|sep|>

(without the space that is shown here). The lexer puts the tags together and knows their order. What stands where it may
not becomes a tag that is an error there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from renderers.deltas import Piece
from renderers.messages import Tool, ToolCall
from renderers.replies.dsml import value_not_text
from renderers.replies.tags import Tag
from renderers.tools import NotJson, dump, new_call_id, parse_object, parse_value

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
_IDS = {Tag.THINK_CLOSE: -1, Tag.FRAME: -2, Tag.CALL_OPEN: -3, Tag.CALL_CLOSE: -4, Tag.CALL_PART: -5}
XTML_TAGS = {token_id: tag for tag, token_id in _IDS.items()}
"""What the lexer's tags are. No vocabulary has these ids."""

THINK, RESPONSE = "think", "response"
"""The parts of a reply that a prompt can begin."""

_TOOLS, _CLOSED = "tools", "closed"
_NEXT = {
    (THINK, f"{CLOSE}think"): ("thought", Tag.THINK_CLOSE),
    ("thought", f"{OPEN}response"): (RESPONSE, Tag.FRAME),
    (RESPONSE, f"{CLOSE}response"): ("responded", Tag.FRAME),
    ("responded", f"{OPEN}tools"): (_TOOLS, Tag.CALL_OPEN),
    (_TOOLS, f"{CLOSE}tools"): ("called", Tag.CALL_CLOSE),
    ("responded", f"{CLOSE}message"): (_CLOSED, Tag.FRAME),
    ("called", f"{CLOSE}message"): (_CLOSED, Tag.FRAME),
}
"""(the part that a reply is in, a tag) → (the part after it, what the tag is)."""

_BEGIN, _END, _MIDDLE = "\ud800", "\ud801", "\ud802"
"""The markers while calls are parsed: half a surrogate pair is in no text."""

_TEXT = rf"[^{_BEGIN}-{_MIDDLE}]*"
_NAME = rf'"([^"{_BEGIN}-{_MIDDLE}]*)"'
_ARGUMENT = rf"{_BEGIN}argument key={_NAME} type={_NAME}{_MIDDLE}({_TEXT}){_END}argument{_MIDDLE}"
_OBJECT = rf'{_BEGIN}json type="object"{_MIDDLE}(?P<object>{_TEXT}){_END}json{_MIDDLE}'
_CALL = re.compile(
    rf'{_BEGIN}call tool=(?P<name>{_NAME}) index="\d+"{_MIDDLE}'
    rf"(?:{_OBJECT}|(?P<arguments>(?:{_ARGUMENT})*)){_END}call{_MIDDLE}"
)
_ARGUMENTS = re.compile(_ARGUMENT)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


class XtmlLexer:
    """Puts the tags of one reply together. Part of a tag is held back until it is whole, or is none of its place."""

    def __init__(self, part: str, end_ids: frozenset[int]) -> None:
        self._part = part
        self._end_ids = end_ids
        self._tag: list[str] = []  # what there is of a tag

    @property
    def held(self) -> str:
        return "".join(self._tag)

    @property
    def in_calls(self) -> bool:
        return self._part == _TOOLS

    def feed(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [out for piece in pieces for out in self._one(piece)]

    def _one(self, piece: Piece) -> Iterator[Piece]:
        if self._tag and piece.text == SEP and piece.token_id is not None:
            name, self._tag = self.held, []
            yield self._whole(name, piece.text)
        elif self._tag and piece.token_id is None:
            self._tag.append(piece.text)
            if not self._may_become_tag():
                yield from self.flush()
        else:
            yield from self.flush()
            yield from self._outside(piece)

    def _outside(self, piece: Piece) -> Iterator[Piece]:
        """A piece that continues no tag."""
        if piece.token_id is not None and piece.text in (OPEN, CLOSE) and self._part != _CLOSED:
            self._tag = [piece.text]
        elif piece.token_id in self._end_ids:
            if self._part not in (_CLOSED, THINK):
                yield Piece("", _IDS[Tag.CALL_PART])
            self._part = _CLOSED
            yield piece
        elif self._part in (THINK, RESPONSE, _TOOLS):
            yield piece
        else:
            yield Piece(piece.text, _IDS[Tag.CALL_PART])

    def _may_become_tag(self) -> bool:
        """Inside calls any tag may: the block is held back anyway."""
        return self.in_calls or any(part == self._part and tag.startswith(self.held) for part, tag in _NEXT)

    def _whole(self, name: str, sep: str) -> Piece:
        self._part, tag = _NEXT.get((self._part, name), (self._part, Tag.CALL_PART))
        return Piece(name + sep, _IDS[tag])

    def flush(self) -> list[Piece]:
        """Part of a tag, which is an error."""
        held, self._tag = self.held, []
        return [Piece(held, _IDS[Tag.CALL_PART])] if held else []

    def cut(self) -> list[Piece]:
        """Part of a tag where a reply was cut: text inside calls, and otherwise nothing of the reply."""
        if not self.in_calls:
            return []
        held, self._tag = self.held, []
        return [Piece(held)] if held else []


def parse_calls(block: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """The calls between the tags around them; None if they are not in the format, or there are none."""
    text = "".join(map(_with_marks, block))
    calls: list[ToolCall] = []
    read = 0
    while read < len(text):
        call = _CALL.match(text, read)
        if call is None:
            return None
        name = _unescaped(call["name"][1:-1])
        try:
            arguments = _arguments(call, tools.get(name))
        except NotJson:
            return None
        calls.append(ToolCall(new_call_id(), name, dump(arguments)))
        read = call.end()
    return calls if calls and all(call.name for call in calls) else None


def _with_marks(piece: Piece) -> str:
    if piece.token_id != _IDS[Tag.CALL_PART]:
        return piece.text
    mark = _BEGIN if piece.text.startswith(OPEN) else _END
    return mark + piece.text.removeprefix(OPEN).removeprefix(CLOSE).removesuffix(SEP) + _MIDDLE


def _arguments(call: re.Match[str], tool: Tool | None) -> dict[str, Any]:
    """Raises `NotJson`."""
    if call["object"] is not None:
        return parse_object(call["object"])
    arguments: dict[str, Any] = {}
    for key, kind, written in _ARGUMENTS.findall(call["arguments"]):
        name = _unescaped(key)
        arguments[name] = written if kind == "string" else _value(kind, written, tool, name)
    return arguments


def _value(kind: str, written: str, tool: Tool | None, name: str) -> object:
    if type(parse_value(written)) not in _TYPES.get(kind, ()):
        raise NotJson(f"{written!r} is not of type {kind!r}")
    return value_not_text(written, name, tool)


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")
