"""Replies made of tagged blocks, `<think>…</think>` and `<tool_call>…</tool_call>`: a strict, incremental parser.

The tags are markers of the vocabulary, or characters of the text for models whose vocabulary has none. The newlines
that the format puts around the blocks are not content: one after `<think>` and one before `</think>`, two after
`</think>`, one before `<tool_call>`. A trailing newline is held back until the next text shows whether it is one of
these.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from renderers.base import ReplyEnd
from renderers.deltas import Delta, Piece, ReasoningDelta, TextDelta, ToolCallDelta
from renderers.messages import ToolCall


class Tag(Enum):
    THINK_OPEN = auto()
    THINK_CLOSE = auto()
    CALL_OPEN = auto()
    CALL_CLOSE = auto()
    END = auto()


class Start(Enum):
    """Where a reply begins, given the start of the reply that the prompt already holds."""

    TEXT = auto()
    REASONING = auto()
    REASONING_UNFRAMED = auto()
    """As REASONING, but the newline after `<think>` is yet to come."""
    REASONED = auto()
    """The prompt holds a closed block: the model must not reason, its reasoning tags are errors."""


@dataclass(frozen=True, slots=True)
class TagGrammar:
    """`by_id`: the tags that are markers. `by_text`: the tags that are spelled in ordinary text.

    `parse_call` makes a call of the text inside a call's tags, or returns None.
    """

    by_id: Mapping[int, Tag]
    by_text: Mapping[str, Tag]
    parse_call: Callable[[str], ToolCall | None]


class _State(Enum):
    TEXT = auto()
    THINK = auto()
    CALL = auto()
    RAW = auto()


class TagParser:
    """Parses one reply; see `ReplyParser`."""

    def __init__(self, grammar: TagGrammar, start: Start) -> None:
        self.malformed = False
        self._grammar = grammar
        self._finder = _TagFinder(grammar.by_text) if grammar.by_text else None
        self._may_reason = start is not Start.REASONED
        reasoning = start in (Start.REASONING, Start.REASONING_UNFRAMED)
        self._state = _State.THINK if reasoning else _State.TEXT
        self._newlines_to_skip = 1 if start is Start.REASONING_UNFRAMED else 0
        self._held = ""  # a newline that may belong to the format
        self._call: list[str] = []  # the open call: the newline before it, its tag, and what is inside
        self._end: str | None = None  # the spelling of the end token, if it was the last piece
        self._raw: list[str] = []
        self._deltas = _Deltas()

    @property
    def raw_text(self) -> str:
        return "".join(self._raw)

    def feed(self, pieces: Sequence[Piece]) -> list[Delta]:
        for piece in pieces:
            if self._end is not None:
                end, self._end = self._end, None
                self._raw.append(end)
                self._fail(end)
            if piece.token_id is None:
                self._raw.append(piece.text)
                self._text(piece.text)
            else:
                self._marker(piece.text, self._grammar.by_id.get(piece.token_id))
        return self._deltas.take()

    def finish(self, end: ReplyEnd) -> list[Delta]:
        self._flush_finder()
        ended = end is ReplyEnd.END or self._end is not None
        if self._state is _State.CALL:
            self.malformed = ended
            self._deltas.text("".join(self._call))
        else:
            self._release()
        if not self._raw and ended:
            self.malformed = True
        return self._deltas.take()

    def _marker(self, spelling: str, tag: Tag | None) -> None:
        self._flush_finder()
        if tag is Tag.END:
            self._end = spelling
            return
        self._raw.append(spelling)
        if tag is None:
            self._characters(spelling)
        else:
            self._tag(tag, spelling)

    def _text(self, text: str) -> None:
        """Ordinary text, which may have tags in it."""
        finder = self._finder
        if finder is None:
            self._characters(text)
            return
        finder.add(text)
        while self._state is not _State.RAW:
            before, tag, spelling = finder.next(in_call=self._state is _State.CALL)
            self._characters(before)
            if tag is None:
                return
            self._tag(tag, spelling)
        self._flush_finder()

    def _flush_finder(self) -> None:
        if self._finder is not None:
            self._characters(self._finder.flush())

    def _characters(self, text: str) -> None:
        """Ordinary text without tags."""
        if not text:
            return
        if self._state is _State.RAW:
            self._deltas.text(text)
        elif self._state is _State.CALL:
            self._call.append(text)
        else:
            self._block_text(text)

    def _block_text(self, text: str) -> None:
        if self._newlines_to_skip:
            rest = text.lstrip("\n")
            skipped = min(len(text) - len(rest), self._newlines_to_skip)
            text = text[skipped:]
            self._newlines_to_skip = 0 if text else self._newlines_to_skip - skipped
        if self._held or text.endswith("\n"):
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._emit(text)

    def _tag(self, tag: Tag, spelling: str) -> None:
        match self._state, tag:
            case _State.RAW, _:
                self._deltas.text(spelling)
            case _State.TEXT, Tag.THINK_OPEN if self._may_reason:
                self._release()
                self._state, self._newlines_to_skip = _State.THINK, 1
            case _State.THINK, Tag.THINK_CLOSE:
                self._held = ""
                self._state, self._newlines_to_skip = _State.TEXT, 2
            case _State.TEXT, Tag.CALL_OPEN:
                self._call, self._held = [self._held, spelling], ""
                self._state = _State.CALL
            case _State.CALL, Tag.CALL_CLOSE:
                self._close_call(spelling)
            case _:
                self._fail(spelling)

    def _close_call(self, spelling: str) -> None:
        call = self._grammar.parse_call("".join(self._call[2:]))
        if call is None:
            self._fail(spelling)
            return
        self._deltas.call(call)
        self._call = []
        self._state, self._newlines_to_skip = _State.TEXT, 0

    def _fail(self, spelling: str) -> None:
        """Treat everything from here on as text: the open call that was held back, `spelling`, and all that follows."""
        self.malformed = True
        if self._state is not _State.CALL:
            self._release()
        self._state = _State.RAW
        self._deltas.text("".join(self._call) + spelling)
        self._call = []

    def _release(self) -> None:
        """The text that was held back is not part of the format: emit it."""
        held, self._held = self._held, ""
        self._emit(held)

    def _emit(self, text: str) -> None:
        if self._state is _State.THINK:
            self._deltas.reasoning(text)
        else:
            self._deltas.text(text)


@dataclass(slots=True)
class _Deltas:
    """Deltas being built: neighbours of one kind are joined."""

    _done: list[Delta] = field(default_factory=list)
    _kind: type[TextDelta] | type[ReasoningDelta] = TextDelta
    _parts: list[str] = field(default_factory=list)

    def text(self, text: str) -> None:
        self._add(TextDelta, text)

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta, text)

    def call(self, call: ToolCall) -> None:
        self._close()
        self._done.append(ToolCallDelta(call))

    def take(self) -> list[Delta]:
        self._close()
        done, self._done = self._done, []
        return done

    def _add(self, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._parts.append(text)

    def _close(self) -> None:
        if self._parts:
            self._done.append(self._kind("".join(self._parts)))
            self._parts = []


class _TagFinder:
    """Finds tags that are spelled in ordinary text, across pieces. All tags begin with the same character."""

    def __init__(self, tags: Mapping[str, Tag]) -> None:
        self._tags = tags
        self._everywhere = _any_of(tags)
        # Inside a call only its end is looked for: the arguments may speak of tags.
        self._closing = [spelling for spelling, tag in tags.items() if tag is Tag.CALL_CLOSE]
        self._in_call = _any_of(self._closing)
        self._text = ""
        self._read = 0  # how much of it has been handed out

    def add(self, text: str) -> None:
        self._text = self._text[self._read :] + text
        self._read = 0

    def next(self, *, in_call: bool) -> tuple[str, Tag | None, str]:
        """The text before the next tag, and the tag; without one, the text that cannot be the beginning of a tag."""
        found = (self._in_call if in_call else self._everywhere).search(self._text, self._read)
        if found is None:
            return self._take(self._certain_end(self._closing if in_call else self._tags)), None, ""
        before = self._take(found.start())
        self._read = found.end()
        return before, self._tags[found[0]], found[0]

    def flush(self) -> str:
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        taken, self._read = self._text[self._read : end], end
        return taken

    def _certain_end(self, tags: Iterable[str]) -> int:
        start = self._text.rfind("<", self._read)
        if start >= 0 and any(tag.startswith(self._text[start:]) for tag in tags):
            return start
        return len(self._text)


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, spellings)) or "(?!)")
