"""A small application behind the HAProxy that Serve runs."""

import asyncio
from collections.abc import Iterator

import pytest
from starlette.types import Receive, Scope, Send

from serve_app.proxy.http10 import end_http10_bodies_by_closing
from tests.support.processes.haproxy import Proxy, running_app, running_proxy

PIECES = [b"data: %d\n\n" % number for number in range(3)]


async def small_app(scope: Scope, receive: Receive, send: Send) -> None:
    """/stream: a body of unknown length; /silent: no answer for a long time; the rest: 200."""
    if scope["path"] == "/silent":
        await asyncio.sleep(30)
    headers = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"the-app's")]
    pieces = PIECES if scope["path"] == "/stream" else [b"ok"]
    if scope["path"] != "/stream":
        headers.append((b"content-length", b"2"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="session")
def app_port() -> Iterator[int]:
    end_http10_bodies_by_closing()
    with running_app(small_app) as port:
        yield port


@pytest.fixture(scope="module")
def proxy(app_port: int) -> Iterator[Proxy]:
    with running_proxy({"ingress": app_port}) as running:
        yield running
