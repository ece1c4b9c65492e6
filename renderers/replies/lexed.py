"""A parser of tagged replies behind a lexer, for formats whose tags are made of several tokens."""

from collections.abc import Sequence
from typing import Protocol

from renderers.base import ReplyEnd, ReplyParser
from renderers.deltas import Delta, Piece


class Lexer(Protocol):
    """Puts the tags of one reply together: each becomes one piece, with an id that the parser's grammar names."""

    @property
    def held(self) -> str:
        """The text that is held back."""

    def feed(self, pieces: Sequence[Piece]) -> list[Piece]: ...

    def flush(self) -> list[Piece]:
        """What was held back where a reply ended."""

    def cut(self) -> list[Piece]:
        """What was held back where a reply was cut: part of a tag is no error there."""


class LexedParser:
    """See `ReplyParser`."""

    def __init__(self, lexer: Lexer, parser: ReplyParser) -> None:
        self._lexer = lexer
        self._parser = parser

    @property
    def malformed(self) -> bool:
        return self._parser.malformed

    @property
    def raw_text(self) -> str:
        return self._parser.raw_text + self._lexer.held

    def feed(self, pieces: Sequence[Piece]) -> list[Delta]:
        return self._parser.feed(self._lexer.feed(pieces))

    def finish(self, end: ReplyEnd) -> list[Delta]:
        held = self._lexer.cut() if end is ReplyEnd.CUT else self._lexer.flush()
        return self._parser.feed(held) + self._parser.finish(end)
