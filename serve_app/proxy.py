"""What Serve's HTTP servers do to requests before anything else; named by an environment variable in config.yaml."""

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Serve obeys these from anybody: the one cuts a request off without a final event, the other keeps a generation
# running for a client that has gone.
_SERVES_OWN = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
_REQUEST_ID = "x-request-id"


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
                headers = MutableHeaders(scope=message)
                ids = headers.getlist(_REQUEST_ID)
                if len(ids) > 1:
                    headers[_REQUEST_ID] = ids[0]  # the service's own; Serve's is appended, and may be anything
            await send(message)

        kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _SERVES_OWN]
        await self._app({**scope, "headers": kept}, receive, send_one_id)


def middlewares() -> list[Middleware]:
    """`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    return [Middleware(EdgeHeaders)]
