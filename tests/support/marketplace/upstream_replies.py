"""What the stand-in upstream (`upstream.py`) replies: streams of every shape, refusals, and faults of the network.

A behaviour is a function from a request to acts, which the server performs one after the other. `Stream`, `whole` and
`refusal` make most of them. Those that need no arguments have a name in `upstream_behaviours.py`.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

TEXTS = (" red,", " yellow", " and blue.")


@dataclass(frozen=True, slots=True)
class Wait:
    """Until the test calls `release`; each call lets one wait of one request go on."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Pacing, of the server's own."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Close:
    """An orderly end of the connection, as of a process that exits."""


@dataclass(frozen=True, slots=True)
class Reset:
    """The end of the connection by a RST, as of a host that forgot it."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Nothing more, until the client leaves."""


@dataclass(frozen=True, slots=True)
class Forever:
    """The same bytes again and again, until the client leaves."""

    content: bytes
    pause_s: float = 0.0


Act = bytes | Wait | Pause | Close | Reset | Hang | Forever


@dataclass(slots=True)
class Asked:
    """One request, as it came. `turn` counts the requests of its connection, from 1."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    connection: int
    turn: int

    def header(self, name: str) -> str | None:
        """The last header of that name, in any case."""
        return dict((key.lower(), value) for key, value in self.headers).get(name.lower())

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def asks_usage(self) -> bool:
        return bool((self.json().get("stream_options") or {}).get("include_usage"))


Behaviour = Callable[[Asked], Iterable[Act]]
Framing = Literal["chunked", "length", "close"]
Encoding = Literal["gzip", "deflate", "br"]


def head(status: int, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def response(
    body: Iterable[Act],
    *,
    status: int = 200,
    headers: Sequence[tuple[str, str]] = (),
    framing: Framing = "chunked",
    encoding: Encoding | None = None,
) -> Iterator[Act]:
    """Head and body. "close" frames by the end of the connection alone, so that a cut looks like an end."""
    if encoding:
        headers = (*headers, ("content-encoding", encoding))
        body = compressed(body, encoding)
    if framing == "chunked":
        yield head(status, (*headers, ("transfer-encoding", "chunked")))
        yield from in_chunks(body)
    elif framing == "close":
        yield head(status, (*headers, ("connection", "close")))
        yield from body
        yield Close()
    else:
        content = b"".join(act for act in body if isinstance(act, bytes))
        yield head(status, (*headers, ("content-length", str(len(content))))) + content


def in_chunks(body: Iterable[Act]) -> Iterator[Act]:
    def chunk(content: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(content), content)

    for act in body:
        if isinstance(act, bytes):
            if act:  # an empty chunk would be the end
                yield chunk(act)
        elif isinstance(act, Forever):
            yield Forever(chunk(act.content), act.pause_s)
        else:
            yield act
    yield b"0\r\n\r\n"


def compressed(body: Iterable[Act], encoding: Encoding) -> Iterator[Act]:
    """What is labelled "br" stays as it is: the label lies. The others flush after each piece."""
    if encoding == "br":
        yield from body
        return
    packing = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    for act in body:
        if isinstance(act, bytes):
            yield packing.compress(act) + packing.flush(zlib.Z_SYNC_FLUSH)
        elif isinstance(act, Forever):
            yield packing.flush(zlib.Z_FULL_FLUSH)
            # After a full flush the same bytes unpack to the same text, however often they come.
            yield Forever(packing.compress(act.content) + packing.flush(zlib.Z_FULL_FLUSH), act.pause_s)
        else:
            yield act
    yield packing.flush()


def in_pieces(body: Iterable[Act], size: int) -> Iterator[Act]:
    for act in body:
        if isinstance(act, bytes):
            yield from (act[start : start + size] for start in range(0, len(act), size))
        else:
            yield act


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A streamed reply to `/completions` or `/chat/completions`, one token a text.

    It is that of OpenAI: usage in a chunk of its own, if it was asked for, and null in the others. `members` is JSON
    text that each chunk gets at its top, such as `"x_cost":0.10`. After `until` events comes `then` in place of the
    rest; a string there is the JSON text of an event. `wait_before` counts events from 0, `wait_head` is before all.
    """

    texts: tuple[str, ...] = TEXTS
    reasoning: tuple[str, ...] = ()
    finish: Literal["alone", "with_text", "never"] = "alone"
    finish_reason: str = "stop"
    usage: Literal["own", "beside_last", "every", "every_but_own", "never"] = "own"
    usage_unasked: bool = False
    usage_null: bool = True
    prompt_tokens: int = 7
    cached_tokens: int = 2
    model: str | None = None  # None: the one that was asked for
    members: str = ""
    choice_members: str = ""

    line_end: bytes = b"\n"
    byte_order_mark: bool = False
    space: bytes = b" "
    comment: bytes | None = None  # before each event
    multi_line: bool = False
    fields: bool = False  # `event`, `id` and `retry` with each event
    done: bool = True

    pace_s: float = 0.0
    wait_head: bool = False
    wait_before: tuple[int, ...] = ()
    until: int | None = None
    then: tuple[Act | str, ...] = ()
    piece_bytes: int | None = None

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "text/event-stream; charset=utf-8"
    framing: Framing = "chunked"
    encoding: Encoding | None = None

    def __call__(self, asked: Asked) -> Iterator[Act]:
        if self.wait_head:
            yield Wait()
        body: Iterable[Act] = self.body(asked)
        if self.piece_bytes:
            body = in_pieces(body, self.piece_bytes)
        headers = (("content-type", self.content_type), *self.headers)
        yield from response(body, status=self.status, headers=headers, framing=self.framing, encoding=self.encoding)

    def body(self, asked: Asked) -> Iterator[Act]:
        if self.byte_order_mark:
            yield b"\xef\xbb\xbf"
        for index, text in enumerate(self.chunks(asked)):
            if index == self.until:
                break
            if index in self.wait_before:
                yield Wait()
            if index and self.pace_s:
                yield Pause(self.pace_s)
            yield self.event(text)
        yield from (self.event(act) if isinstance(act, str) else act for act in self.then)
        if self.done and self.until is None:
            yield self.event("[DONE]")

    def event(self, text: str) -> bytes:
        lines = [] if self.comment is None else [b": " + self.comment]
        if self.fields:
            lines += [b"event: message", b"id: 1", b"retry: 1000"]
        lines += [b"data:" + self.space + line.encode() for line in text.split("\n")]
        return self.line_end.join((*lines, b"", b""))

    def chunks(self, asked: Asked) -> Iterator[str]:
        """The JSON text of each chunk."""
        counts = self.usage if asked.asks_usage or self.usage_unasked else "never"
        choices = list(self.choices(asked))
        for index, (choice, tokens) in enumerate(choices):
            is_last = index == len(choices) - 1
            if counts.startswith("every") or (counts == "beside_last" and is_last):
                yield self.chunk(asked, f"[{choice}]", self.usage_of(tokens))
            else:
                yield self.chunk(asked, f"[{choice}]", "null" if counts == "own" and self.usage_null else None)
        if counts in ("own", "every"):
            yield self.chunk(asked, "[]", self.usage_of(len(self.texts) + len(self.reasoning)))

    def choices(self, asked: Asked) -> Iterator[tuple[str, int]]:
        """The JSON text of the one choice of each chunk, and the tokens up to it."""
        pieces = [("reasoning_content", text) for text in self.reasoning] + [("content", text) for text in self.texts]
        if asked.is_chat:
            yield self.choice('"delta":{"role":"assistant","content":""}', None), 0
        for index, (name, text) in enumerate(pieces):
            is_end = self.finish == "with_text" and index == len(pieces) - 1
            said = f'"delta":{{"{name}":{json.dumps(text)}}}' if asked.is_chat else f'"text":{json.dumps(text)}'
            yield self.choice(said, self.finish_reason if is_end else None), index + 1
        if self.finish == "alone":
            yield self.choice('"delta":{}' if asked.is_chat else '"text":""', self.finish_reason), len(pieces)

    def choice(self, said: str, finish_reason: str | None) -> str:
        members = ['"index":0', said, '"logprobs":null', f'"finish_reason":{json.dumps(finish_reason)}']
        return "{" + ",".join((*members, *filter(None, [self.choice_members]))) + "}"

    def chunk(self, asked: Asked, choices: str, usage: str | None) -> str:
        members = [*_identity(asked, self.model, ".chunk" if asked.is_chat else ""), f'"choices":{choices}']
        if self.members:
            members.insert(1, self.members)
        if usage is not None:
            members.append(f'"usage":{usage}')
        return "{" + (",\n" if self.multi_line else ",").join(members) + "}"

    def usage_of(self, completion_tokens: int) -> str:
        return usage_of(self.prompt_tokens, self.cached_tokens, completion_tokens, len(self.reasoning))


def _identity(asked: Asked, model: str | None, kind: str) -> list[str]:
    name = asked.json().get("model") if model is None else model
    object_ = "chat.completion" + kind if asked.is_chat else "text_completion"
    identity = "chatcmpl-123" if asked.is_chat else "cmpl-123"
    return [f'"id":"{identity}"', f'"object":"{object_}"', '"created":1767225600', f'"model":{json.dumps(name)}']


def usage_of(prompt: int, cached: int, completion: int, reasoning: int = 0) -> str:
    counted = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    details = {
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    return json.dumps(counted | details, separators=(",", ":"))


def whole(
    text: str = "".join(TEXTS),
    *,
    members: str = "",
    usage: str | None = None,
    framing: Framing = "length",
    encoding: Encoding | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> Behaviour:
    """A reply in one piece. Without `usage`: that of `Stream`."""

    def reply(asked: Asked) -> Iterator[Act]:
        said = json.dumps(text)
        spoken = f'"message":{{"role":"assistant","content":{said}}}' if asked.is_chat else f'"text":{said}'
        choice = f'{{"index":0,{spoken},"logprobs":null,"finish_reason":"stop"}}'
        parts = [*_identity(asked, None, ""), *filter(None, [members])]
        parts += [f'"choices":[{choice}]', f'"usage":{usage or usage_of(7, 2, len(TEXTS))}']
        content = ("{" + ",".join(parts) + "}").encode()
        described = (("content-type", "application/json"), *headers)
        yield from response([content], headers=described, framing=framing, encoding=encoding)

    return reply


def openai_like(stream: Stream | None = None) -> Behaviour:
    """Streams if the request says so, replies whole if not; 404 elsewhere."""
    streamed, in_one = stream or Stream(), whole()

    def reply(asked: Asked) -> Iterable[Act]:
        if not asked.path.endswith("/completions"):
            return refusal(404)(asked)
        return streamed(asked) if asked.json().get("stream") else in_one(asked)

    return reply


def error_text(
    message: str = "The upstream says no.", code: str | None = None, kind: str = "invalid_request_error"
) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def refusal(
    status: int,
    content: bytes | None = None,
    *,
    content_type: str = "application/json",
    headers: tuple[tuple[str, str], ...] = (),
) -> Behaviour:
    """Without `content`: OpenAI's error object, which names the status."""
    body = error_text(f"The upstream says {status}.").encode() if content is None else content
    return lambda asked: response(
        [body], status=status, headers=(("content-type", content_type), *headers), framing="length"
    )


def says(*acts: Act) -> Behaviour:
    """These acts, whatever was asked."""
    return lambda asked: acts
