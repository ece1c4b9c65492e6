"""Stop strings, found in the decoded text across the borders of tokens and chunks.

An automaton (Aho-Corasick) follows all stop strings at once, in time linear in the text for any stop strings. Its state
says how many of the last characters may yet become a stop string. Exactly those are held back.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence

from renderers.base import RenderError
from renderers.deltas import Piece

MAX_STOP_CHARACTERS = 16_384
"""Of all stop strings of a request together: the automaton has a state per character, built in about 1 µs each."""


class StopMatcher:
    """Cuts a reply before the first stop string that becomes complete (the longest, if several do at one character).

    A marker's piece breaks a match and is never part of one. Raises `RenderError` (param `stop`) if a stop string is
    empty, or if all together are longer than `MAX_STOP_CHARACTERS`.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        total = sum(map(len, stop_strings))
        if total > MAX_STOP_CHARACTERS:
            raise RenderError(
                f"stop: all stop strings together have at most {MAX_STOP_CHARACTERS} characters, got {total}.", "stop"
            )
        if "" in stop_strings:
            raise RenderError("stop: a stop string must not be empty, got ''.", "stop")
        self.matched: str | None = None
        self._states = _Automaton(stop_strings)
        self._state = 0
        self._held = ""

    def feed(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces that are certain not to be part of a stop string; nothing more once `matched` is set."""
        certain: list[Piece] = []
        for piece in pieces:
            if self.matched is not None:
                break
            if piece.token_id is not None:
                certain += self.flush()
                certain.append(piece)
            elif not self._held and not self._states.begins_in(piece.text):
                certain.append(piece)
            elif text := self._certain_text(piece.text):
                certain.append(Piece(text))
        return certain

    def flush(self) -> list[Piece]:
        """What was held back: the text that ended, or was broken by a marker, before it became a stop string."""
        held, self._held, self._state = self._held, "", 0
        return [Piece(held)] if held else []

    def _certain_text(self, text: str) -> str:
        self._state, end, length = self._states.walk(self._state, text)
        text, end = self._held + text, end + len(self._held)
        if length:
            self.matched = text[end - length : end]
            self._held, self._state = "", 0
            return text[: end - length]
        certain_len = len(text) - self._states.depth[self._state]
        self._held = text[certain_len:]
        return text[:certain_len]


class _Automaton:
    """State 0 is the root. `depth` of a state: how many last characters are the beginning of a stop string."""

    def __init__(self, words: Sequence[str]) -> None:
        self.depth = [0]
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._match_len = [0]
        for word in words:
            self._add(word)
        self._link()
        # Most text holds no beginning of a stop string: the regular expression skips it at C speed.
        firsts = "".join(map(re.escape, self._next[0]))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def _add(self, word: str) -> None:
        state = 0
        for char in word:
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self._next.append({})
                self._fallback.append(0)
                self._match_len.append(0)
            state = following
        self._match_len[state] = len(word)

    def _link(self) -> None:
        """Breadth first, so that the fallback of every shallower state is known."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            # The longest stop string that ends here: the state's own, else that of its longest suffix.
            self._match_len[state] = self._match_len[state] or self._match_len[self._fallback[state]]
            for char, following in self._next[state].items():
                self._fallback[following] = self._step(self._fallback[state], char) if state else 0
                queue.append(following)

    def _step(self, state: int, char: str) -> int:
        while (following := self._next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return following

    def begins_in(self, text: str) -> bool:
        """Whether any character of the text can begin a stop string."""
        return self._first.search(text) is not None

    def walk(self, state: int, text: str) -> tuple[int, int, int]:
        """(state reached, characters read, length of the match that ends there or 0)."""
        index, match_len = 0, self._match_len
        while index < len(text):
            if state == 0:
                found = self._first.search(text, index)
                if found is None:
                    break
                index = found.start()
            state = self._step(state, text[index])
            index += 1
            if match_len[state]:
                return state, index, match_len[state]
        return state, len(text), 0
