"""One reply's state: token ids to text, reasoning and tool calls, with stop strings, log-probabilities and usage.

A reply is a series of `ReplyPart`s, one per engine delta. A stream sends the parts one by one; a whole reply joins all
of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.interface.protocol import FinishReason, TokenDelta
from renderers.base import ReplyEnd, ReplyParser
from renderers.deltas import Delta, Piece, ReasoningDelta, TextDelta, ToolCallDelta
from renderers.messages import ToolCall
from renderers.replies.detokenize import Detokenizer, visible_text
from renderers.replies.stop import StopMatcher
from serve_app.api.replies.scores import Scored, Scores


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """What one delta added. `finish_reason` is set on the last part."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    scored: tuple[Scored, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class WholeReply:
    """All parts of a reply, joined."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: Scores = field(default_factory=Scores)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)

    def add(self, part: ReplyPart) -> None:
        """The next one."""
        self.texts.append(part.text)
        self.reasonings.append(part.reasoning)
        self.tool_calls += part.tool_calls
        self.token_ids += part.token_ids
        self.scored.extend(part.scored)
        self.finish_reason = part.finish_reason


class TextReader:
    """Decodes sampled tokens to text that later tokens cannot change, up to the first stop string."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        *,
        hidden_ids: frozenset[int] | None = None,
        offset: int = 0,
    ) -> None:
        """`hidden_ids`: markers to drop; other markers become ordinary text. None: markers are kept for a parser.
        `offset`: the character at which the reply begins.
        """
        self._detokenizer = detokenizer
        self._hidden_ids = hidden_ids
        self._stop = StopMatcher(stop_strings) if stop_strings else None
        self.offset = offset  # of the next character: what was decoded, whether held back or cut by a stop string

    @property
    def has_matched(self) -> bool:
        return self._stop is not None and self._stop.matched is not None

    def read(self, token_id: int) -> list[Piece]:
        return self._until_stop(self._detokenizer.feed((token_id,)))

    def end(self) -> list[Piece]:
        """The rest of the text after the last token. It may complete a stop string."""
        if self.has_matched:
            return []
        pieces = self._until_stop(self._detokenizer.flush())
        return pieces if self._stop is None or self.has_matched else pieces + self._stop.flush()

    def _until_stop(self, pieces: list[Piece]) -> list[Piece]:
        if self._hidden_ids is not None:
            pieces = visible_text(pieces, self._hidden_ids)
        for piece in pieces:
            self.offset += len(piece.text)
        return pieces if self._stop is None else self._stop.feed(pieces)


class UnformattedParser:
    """For replies that have no format: all of it is text."""

    malformed = False

    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def raw_text(self) -> str:
        return "".join(self._texts)

    def feed(self, pieces: Sequence[Piece]) -> list[Delta]:
        self._texts += [piece.text for piece in pieces]
        return [TextDelta(piece.text) for piece in pieces]

    def finish(self, end: ReplyEnd) -> list[Delta]:
        del end
        return []


class Reply:
    """Turns the deltas of one generation into parts. After a part with a `finish_reason`, feed nothing more and close
    the generation: after a stop string it would continue.
    """

    def __init__(
        self,
        reader: TextReader,
        parser: ReplyParser,
        *,
        num_prompt_tokens: int,
        end_token_ids: frozenset[int],
        separate_reasoning: bool = True,
    ) -> None:
        self._reader = reader
        self._parser = parser
        self._num_prompt_tokens = num_prompt_tokens
        self._end_token_ids = end_token_ids
        self._separate_reasoning = separate_reasoning
        self._cached_tokens = 0
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._num_calls = 0
        self.end_reason: str | None = None  # why generating ended, calls or none
        self.finish_reason: str | None = None
        self._unassigned_tokens = 0  # of which it is not known yet whether they are reasoning

    @property
    def malformed(self) -> bool:
        """Whether the reply is not in the model's own format. Final after the last part."""
        return self._parser.malformed

    def correct(self, whole: WholeReply) -> None:
        """Turn a whole reply that is not in the model's format into plain text."""
        if self.malformed:
            whole.texts, whole.reasonings, whole.tool_calls = [self._parser.raw_text], [], []
            whole.finish_reason = self.end_reason
            self._reasoning_tokens = 0

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(self._num_prompt_tokens, self._cached_tokens, self._completion_tokens, self._reasoning_tokens)

    def feed(self, delta: TokenDelta) -> ReplyPart:
        self._cached_tokens += delta.cached_tokens
        num_texts = len(delta.token_ids) - (delta.finish_reason is FinishReason.STOP)  # a stop token has no text
        deltas: list[Delta] = []
        offsets: list[int] = []
        for token_id in delta.token_ids:
            offsets.append(self._reader.offset)
            if len(offsets) <= num_texts:
                deltas += self._parse(self._reader.read(token_id))
                if self._reader.has_matched:
                    break
        self._completion_tokens += len(offsets)
        finish_reason = self._finish(delta, deltas)
        token_ids = delta.token_ids[: len(offsets)]
        scored = tuple(map(Scored, token_ids, delta.logprobs, offsets)) if delta.logprobs else ()
        return self._part(deltas, token_ids, scored, finish_reason)

    def _parse(self, pieces: list[Piece]) -> list[Delta]:
        deltas = self._parser.feed(pieces) if pieces else []
        self._assign(deltas, 1)
        return deltas

    def _assign(self, deltas: Sequence[Delta], num_tokens: int) -> None:
        """Tokens whose text is held back belong to what comes out next."""
        self._unassigned_tokens += num_tokens
        if deltas:
            if any(isinstance(delta, ReasoningDelta) for delta in deltas):
                self._reasoning_tokens += self._unassigned_tokens
            self._unassigned_tokens = 0

    def _finish(self, delta: TokenDelta, deltas: list[Delta]) -> str | None:
        """Append what was held back if this is the end; the finish reason then."""
        if delta.finish_reason is None and not self._reader.has_matched:
            return None
        rest = self._reader.end()
        cut = self._reader.has_matched
        ended = delta.finish_reason is FinishReason.STOP and not cut and delta.token_ids[-1] in self._end_token_ids
        last = self._parser.feed(rest) if rest else []
        last += self._parser.finish(ReplyEnd.END if ended else ReplyEnd.CUT)
        self._assign(last, 0)
        deltas += last
        self.end_reason = "stop" if cut or delta.finish_reason is FinishReason.STOP else "length"
        return self.end_reason

    def _part(
        self, deltas: list[Delta], token_ids: tuple[int, ...], scored: tuple[Scored, ...], finish_reason: str | None
    ) -> ReplyPart:
        texts: list[str] = []
        reasonings: list[str] = []
        calls: list[ToolCall] = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                texts.append(delta.text)
            elif isinstance(delta, ToolCallDelta):
                calls.append(delta.call)
            else:
                (reasonings if self._separate_reasoning else texts).append(delta.text)
        self._num_calls += len(calls)
        if finish_reason is not None and self._num_calls:
            finish_reason = "tool_calls"
        self.finish_reason = finish_reason
        return ReplyPart("".join(texts), "".join(reasonings), tuple(calls), token_ids, scored, finish_reason)
