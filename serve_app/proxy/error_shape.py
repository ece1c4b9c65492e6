"""Converts Serve's own errors, which are plain text, to the service's error format."""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.base.errors import HttpError
from serve_app.proxy.error_pages import content_of, page_of

_REPLACED = (b"content-type", b"content-length")


class ErrorShape:
    """ASGI middleware. Replaces the body of an error that is plain text; the service's own errors are JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error: HttpError | None = None

        def send_in_shape(message: Message) -> Awaitable[None]:
            nonlocal error
            if message["type"] == "http.response.start" and _is_plain_error(message):
                error = page_of(message["status"])
                message = {**message, "headers": _headers(message, error)}
            elif message["type"] == "http.response.body" and error is not None:
                is_last = not message.get("more_body", False)
                message = {**message, "body": content_of(error) if is_last else b""}
            return send(message)

        await self._app(scope, receive, send_in_shape)


def _is_plain_error(message: Message) -> bool:
    if message["status"] < 400:
        return False
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/plain") for name, value in message["headers"]
    )


def _headers(message: Message, error: HttpError) -> list[tuple[bytes, bytes]]:
    ours = {
        "content-type": "application/json",
        "content-length": str(len(content_of(error))),
        **error.headers,
    }
    replaced = {*_REPLACED, *(name.encode() for name in error.headers)}
    kept = [(name, value) for name, value in message["headers"] if name.lower() not in replaced]
    return [*kept, *((name.encode(), value.encode()) for name, value in ours.items())]
