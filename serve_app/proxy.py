"""What Serve's HTTP servers do to requests before anything else; named by an environment variable in config.yaml."""

from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Serve obeys these from anybody: the one cuts a request off without a final event, the other keeps a generation
# running for a client that has gone.
_SERVES_OWN = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
_REQUEST_ID = b"x-request-id"


class EdgeHeaders:
    """Takes the headers from requests by which any client could steer Serve itself, and the second request id that
    Serve adds to every response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _with_one_id(message["headers"])
            await send(message)

        kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _SERVES_OWN]
        await self._app({**scope, "headers": kept}, receive, send_one_id)


def _with_one_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Of several the first: the service's own. Serve's is appended, and may be anything."""
    kept = []
    has_id = False
    for name, value in headers:
        is_id = name.lower() == _REQUEST_ID
        if not (is_id and has_id):
            kept.append((name, value))
        has_id = has_id or is_id
    return kept


def middlewares() -> list[Middleware]:
    """`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    return [Middleware(EdgeHeaders)]
