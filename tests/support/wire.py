"""Requests and responses at the level of bytes, and the one error shape."""

import socket
from typing import Any

from tests.support.harness import KEY, RunningEdge


def error(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> object:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def exchange(edge: RunningEdge, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """One request over a raw socket, and all that comes back until the server closes."""
    with edge.raw() as connection:
        connection.sendall(request)
        return read_response(connection)


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(status.split()[1]), headers, body


def post_head(path: str = "/v1/completions", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {KEY}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def refused(response: Any, status: int = 400) -> tuple[str, str | None]:
    """Message and param of a refusal, after checking all the rest of it."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert body["error"]["type"] == "invalid_request_error"
    return body["error"]["message"], body["error"]["param"]


def named(message: str) -> str:
    """The path that most messages begin with."""
    return message.split(" ", 1)[0]
