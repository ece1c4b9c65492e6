"""Replies made of messages, each with a header and a body between markers: a strict, incremental parser.

A reply of gpt-oss is `<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>hi`, one of
Inkling `<|message_model|><|content_thinking|>why<|end_message|>…`. Only markers of the vocabulary count. A header is
held back until it is complete, or cannot be one any more. A body of text or reasoning is sent as it comes, the body of
a call when it is whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from renderers.base import ReplyEnd
from renderers.deltas import Delta, Piece
from renderers.messages import ToolCall
from renderers.replies.delta_builder import DeltaBuilder


class Mark(Enum):
    OPEN = auto()
    """Begins a message's header."""
    BODY = auto()
    """Ends the header and begins the body."""
    CLOSE = auto()
    END = auto()
    """Ends the reply."""


class Part(Enum):
    """What a body without a call is."""

    TEXT = auto()
    REASONING = auto()
    QUOTED = auto()
    """Text, together with its header and its end: a call of something that was not declared."""


Body = Part | Callable[[str], ToolCall | None]
"""A part, or what makes a call of a body (None for one that is no call)."""


@dataclass(slots=True)
class Header:
    """A header so far: `texts[0]`, the marker `ids[0]`, `texts[1]` and so on. `is_first`: the reply's first."""

    is_first: bool
    texts: list[str] = field(default_factory=lambda: [""])
    ids: list[int] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        if piece.token_id is None:
            self.texts[-1] += piece.text
        else:
            self.ids.append(piece.token_id)
            self.texts.append("")


@dataclass(frozen=True, slots=True)
class FrameGrammar:
    """The format of one family.

    `opened`: the prompt holds the OPEN of the first message. `end_closes`: END also ends an open body.
    `may_become`: whether a header so far can become one of the format; false for whatever follows once it is false.
    `begins_call`: whether an unfinished header is one of a call. `read`: what the body of a whole header is, whose last
    marker is the BODY; None if there is no such header.
    """

    by_id: Mapping[int, Mark]
    opened: bool
    end_closes: bool
    may_become: Callable[[Header], bool]
    begins_call: Callable[[Header], bool]
    read: Callable[[Header], Body | None]


class _State(Enum):
    BETWEEN = auto()
    HEADER = auto()
    BODY = auto()
    RAW = auto()


class FramedParser:
    """Parses one reply; see `ReplyParser`."""

    def __init__(self, grammar: FrameGrammar) -> None:
        self.malformed = False
        self._grammar = grammar
        self._state = _State.HEADER if grammar.opened else _State.BETWEEN
        self._header = Header(is_first=True)
        self._body: Body = Part.TEXT
        self._held: list[str] = []  # the header as text, and the body of a call
        self._call: list[str] = []  # the body of a call
        self._end: str | None = None  # the spelling of the end token, if it was the last piece
        self._raw: list[str] = []
        self._deltas = DeltaBuilder()

    @property
    def raw_text(self) -> str:
        return "".join(self._raw)

    def feed(self, pieces: Sequence[Piece]) -> list[Delta]:
        for piece in pieces:
            if self._end is not None:
                end, self._end = self._end, None
                self._raw.append(end)
                self._fail(end)
            mark = None if piece.token_id is None else self._grammar.by_id.get(piece.token_id)
            if mark is Mark.END:
                self._end = piece.text
                self._close_at_end()
            else:
                self._raw.append(piece.text)
                self._piece(piece, mark)
        return self._deltas.take()

    def finish(self, end: ReplyEnd) -> list[Delta]:
        ended = end is ReplyEnd.END or self._end is not None
        if not ended:
            self._deltas.text("".join(self._held) if self._is_in_call() else "")
            return self._deltas.take()
        self._close_at_end()
        if self._state in (_State.HEADER, _State.BODY) or not self._raw:
            self._fail("")
        return self._deltas.take()

    def _close_at_end(self) -> None:
        if self._state is _State.BODY and self._grammar.end_closes:
            self._close("")

    def _is_in_call(self) -> bool:
        if self._state is _State.HEADER:
            return self._grammar.begins_call(self._header)
        return self._state is _State.BODY and not isinstance(self._body, Part)

    def _piece(self, piece: Piece, mark: Mark | None) -> None:
        match self._state, mark:
            case _State.RAW, _:
                self._deltas.text(piece.text)
            case _State.BODY, Mark.CLOSE:
                self._close(piece.text)
            case _State.BODY, None | Mark.BODY:
                self._body_text(piece.text)
            case _State.HEADER, None | Mark.BODY:
                self._header_piece(piece, mark)
            case _State.BETWEEN, Mark.OPEN:
                self._state = _State.HEADER
                self._held = [piece.text]
            case _:
                self._fail(piece.text)

    def _header_piece(self, piece: Piece, mark: Mark | None) -> None:
        self._header.add(piece)
        body = self._grammar.read(self._header) if mark is Mark.BODY else None
        if body is None if mark is Mark.BODY else not self._grammar.may_become(self._header):
            self._fail(piece.text)
            return
        self._held.append(piece.text)
        if body is not None:
            self._begin(body)

    def _begin(self, body: Body) -> None:
        self._state, self._body, self._call = _State.BODY, body, []
        if body is Part.QUOTED:
            self._deltas.text("".join(self._held))
        if isinstance(body, Part):
            self._held = []

    def _body_text(self, text: str) -> None:
        if self._body is Part.REASONING:
            self._deltas.reasoning(text)
        elif isinstance(self._body, Part):
            self._deltas.text(text)
        else:
            self._held.append(text)
            self._call.append(text)

    def _close(self, spelling: str) -> None:
        if not isinstance(self._body, Part):
            call = self._body("".join(self._call))
            if call is None:
                self._fail(spelling)
                return
            self._deltas.call(call)
        elif self._body is Part.QUOTED:
            self._deltas.text(spelling)
        self._state, self._header, self._held = _State.BETWEEN, Header(is_first=False), []

    def _fail(self, spelling: str) -> None:
        """Treat everything from here on as text: what was held back, `spelling`, and all that follows."""
        self.malformed = True
        self._state = _State.RAW
        self._deltas.text("".join(self._held) + spelling)
        self._held = []
