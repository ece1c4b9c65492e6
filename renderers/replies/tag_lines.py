"""Tags of a model whose vocabulary has none: they are found in ordinary text, across pieces.

A tag counts at the beginning of a line, and before the text that the format puts behind it. The parser says which tags
the format allows next. All others are text, whatever they look like.
"""

import re
from collections.abc import Collection, Mapping


class TagLines:
    """The text of one reply, as far as it is not handed out. A reply begins at the beginning of a line.

    `followed_by`: what the format puts behind each tag. `first`: the tag that counts only at the beginning of the
    reply.
    """

    def __init__(self, followed_by: Mapping[str, str], first: str) -> None:
        self._followed_by = followed_by
        self._first = first
        self._patterns = {
            tag: re.compile(rf"{start}{re.escape(tag)}(?={re.escape(behind)})", re.MULTILINE)
            for tag, behind in followed_by.items()
            for start in [r"\A" if tag == first else "^"]
        }
        self._text = ""
        self._read = 0  # how much of it has been handed out

    def add(self, text: str) -> None:
        kept = max(self._read - 1, 0)  # one character more, to see whether the next begins a line
        self._text = self._text[kept:] + text
        self._read -= kept

    def next(self, allowed: Collection[str]) -> tuple[str, str]:
        """The text before the next tag, and the tag; without one, the text that cannot be the beginning of a tag."""
        if self._read and self._text.find("\n", self._read - 1, -1) < 0:
            return self._take(len(self._text)), ""  # no line begins here
        found = [match for tag in allowed if (match := self._patterns[tag].search(self._text, self._read))]
        if not found:
            return self._take(self._certain_end(allowed)), ""
        match = min(found, key=re.Match.start)
        before = self._take(match.start())
        self._read = match.end()
        return before, match[0]

    def flush(self, allowed: Collection[str]) -> tuple[str, str]:
        """What was held back, or the tag that it is: the text ends here, as a line does."""
        rest = self._take(len(self._text))
        is_tag = rest in allowed and self._followed_by[rest] in ("", "\n")
        return ("", rest) if is_tag else (rest, "")

    def _take(self, end: int) -> str:
        taken, self._read = self._text[self._read : end], end
        return taken

    def _certain_end(self, allowed: Collection[str]) -> int:
        """A tag and what is behind it have at most one line and the beginning of the next."""
        last = self._text.rfind("\n")
        for start in (self._text.rfind("\n", 0, max(last, 0)) + 1, last + 1):
            begun = self._text[start:]
            if start >= self._read and begun and any(self._could_be(tag, begun, start) for tag in allowed):
                return start
        return len(self._text)

    def _could_be(self, tag: str, begun: str, start: int) -> bool:
        return f"{tag}{self._followed_by[tag]}".startswith(begun) and not (start and tag == self._first)
