"""DSML, DeepSeek's markup for calls (V3.2 and later): a marker inside the angle brackets of every tag.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

Only the marker is a token. The brackets and names around it are ordinary text, which the lexer puts together.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from renderers.deltas import Piece
from renderers.markers import AddedTokens
from renderers.messages import Tool, ToolCall
from renderers.replies.arguments import value_of
from renderers.replies.tags import Framing, Tag, TagGrammar
from renderers.tools import NotJson, dump, new_call_id, parse_value

MARKER = "｜DSML｜"
OPEN_ID, CLOSE_ID = -1, -2
"""Ids of the tags around a block of calls, which are several tokens. No vocabulary has these ids."""

_OPEN, _CLOSE, _ASTRAY = "\ud800", "\ud801", "\ud802"
_BRACKETS = {f"<{MARKER}": _OPEN, f"</{MARKER}": _CLOSE, MARKER: _ASTRAY}
"""The marker and its bracket as one character, while a block is parsed: half a surrogate pair is in no text."""


class DsmlForm:
    """How a model spells the tags. `block`: the name of the tag around the calls. `indent`: before every name."""

    def __init__(self, block: str, indent: str = "") -> None:
        self.block_name = f"{indent}{block}>"
        parameter = (
            rf'{_OPEN}{indent}parameter name="([^"{_OPEN}-{_ASTRAY}]+)" string="(true|false)">([^{_OPEN}-{_ASTRAY}]*)'
            rf"{_CLOSE}{indent}parameter>\s*"
        )
        self.parameter = re.compile(parameter)
        self.invoke = re.compile(
            rf'{_OPEN}{indent}invoke name="(?P<name>[^"{_OPEN}-{_ASTRAY}]+)">\s*'
            rf"(?P<parameters>(?:{parameter})*){_CLOSE}{indent}invoke>\s*"
        )


class DsmlLexer:
    """Puts the tags of one reply together.

    A block's tags become one piece each, with `OPEN_ID` and `CLOSE_ID`. Of other tags the bracket and the marker become
    one piece, with the marker's id. A bracket at the end of a text is held back until the next piece shows what it is.
    """

    def __init__(self, form: DsmlForm, marker_id: int) -> None:
        self._marker_id = marker_id
        self._block = form.block_name
        self._bracket = ""  # held back
        self._begun = ""  # bracket and marker of a tag whose name is not known yet
        self._name = ""  # what there is of the name

    @property
    def held(self) -> str:
        """The text that is held back."""
        return self._begun + self._name + self._bracket

    def feed(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [out for piece in pieces for out in self._one(piece)]

    def flush(self) -> list[Piece]:
        """What was held back, as it is."""
        held = [*self._unfinished_tag(), *_text(self._bracket)]
        self._bracket = ""
        return held

    def cut(self) -> list[Piece]:
        """What was held back where a reply was cut: part of a tag is text there, and no error."""
        held = self.held
        self._begun = self._name = self._bracket = ""
        return _text(held)

    def _one(self, piece: Piece) -> Iterator[Piece]:
        if piece.token_id == self._marker_id:
            yield from self._unfinished_tag()
            if self._bracket:
                self._begun, self._bracket = self._bracket + piece.text, ""
            else:
                yield piece
        elif piece.token_id is not None:
            yield from self.flush()
            yield piece
        elif self._begun:
            yield from self._named(self._name + piece.text)
        else:
            yield from self._plain(piece.text)

    def _named(self, name: str) -> Iterator[Piece]:
        if self._block.startswith(name) and name != self._block:
            self._name = name
        elif name.startswith(self._block):
            token_id = CLOSE_ID if self._begun.startswith("</") else OPEN_ID
            yield Piece(self._begun + self._block, token_id)
            self._begun = self._name = ""
            yield from self._plain(name.removeprefix(self._block))
        else:
            self._name = ""
            yield from self._unfinished_tag()
            yield from self._plain(name)

    def _plain(self, text: str) -> Iterator[Piece]:
        text = self._bracket + text
        self._bracket = next((bracket for bracket in ("</", "<") if text.endswith(bracket)), "")
        yield from _text(text.removesuffix(self._bracket) if self._bracket else text)

    def _unfinished_tag(self) -> Iterator[Piece]:
        if self._begun:
            yield Piece(self._begun, self._marker_id)
        yield from _text(self._name)
        self._begun = self._name = ""


def _text(text: str) -> list[Piece]:
    return [Piece(text)] if text else []


def dsml_grammar(form: DsmlForm, added: AddedTokens, ends: Iterable[int]) -> TagGrammar:
    """DeepSeek's replies with DSML: reasoning must be closed and may speak of calls, and calls come last."""
    tags = {OPEN_ID: Tag.CALL_OPEN, CLOSE_ID: Tag.CALL_CLOSE}
    for spelling, tag in (("<think>", Tag.THINK_OPEN), ("</think>", Tag.THINK_CLOSE), (MARKER, Tag.CALL_PART)):
        token_id = added.id_of(spelling)
        assert token_id is not None
        tags[token_id] = tag
    return TagGrammar(
        tags | dict.fromkeys(ends, Tag.END),
        partial(parse_block, form),
        framing=Framing(before_call=2),
        text_in_reasoning=frozenset((Tag.CALL_OPEN, Tag.CALL_CLOSE, Tag.CALL_PART)),
        must_close_reasoning=True,
        calls_come_last=True,
    )


def parse_block(form: DsmlForm, block: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """The calls of a block, from the pieces of a `DsmlLexer`; None if it is not in the format, or empty."""
    text = "".join(piece.text if piece.token_id is None else _BRACKETS.get(piece.text, piece.text) for piece in block)
    calls: list[ToolCall] = []
    read = len(text) - len(text.lstrip())
    while read < len(text):
        invoke = form.invoke.match(text, read)
        if invoke is None:
            return None
        arguments = _arguments(form.parameter.findall(invoke["parameters"]), tools.get(invoke["name"]))
        if arguments is None:
            return None
        calls.append(ToolCall(new_call_id(), invoke["name"], dump(arguments)))
        read = invoke.end()
    return calls or None


def _arguments(parameters: Sequence[tuple[str, str, str]], tool: Tool | None) -> dict[str, Any] | None:
    arguments: dict[str, Any] = {}
    for name, is_string, written in parameters:
        if name in arguments:
            return None
        try:
            is_text = is_string == "true"
            arguments[name] = written if is_text else value_not_text(written, name, tool)
        except NotJson:
            return None
    return arguments


def value_not_text(written: str, name: str, tool: Tool | None) -> object:
    """A value that the model does not call a string: JSON, but what was declared as a string stays one. Raises
    `NotJson`.
    """
    value = parse_value(written)
    return value if isinstance(value, str) else value_of(written, name, tool)
