"""Replies as JSON: the chunks of a stream, and whole bodies.

This runs for every token, so a chunk joins a fixed head of the stream and the few fields that change. All output is
ASCII: some readers of server-sent events end lines at U+2028 and similar characters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from renderers.messages import ToolCall
from renderers.replies.detokenize import TokenTable
from serve_app.api.replies.logprobs import chat_logprobs, encoded, quoted, text_logprobs
from serve_app.api.replies.reply import ReplyPart, Usage, WholeReply
from serve_app.api.replies.scores import Scored
from serve_app.api.requests import ReplyOptions
from serve_app.api.schema.replies import ChatMessage, ToolCallReply, UsageReply

_END = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The fields that all chunks of a reply share. `prompt_token_ids` None: they are not shown."""

    id: str
    created: int
    model: str
    options: ReplyOptions
    prompt_token_ids: tuple[int, ...] | None


class Chunks(Protocol):
    """The format of one endpoint's replies."""

    def begin(self) -> bytes:
        """The events before the first part."""

    def part(self, part: ReplyPart) -> bytes:
        """The events of one part; empty when it has nothing to show."""

    def end(self, usage: Usage) -> bytes:
        """The events after the last part."""

    def whole(self, reply: WholeReply, usage: Usage) -> bytes:
        """The body of a reply that is not streamed."""


class ChatChunks:
    """`chat.completion` and its chunks."""

    def __init__(self, head: ReplyHead, table: TokenTable) -> None:
        self._head = head
        self._table = table
        self._num_calls = 0
        options = head.options
        self._has_extras = options.return_token_ids or options.logprobs is not None
        self._before_choice = _before_choice(head, "chat.completion.chunk")
        self._before_delta = self._before_choice + '{"index":0,"delta":'
        self._after = _after_choice(options)

    def begin(self) -> bytes:
        ids = _ids_field(self._head, (), is_first=True)
        first = '{"role":"assistant","content":"","reasoning_content":null}'
        return self._event(f'{first},"finish_reason":null,"logprobs":null{ids}')

    def part(self, part: ReplyPart) -> bytes:
        events = b""
        if part.text or part.reasoning or part.tool_calls or (self._has_extras and part.token_ids):
            extras = self._extras(part) if self._has_extras else '"logprobs":null'
            events = self._event(f'{self._delta(part)},"finish_reason":null,{extras}')
        if part.finish_reason is not None:
            last = '{"content":null,"reasoning_content":null}'
            ids = _ids_field(self._head, (), is_first=False)
            events += self._event(f'{last},"finish_reason":"{part.finish_reason}","logprobs":null{ids}')
        return events

    def end(self, usage: Usage) -> bytes:
        return _usage_event(self._head, "chat.completion.chunk", usage) + _END

    def whole(self, reply: WholeReply, usage: Usage) -> bytes:
        message: ChatMessage = {
            "role": "assistant",
            "content": reply.text or None,
            "reasoning_content": reply.reasoning or None,
            "name": None,
            "tool_calls": [_call(call) for call in reply.tool_calls] or None,
            "tool_call_id": None,
        }
        logprobs = self._logprobs(reply.scored)
        choice = f'"message":{encoded(message)},"finish_reason":"{reply.finish_reason}","logprobs":{logprobs}'
        return _whole(self._head, "chat.completion", choice, reply, usage)

    def _event(self, choice: str) -> bytes:
        return f"{self._before_delta}{choice}{self._after}".encode("ascii")

    def _delta(self, part: ReplyPart) -> str:
        text = quoted(part.text) if part.text else "null"
        reasoning = quoted(part.reasoning) if part.reasoning else "null"
        if not part.tool_calls:
            return f'{{"content":{text},"reasoning_content":{reasoning}}}'
        calls = []
        for call in part.tool_calls:
            calls.append({"index": self._num_calls, **_call(call)})
            self._num_calls += 1
        return f'{{"content":{text},"reasoning_content":{reasoning},"tool_calls":{encoded(calls)}}}'

    def _extras(self, part: ReplyPart) -> str:
        return f'"logprobs":{self._logprobs(part.scored)}{_ids_field(self._head, part.token_ids, is_first=False)}'

    def _logprobs(self, scored: Iterable[Scored]) -> str:
        if self._head.options.logprobs is None:
            return "null"
        return f'{{"content":{chat_logprobs(scored, self._table)}}}'


class TextChunks:
    """`text_completion`, as chunks and whole."""

    def __init__(self, head: ReplyHead, table: TokenTable) -> None:
        self._head = head
        self._table = table
        self._is_first = True
        options = head.options
        self._has_extras = options.return_token_ids or options.logprobs is not None
        self._before_text = _before_choice(head, "text_completion") + '{"index":0,"text":'
        self._after = _after_choice(options)

    def begin(self) -> bytes:
        return b""

    def part(self, part: ReplyPart) -> bytes:
        is_last = part.finish_reason is not None
        if not (part.text or is_last or (self._has_extras and (part.token_ids or part.scored))):
            return b""
        finish = f'"{part.finish_reason}"' if is_last else "null"
        extras = self._extras(part) if self._has_extras else '"logprobs":null'
        return f'{self._before_text}{quoted(part.text)},"finish_reason":{finish},{extras}{self._after}'.encode("ascii")

    def end(self, usage: Usage) -> bytes:
        return _usage_event(self._head, "text_completion", usage) + _END

    def whole(self, reply: WholeReply, usage: Usage) -> bytes:
        text, logprobs = quoted(reply.text), self._logprobs(reply.scored)
        choice = f'"text":{text},"finish_reason":"{reply.finish_reason}","logprobs":{logprobs}'
        return _whole(self._head, "text_completion", choice, reply, usage)

    def _extras(self, part: ReplyPart) -> str:
        ids = _ids_field(self._head, part.token_ids, is_first=self._is_first)
        self._is_first = False
        return f'"logprobs":{self._logprobs(part.scored)}{ids}'

    def _logprobs(self, scored: Iterable[Scored]) -> str:
        if self._head.options.logprobs is None:
            return "null"
        return text_logprobs(scored, self._table)


def _before_choice(head: ReplyHead, kind: str) -> str:
    return f"data: {_about(head, kind)}"


def _about(head: ReplyHead, kind: str) -> str:
    about = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return f'{encoded(about)[:-1]},"choices":['


def _after_choice(options: ReplyOptions) -> str:
    return '}],"usage":null}\n\n' if options.include_usage else "}]}\n\n"


def _usage_event(head: ReplyHead, kind: str, usage: Usage) -> bytes:
    if not head.options.include_usage:
        return b""
    return f'{_before_choice(head, kind)}],"usage":{encoded(_usage(usage))}}}\n\n'.encode("ascii")


def _ids_field(head: ReplyHead, token_ids: Sequence[int], *, is_first: bool) -> str:
    if not head.options.return_token_ids:
        return ""
    ids = f',"token_ids":{encoded(token_ids)}'
    if is_first and head.prompt_token_ids is not None:
        ids += f',"prompt_token_ids":{encoded(head.prompt_token_ids)}'
    return ids


def _whole(head: ReplyHead, kind: str, choice: str, reply: WholeReply, usage: Usage) -> bytes:
    ids = _ids_field(head, reply.token_ids, is_first=True)
    return f'{_about(head, kind)}{{"index":0,{choice}{ids}}}],"usage":{encoded(_usage(usage))}}}'.encode("ascii")


def _usage(usage: Usage) -> UsageReply:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _call(call: ToolCall) -> ToolCallReply:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
