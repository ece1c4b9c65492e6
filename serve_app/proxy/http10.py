"""Replies to HTTP/1.0 clients, which do not support chunks: a body of unknown length ends with the connection."""

from collections.abc import Coroutine, Mapping
from typing import Any

from uvicorn.protocols.http import httptools_impl


def end_http10_bodies_by_closing() -> None:
    """Change how uvicorn's httptools servers of this process reply; its h11 servers do so already."""
    httptools_impl.RequestResponseCycle = Http10Cycle  # type: ignore[misc]  # Serve has no option for the protocol


class Http10Cycle(httptools_impl.RequestResponseCycle):
    """uvicorn 0.54 chunks every body without a length, whatever the version of the request."""

    _ends_by_closing = False

    def send(self, message: Mapping[str, Any]) -> Coroutine[Any, Any, None]:
        if self.scope["http_version"] == "1.0":
            return self._send_to_old(message)
        return super().send(message)  # type: ignore[arg-type]

    async def _send_to_old(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._ends_by_closing = not _has_length(message)
            if self._ends_by_closing:
                self.chunked_encoding = False
                self.expected_content_length = _NO_LENGTH
        elif self._ends_by_closing and not message.get("more_body", False):
            await super().send({**message, "more_body": True})  # type: ignore[arg-type]
            self.expected_content_length = 0
            message = {"type": "http.response.body", "body": b""}
        await super().send(message)  # type: ignore[arg-type]


_NO_LENGTH = 1 << 62  # uvicorn counts down from it, and closes the connection at the end as HTTP/1.0 requires


def _has_length(message: Mapping[str, Any]) -> bool:
    return any(name.lower() == b"content-length" for name, _ in message["headers"])
