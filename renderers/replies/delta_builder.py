"""Deltas under construction: neighbours of one kind are joined."""

from dataclasses import dataclass, field

from renderers.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from renderers.messages import ToolCall


@dataclass(slots=True)
class DeltaBuilder:
    """What a parser adds between two calls of `feed`."""

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
        """All since the last time."""
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
