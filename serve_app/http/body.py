"""The request body, from bytes to a JSON object.

Strict: UTF-8 without lone surrogates, no NaN or Infinity, nesting up to 200, nothing after the value. Of a key that is
repeated in an object the last one wins, as in most JSON readers. Brackets are counted before anything is read: each
can be an object of its own, which takes thirty times as much memory, and no text that fits a context has so many.
"""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic_core import from_json
from starlette.types import Receive

from serve_app.api.ticket import JsonObject
from serve_app.config.service import LimitsConfig
from serve_app.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from serve_app.http.exchange import ClientLeft, Exchange
from serve_app.workers import Workers

_MAX_OPENINGS = 1_000_000


async def read_json(exchange: Exchange, limits: LimitsConfig, workers: Workers) -> JsonObject:
    """Read and parse the body.

    Raises `UnsupportedMediaType`, `BodyTooLarge`, `InvalidRequest`, or `ClientLeft`.
    """
    check_media_type(exchange)
    declared = exchange.header(b"content-length") or "0"
    if declared.isdecimal() and int(declared[:19]) > limits.body_bytes:
        raise _too_large(limits, int(declared[:19]))
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            content = await _read(exchange.receive, limits)
    except TimeoutError as exc:
        raise InvalidRequest(f"The request body did not arrive within {limits.body_timeout_s:g} s.") from exc
    upgrade = exchange.header(b"upgrade")
    if not content and upgrade is not None:  # the server stops reading there: curl --http2 and Java's client try it
        raise InvalidRequest(
            f"The request body was lost with an attempt to upgrade the connection; send no Upgrade, got {upgrade!r}."
        )
    exchange.body_bytes = len(content)
    return await workers.run(len(content) / 10, parse_object, content)


def check_media_type(exchange: Exchange) -> None:
    """Raises `UnsupportedMediaType` unless the body is declared as plain JSON."""
    declared = exchange.header(b"content-type")
    kind, *parameters = (declared or "").split(";")
    if kind.strip().lower() != "application/json":
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {declared!r}.")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8"):
            raise UnsupportedMediaType(f"The charset of application/json must be utf-8, got {value.strip()!r}.")
    for coding in exchange.headers(b"content-encoding"):  # they add up
        if coding.strip().lower() not in ("", "identity"):
            raise UnsupportedMediaType(f"Content-Encoding must be identity, got {coding!r}.")


def parse_object(content: bytes | bytearray) -> JsonObject:
    """Raises `InvalidRequest` that says where the JSON is at fault."""
    openings = content.count(b"[") + content.count(b"{")
    if openings > _MAX_OPENINGS:
        raise InvalidRequest(
            f"The request body must have at most {_MAX_OPENINGS} opening brackets and braces, got {openings}."
        )
    try:
        with _without_collections():
            value = from_json(bytes(content), allow_inf_nan=False)
    except ValueError as exc:
        raise InvalidRequest(f"The request body is not valid JSON: {exc}.") from exc
    if not isinstance(value, dict):
        raise InvalidRequest(f"The request body must be a JSON object, got {_KINDS.get(type(value), 'a value')}.")
    return value


@contextmanager
def _without_collections() -> Iterator[None]:
    """Making many lists sets the garbage collector off again and again, while nobody else can run: a million took 2.6 s
    instead of 0.1 s. Nothing of a JSON value is garbage yet.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def _read(receive: Receive, limits: LimitsConfig) -> bytearray:
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        content += message.get("body", b"")
        if len(content) > limits.body_bytes:
            raise _too_large(limits, len(content))
        if not message.get("more_body", False):
            return content


def _too_large(limits: LimitsConfig, size: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body must have at most {limits.body_bytes} bytes, got {size}.")


_KINDS = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}
