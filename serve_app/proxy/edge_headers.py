"""ASGI middleware that removes headers in Serve's HTTP servers, before any other code. An environment variable in
config.yaml names it.
"""

import re
from collections.abc import Awaitable, Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.proxy.error_shape import ErrorShape
from serve_app.proxy.http10 import end_http10_bodies_by_closing

# Serve obeys these headers from any client. The first ends a request without a final event. The second keeps a
# generation running after its client disconnected. The others choose an ingress. In some of them Serve treats "-" and
# "_" as equal. It answers a value that is not UTF-8 with 500 in plain text.
_SERVES_OWN = re.compile(
    rb"x-request-timeout-seconds|x-request-disconnect-disabled|serve-multiplexed-model-id|x-session-id|x-serve-router-.*"
)
_REQUEST_ID = b"x-request-id"
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # `middleware.Identify` decides which of these a response repeats


class EdgeHeaders:
    """Removes request headers by which a client could control Serve itself, and the second request id that Serve adds
    to every response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def send_one_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = _with_one_id(message["headers"])
            return send(message)

        kept = [(name, value) for name, value in scope["headers"] if _is_for_us(name.lower(), value)]
        await self._app({**scope, "headers": kept}, receive, send_one_id)


def _is_for_us(name: bytes, value: bytes) -> bool:
    if name == _REQUEST_ID:
        return _SANE_ID.fullmatch(value) is not None
    return not _SERVES_OWN.fullmatch(name.replace(b"_", b"-"))


def _with_one_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Keep the first of several request ids, the service's own. Serve appends another one, which can have any value."""
    kept = []
    has_id = False
    for name, value in headers:
        is_id = name.lower() == _REQUEST_ID
        if not (is_id and has_id):
            kept.append((name, value))
        has_id = has_id or is_id
    return kept


def middlewares() -> list[Middleware]:
    """`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`; Serve calls this before it starts an HTTP server."""
    end_http10_bodies_by_closing()
    return [Middleware(EdgeHeaders), Middleware(ErrorShape)]
