"""Headers that Ray Serve looks at itself: nobody outside steers it by them, or brings it down."""

import json
import socket

import pytest

from tests.e2e.service_config import KEY, MODEL, PLAIN_PREFIX

STEERING = [
    "serve_multiplexed_model_id",
    "Serve-Multiplexed-Model-Id",
    "x-session-id",
    "X_Session_Id",
    "x-serve-router-replica",
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "x-request-id",
    "x-anything-else",
]


def answer(port: int, prefix: str, header: bytes) -> tuple[int, dict[str, str], bytes]:
    """One short completion with a further header."""
    content = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3}).encode()
    lines = [
        f"POST {prefix}/v1/completions HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        f"authorization: Bearer {KEY}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
    ]
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall("\r\n".join(lines).encode() + b"\r\n" + header + b"\r\n\r\n" + content)
        while piece := client.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    status, *others = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in others), body


@pytest.mark.parametrize("prefix", ["", PLAIN_PREFIX], ids=["channel", "serve"])
@pytest.mark.parametrize("value", [b"0.001", b"?1", b"no/such", b"\xff\xfe", b""])
def test_headers_that_serve_looks_at_change_nothing_whatever_they_say(service, prefix, value):
    for name in STEERING:
        status, headers, body = answer(service.port, prefix, name.encode() + b": " + value)
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3), (name, body)
        assert headers["x-request-id"]
