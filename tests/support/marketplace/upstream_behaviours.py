"""The named behaviours of the stand-in upstream, for tests, its command line and its URLs."""

import json
from collections.abc import Iterable

from tests.support.marketplace.upstream_replies import (
    TEXTS,
    Act,
    Asked,
    Behaviour,
    Close,
    Encoding,
    Forever,
    Hang,
    Reset,
    Stream,
    error_text,
    head,
    openai_like,
    refusal,
    says,
    whole,
)

PRIVATE = "http://169.254.169.254/latest/meta-data"
HTML = b"<!DOCTYPE html><html><head><title>Oops</title></head><body>Something went wrong.</body></html>"


def echo_in_error(status: int) -> Behaviour:
    """The request's authorization, in the message of an error and in a header."""

    def reply(asked: Asked) -> Iterable[Act]:
        key = asked.header("authorization") or "no key"
        return refusal(status, error_text(f"Bad key: {key!r}").encode(), headers=(("x-echo", key),))(asked)

    return reply


def echo_in_events(asked: Asked) -> Iterable[Act]:
    """The request's authorization as text, in an unknown field, and in an error in the middle of the stream."""
    key = asked.header("authorization") or "no key"
    token = key.removeprefix("Bearer ")
    return Stream(
        texts=(f" {key}", *TEXTS),
        members=f'"x_key":{json.dumps(token)}',
        headers=(("x-echo", key), ("set-cookie", f"key={token}")),
        until=3,
        then=(error_text(f"The key {token} ran out.", kind="server_error"),),
    )(asked)


def closes_on_reuse(asked: Asked) -> Iterable[Act]:
    """A good reply to a connection's first request; its second ends the connection, as of a server that had given it
    up when the request came.
    """
    return Stream()(asked) if asked.turn == 1 else (Close(),)


def for_ever(content: bytes, *, encoding: Encoding | None = None) -> Behaviour:
    """A stream that begins well and goes on with the same bytes."""
    return Stream(until=1, then=(Forever(content),), encoding=encoding)


LARGE = "x" * 1_000_000
COMMENTS = Forever(b": ping\n\n", 0.02)
STREAM_HEAD = head(200, (("content-type", "text/event-stream"), ("transfer-encoding", "chunked")))

BEHAVIOURS: dict[str, Behaviour] = {
    "normal": openai_like(),
    "whole": whole(),
    # usage and the end
    "usage-beside-last": Stream(usage="beside_last"),
    "usage-with-text": Stream(usage="beside_last", finish="with_text"),
    "usage-every": Stream(usage="every"),
    "usage-every-but-own": Stream(usage="every_but_own"),
    "usage-never": Stream(usage="never"),
    "usage-unasked": Stream(usage_unasked=True),
    "finish-with-text": Stream(finish="with_text"),
    "no-finish": Stream(finish="never"),
    "no-done": Stream(done=False),
    "reasoning": Stream(reasoning=(" hm", " so")),
    # server-sent events
    "comments": Stream(comment=b"OPENROUTER PROCESSING"),
    "crlf": Stream(line_end=b"\r\n"),
    "cr": Stream(line_end=b"\r"),
    "bom": Stream(byte_order_mark=True),
    "multi-line": Stream(multi_line=True),
    "no-space": Stream(space=b""),
    "fields": Stream(fields=True),
    "bytewise": Stream(piece_bytes=1),
    "unknown-fields": Stream(members='"x_cost":0.10,"x_big":12345678901234567890123', choice_members='"x_seen":true'),
    "large-event": Stream(texts=(LARGE, " end")),
    "no-length": Stream(framing="close"),
    # errors and cuts
    "error-first": Stream(until=0, then=(error_text("Overloaded.", kind="server_error"),)),
    "error-mid": Stream(until=2, then=(error_text("The device is gone.", kind="server_error"),)),
    "empty": Stream(until=0),
    "done-only": Stream(until=0, then=("[DONE]",)),
    "not-json": Stream(until=1, then=("{not json",)),
    "cut": Stream(until=2, then=(Close(),)),
    "cut-no-length": Stream(until=2, framing="close"),
    "cut-in-event": Stream(until=2, then=(b'data: {"id":"cmpl', Close())),
    "reset": Stream(until=2, then=(Reset(),)),
    "cut-at-once": says(Close()),
    "reset-at-once": says(Reset()),
    "cut-after-head": says(STREAM_HEAD, Close()),
    "closes-after": lambda asked: (*Stream()(asked), Close()),
    "closes-on-reuse": closes_on_reuse,
    # time; what waits goes on with `release`
    "never-answers": says(Hang()),
    "slow-head": Stream(wait_head=True),
    "half-a-head": says(b"HTTP/1.1 200 OK\r\ncontent-ty", Hang()),
    "slow-first-byte": Stream(wait_before=(0,)),
    "stall": Stream(wait_before=(2,)),
    "hang": Stream(until=2, then=(Hang(),)),
    "comments-first": Stream(until=0, then=(COMMENTS,)),
    "comments-for-ever": Stream(until=2, then=(COMMENTS,)),
    "drip": Stream(until=1, then=(b"data: ", Forever(b" ", 0.02))),
    "paced": openai_like(Stream(texts=(" a",) * 200, pace_s=0.05)),
    # too much
    "endless-event": Stream(until=1, then=(b"data: ", Forever(b"a" * 65536))),
    "endless-stream": for_ever(Stream().event('{"choices":[{"index":0,"text":" a"}]}') * 100),
    "endless-headers": says(b"HTTP/1.1 200 OK\r\n", Forever(b"x-more: " + b"a" * 1000 + b"\r\n")),
    "long-header": says(b"HTTP/1.1 200 OK\r\nx-long: ", Forever(b"a" * 65536)),
    "large-error": refusal(400, b'{"error":{"message":"' + b"a" * 8_000_000 + b'"}}'),
    # compression
    "gzip": Stream(encoding="gzip"),
    "deflate": Stream(encoding="deflate"),
    "br": Stream(encoding="br"),
    "gzip-whole": whole(encoding="gzip"),
    "gzip-lies": Stream(headers=(("content-encoding", "gzip"),)),
    "gzip-bomb": Stream(until=1, then=(b"data: ", Forever(b"a" * (1 << 20))), encoding="gzip"),
    # pages and statuses
    "html-200": refusal(200, HTML, content_type="text/html"),
    "html-404": refusal(404, HTML, content_type="text/html"),
    "html-502": refusal(502, HTML, content_type="text/html"),
    "429-retry-after": refusal(429, headers=(("retry-after", "7"),)),
    "429-retry-after-years": refusal(429, headers=(("retry-after", "999999999"),)),
    "503-retry-after": refusal(503, headers=(("retry-after", "7"),)),
    "detail": refusal(422, b'{"detail":[{"loc":["body","seed"],"msg":"must be an int","type":"int"}]}'),
    "vllm-error": refusal(400, b'{"object":"error","message":"too long","type":"BadRequestError","code":400}'),
    "text-error": refusal(400, b"no", content_type="text/plain"),
    "empty-error": refusal(400, b""),
    "not-utf8-error": refusal(400, b'{"error":{"message":"\xff\xfe"}}'),
    # the key
    "echo-400": echo_in_error(400),
    "echo-401": echo_in_error(401),
    "echo-500": echo_in_error(500),
    "echo-events": echo_in_events,
}
for _status in (400, 401, 402, 403, 404, 405, 408, 409, 413, 415, 422, 429, 500, 502, 503, 504):
    BEHAVIOURS[str(_status)] = refusal(_status)
for _status in (301, 302, 303, 307, 308):
    BEHAVIOURS[str(_status)] = refusal(_status, b"", headers=(("location", PRIVATE),))
