"""Sections of calls whose parts are markers: `<begin>head<middle>body<end>`, once a call (Kimi K2, DeepSeek V3)."""

from collections.abc import Sequence
from dataclasses import dataclass

from renderers.deltas import Piece
from renderers.replies.tags import Tag


@dataclass(frozen=True, slots=True)
class CallMarkers:
    """The markers around one call. `between`: what the format puts between two calls; nothing is right there too."""

    begin: str
    middle: str
    end: str
    between: str = ""

    def tags(self, section: str, section_end: str) -> dict[str, Tag]:
        """The markers of a section, with those around it."""
        parts = dict.fromkeys((self.begin, self.middle, self.end), Tag.CALL_PART)
        return {section: Tag.CALL_OPEN, section_end: Tag.CALL_CLOSE, **parts}

    def split(self, section: Sequence[Piece]) -> list[tuple[str, str]] | None:
        """Head and body of each call in a section; None if it is not in the format, or empty."""
        calls: list[tuple[str, str]] = []
        expected, texts = self.begin, [""]
        for piece in section:
            is_part = piece.token_id is not None and piece.text in (self.begin, self.middle, self.end)
            if not is_part:
                texts[-1] += piece.text
            elif piece.text != expected:
                return None
            elif expected == self.begin:
                if texts[0] not in ("", self.between if calls else ""):
                    return None
                expected, texts = self.middle, [""]
            elif expected == self.middle:
                expected = self.end
                texts.append("")
            else:
                calls.append((texts[0], texts[1]))
                expected, texts = self.begin, [""]
        return calls if calls and texts == [""] else None
