"""Reads the request body as bytes."""

import asyncio
from collections.abc import Callable

from starlette.types import Receive

from serve_app.base.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from serve_app.config.service import LimitsConfig
from serve_app.http.exchange import ClientLeft, Exchange


async def read_body(exchange: Exchange, limits: LimitsConfig, hold: Callable[[int], None]) -> bytes:
    """`hold` is called with the number of bytes before they are stored. Raises what it raises, and
    `UnsupportedMediaType`, `BodyTooLarge`, `InvalidRequest`, or `ClientLeft`.
    """
    check_media_type(exchange)
    length = exchange.header(b"content-length") or "0"
    declared = int(length[:19]) if length.isdecimal() else 0
    if declared > limits.body_bytes:
        raise _too_large(limits, declared)
    hold(declared)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            content = await _read(exchange.receive, limits, declared, hold)
    except TimeoutError as exc:
        raise InvalidRequest(f"The request body did not arrive within {limits.body_timeout_s:g} s.") from exc
    upgrade = exchange.header(b"upgrade")
    # The server stops reading at an upgrade, which curl --http2 and Java's client attempt.
    if not content and upgrade is not None:
        raise InvalidRequest(
            f"The request body was lost with an attempt to upgrade the connection; send no Upgrade, got {upgrade!r}."
        )
    return content


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


async def _read(receive: Receive, limits: LimitsConfig, held: int, hold: Callable[[int], None]) -> bytes:
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        content += message.get("body", b"")
        if len(content) > limits.body_bytes:
            raise _too_large(limits, len(content))
        if len(content) > held:
            held = len(content)
            hold(held)
        if not message.get("more_body", False):
            return bytes(content)


def _too_large(limits: LimitsConfig, size: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body must have at most {limits.body_bytes} bytes, got {size}.")
