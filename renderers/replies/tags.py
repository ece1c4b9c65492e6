"""Replies made of tagged blocks, `<think>…</think>` and `<tool_call>…</tool_call>`: a strict, incremental parser.

The tags are markers of the vocabulary: only the tokens count, the same characters are text. A model whose vocabulary
has none spells them in ordinary text. There they count only where the format puts them (see `tag_lines`): reasoning at
the beginning of a reply, calls after it, each tag at the beginning of a line. All else is text, and no error.

A call of a function that was not declared is text in either case, and no error: the reply goes on after it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeAlias

from renderers.base import ReplyEnd
from renderers.deltas import Delta, Piece
from renderers.messages import Tool, ToolCall
from renderers.replies.delta_builder import DeltaBuilder
from renderers.replies.tag_lines import TagLines
from renderers.tools import new_call_id


class Tag(Enum):
    THINK_OPEN = auto()
    THINK_CLOSE = auto()
    CALL_OPEN = auto()
    CALL_PART = auto()
    """A marker inside a block of calls; an error elsewhere."""
    CALL_CLOSE = auto()
    FRAME = auto()
    """A marker of the format that stands for nothing: it is dropped."""
    END = auto()


class Start(Enum):
    """Where a reply begins, given the start of the reply that the prompt already holds."""

    TEXT = auto()
    REASONING = auto()
    REASONING_UNFRAMED = auto()
    """As REASONING, but the newline after `<think>` is yet to come."""
    REASONED = auto()
    """The prompt holds a closed block: the model must not reason, its reasoning tags are errors."""

    @classmethod
    def after(cls, prefill: str, opening: str = "<think>", closing: str = "</think>") -> "Start":
        """What the prompt has begun of the reply."""
        tag = prefill.rstrip("\n")
        if tag.endswith(closing):
            return cls.REASONED
        if tag.endswith(opening):
            return cls.REASONING if prefill != tag else cls.REASONING_UNFRAMED
        return cls.TEXT


@dataclass(frozen=True, slots=True)
class Framing:
    """How many newlines the format puts around the blocks. So many are dropped where they are, fewer where they are
    not. A trailing newline is held back until the next text shows whether it is one of these.

    `space`: the characters that count as such; None is all white space.
    """

    space: str | None = "\n"
    at_start: int = 0
    after_think_open: int = 0
    before_think_close: int = 0
    after_think_close: int = 0
    before_call: int = 0
    after_call: int = 0
    before_end: int = 0
    leading_space: bool = False
    """The format puts a space before the text that a reply begins with; it is dropped."""


STRIPPED = Framing(
    space=None,
    at_start=sys.maxsize,
    after_think_open=sys.maxsize,
    before_think_close=sys.maxsize,
    after_think_close=sys.maxsize,
    before_call=sys.maxsize,
    after_call=sys.maxsize,
    before_end=sys.maxsize,
)
"""Reasoning and text have no white space at their ends."""


ParseCalls: TypeAlias = Callable[[Sequence[Piece], Mapping[str, Tool]], Sequence[ToolCall] | None]
"""Makes calls of the pieces inside a block, or returns None if they are not in the format. The tools are by name."""


@dataclass(frozen=True, slots=True)
class TextTag:
    """A tag that is spelled in ordinary text, and what the format puts behind it."""

    tag: Tag
    followed_by: str


@dataclass(frozen=True, slots=True)
class TagGrammar:
    """`by_id`: the tags that are markers. `by_text`: those of a model whose vocabulary has none, by spelling.

    `text_in_reasoning`: tags that are ordinary text inside reasoning, not errors. `must_close_reasoning`: reasoning
    that the reply ends in is an error. `calls_come_last`: so is anything after a block of calls.

    `calls_run_on`: a block of calls has no end of its own; the next one or the end of the reply closes it.
    `reasoning_label`: the word that reasoning begins with, which is not part of it; without it the reply is malformed.
    """

    by_id: Mapping[int, Tag]
    parse_calls: ParseCalls
    by_text: Mapping[str, TextTag] = field(default_factory=dict)
    framing: Framing = Framing()
    text_in_reasoning: frozenset[Tag] = frozenset()
    must_close_reasoning: bool = False
    calls_come_last: bool = False
    calls_run_on: bool = False
    reasoning_label: str = ""

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, tag in self.by_id.items() if tag is Tag.END)


class _State(Enum):
    TEXT = auto()
    THINK = auto()
    CALL = auto()
    CALLED = auto()
    """After a block of calls that must come last."""
    RAW = auto()


class TagParser:
    """Parses one reply; see `ReplyParser`."""

    def __init__(self, grammar: TagGrammar, start: Start, tools: Sequence[Tool]) -> None:
        self.malformed = False
        self._grammar = grammar
        self._tools = {tool.name: tool for tool in tools}
        self._lines = _tag_lines(grammar.by_text) if grammar.by_text else None
        self._tags_next = _tags_next(grammar.by_text, start)
        self._may_reason = start is not Start.REASONED
        reasoning = start in (Start.REASONING, Start.REASONING_UNFRAMED)
        self._state = _State.THINK if reasoning else _State.TEXT
        unframed = start is Start.REASONING_UNFRAMED
        self._newlines_to_skip = grammar.framing.after_think_open if unframed else grammar.framing.at_start
        self._held = ""  # newlines that may belong to the format
        self._opening = ""  # of the open block: the newlines before it, its tag, and what there is of its label
        self._label = ""  # what is yet to come of it
        self._space_to_skip = grammar.framing.leading_space
        self._block: list[Piece] = []  # what is inside it
        self._call_ids: set[str] = set()
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
            tag = None if piece.token_id is None else self._grammar.by_id.get(piece.token_id)
            if tag is Tag.END:
                self._flush_lines()
                self._close_run_on()
                self._end = piece.text
                continue
            self._raw.append(piece.text)
            if tag is not None:
                self._tag(tag, piece)
            elif self._lines is not None:
                self._text_with_lines(self._lines, piece.text)
            else:
                self._characters(piece)
        return self._deltas.take()

    def finish(self, end: ReplyEnd) -> list[Delta]:
        self._flush_lines()
        ended = end is ReplyEnd.END or self._end is not None
        if ended:
            self._close_run_on()
        if ended and self._label:
            self._fail("")
        if self._state is _State.CALL:
            self._error(ended)
            self._give_up_block("")
        else:
            self._error(ended and self._state is _State.THINK and self._grammar.must_close_reasoning)
            if ended:
                self._held = self._held[: max(len(self._held) - self._grammar.framing.before_end, 0)]
            self._release()
        if not self._raw and ended:
            self.malformed = True
        return self._deltas.take()

    def _text_with_lines(self, lines: TagLines, text: str) -> None:
        if self._state is _State.RAW:
            self._deltas.text(text)
            return
        lines.add(text)
        tag = text
        while tag:
            before, tag = lines.next(self._tags_next[self._state])
            self._line(before, tag)

    def _flush_lines(self) -> None:
        if self._lines is not None:
            self._line(*self._lines.flush(self._tags_next[self._state]))

    def _line(self, before: str, tag: str) -> None:
        if before:
            self._characters(Piece(before))
        if tag:
            self._tag(self._grammar.by_text[tag].tag, Piece(tag))

    def _characters(self, piece: Piece) -> None:
        """Ordinary text, or a marker that is no tag."""
        match self._state:
            case _State.RAW:
                self._deltas.text(piece.text)
            case _State.CALL:
                self._block.append(piece)
            case _State.CALLED:
                self._fail(piece.text)
            case _:
                self._block_text(piece.text)

    def _block_text(self, text: str) -> None:
        if self._label:
            text = self._after_label(text)
        if self._space_to_skip:
            self._space_to_skip, text = False, text.removeprefix(" ")
        framing = self._grammar.framing
        if self._newlines_to_skip:
            rest = text.lstrip(framing.space)
            skipped = min(len(text) - len(rest), self._newlines_to_skip)
            text = text[skipped:]
            self._newlines_to_skip = 0 if text else self._newlines_to_skip - skipped
        if self._held or len(text.rstrip(framing.space)) < len(text):
            most = framing.before_think_close if self._state is _State.THINK else framing.before_call
            text = self._held + text
            certain_len = max(len(text.rstrip(framing.space)), len(text) - most)
            text, self._held = text[:certain_len], text[certain_len:]
        self._emit(text)

    def _after_label(self, text: str) -> str:
        """What is not part of the label; nothing if the reply turns out to be malformed."""
        begun = min(len(text), len(self._label))
        if text[:begun] != self._label[:begun]:
            self._fail(text)
            return ""
        self._opening += text[:begun]
        self._label = self._label[begun:]
        return text[begun:]

    def _tag(self, tag: Tag, piece: Piece) -> None:
        self._space_to_skip = False
        if self._state is _State.RAW:
            self._deltas.text(piece.text)
        elif self._label:
            self._fail(piece.text)
        else:
            self._change(tag, piece)

    def _change(self, tag: Tag, piece: Piece) -> None:
        match self._state, tag:
            case _State.TEXT, Tag.THINK_OPEN if self._may_reason:
                self._release()
                self._opening, self._label = piece.text, self._grammar.reasoning_label
                self._state, self._newlines_to_skip = _State.THINK, self._grammar.framing.after_think_open
            case _State.THINK, Tag.THINK_CLOSE:
                self._held = ""
                self._state, self._newlines_to_skip = _State.TEXT, self._grammar.framing.after_think_close
            case _State.THINK, _ if tag in self._grammar.text_in_reasoning:
                self._block_text(piece.text)
            case _State.TEXT, Tag.CALL_OPEN:
                self._opening, self._held = self._held + piece.text, ""
                self._state = _State.CALL
            case ((_State.TEXT | _State.CALLED), Tag.FRAME):
                self._release()
            case _State.CALL, Tag.CALL_PART:
                self._block.append(piece)
            case _State.CALL, Tag.CALL_CLOSE:
                self._close_block(piece.text)
            case _State.CALL, Tag.CALL_OPEN if self._grammar.calls_run_on:
                self._close_block("")
                self._tag(tag, piece)
            case _:
                self._fail(piece.text)

    def _close_run_on(self) -> None:
        if self._state is _State.CALL and self._grammar.calls_run_on:
            self._close_block("")

    def _close_block(self, spelling: str) -> None:
        calls = self._grammar.parse_calls(self._block, self._tools)
        if calls is None and self._lines is None:
            self._fail(spelling)
            return
        self._state = _State.TEXT
        if calls is None or any(call.name not in self._tools for call in calls):
            self._give_up_block(spelling)
            return
        for call in calls:
            self._deltas.call(self._with_own_id(call))
        self._block = []
        self._newlines_to_skip = self._grammar.framing.after_call
        if self._grammar.calls_come_last:
            self._state = _State.CALLED

    def _with_own_id(self, call: ToolCall) -> ToolCall:
        """A model that writes ids itself may write one twice."""
        if call.id in self._call_ids:
            call = replace(call, id=new_call_id())
        self._call_ids.add(call.id)
        return call

    def _give_up_block(self, spelling: str) -> None:
        """The open block is text, and so is the tag that closed it."""
        self._deltas.text(self._opening + "".join(piece.text for piece in self._block) + spelling)
        self._block = []

    def _fail(self, spelling: str) -> None:
        """All from here on is text: the open block that was held back, `spelling`, and what follows."""
        self.malformed = True
        if self._state is _State.CALL:
            self._give_up_block("")
        else:
            self._release()
        if self._label:
            spelling = self._opening + spelling
        self._state, self._label = _State.RAW, ""
        self._deltas.text(spelling)

    def _error(self, found: bool) -> None:
        """Where tags are text, a reply without an end is no error: it may speak of tags."""
        self.malformed = self.malformed or (found and self._lines is None)

    def _release(self) -> None:
        """The text that was held back is not part of the format: emit it."""
        held, self._held = self._held, ""
        self._emit(held)

    def _emit(self, text: str) -> None:
        if self._state is _State.THINK:
            self._deltas.reasoning(text)
        else:
            self._deltas.text(text)


def _tag_lines(by_text: Mapping[str, TextTag]) -> TagLines:
    return TagLines(
        {spelling: text_tag.followed_by for spelling, text_tag in by_text.items()},
        first=next(spelling for spelling, text_tag in by_text.items() if text_tag.tag is Tag.THINK_OPEN),
    )


def _tags_next(by_text: Mapping[str, TextTag], start: Start) -> Mapping[_State, Sequence[str]]:
    """Which tags of the text the format allows in each state."""
    spellings = {text_tag.tag: spelling for spelling, text_tag in by_text.items()}
    first = (Tag.CALL_OPEN,) if start is Start.REASONED else (Tag.THINK_OPEN, Tag.CALL_OPEN)
    tags = {_State.TEXT: first, _State.THINK: (Tag.THINK_CLOSE,), _State.CALL: (Tag.CALL_CLOSE,)}
    return {state: [spellings[tag] for tag in tags.get(state, ()) if tag in spellings] for state in _State}
