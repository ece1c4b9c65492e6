"""Clients that close their connections at any moment: nothing of their requests may be left."""

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import Json, Service
from tests.e2e.service_config import KEY, MODEL, PLAIN_PREFIX
from tests.support.waiting import eventually

CLIENTS = 200


def request_bytes(port: int, prefix: str, body: Json, headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {prefix}/v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n{headers}\r\n"
    )
    return head.encode() + content


def body_of(*, stream: bool) -> Json:
    return {"model": MODEL, "prompt": "x", "max_tokens": 3000, "stream": stream}


def hang_up_at_random(port: int, prefix: str, body: Json, chance: random.Random) -> None:
    """Send some or all of a request, read some or nothing of the answer, and hang up."""
    message = request_bytes(port, prefix, body)
    if chance.random() < 0.1:
        message = message[: chance.randrange(1, len(message))]
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(message)
        client.settimeout(chance.choice([0.0001, 0.01, 0.05, 0.2, 0.5]))
        for _ in range(chance.randrange(4)):
            try:
                if not client.recv(chance.choice([1, 100, 10_000])):
                    return
            except TimeoutError:
                return


def come_and_go(service: Service, prefix: str, seed: int) -> None:
    chance = random.Random(seed)
    hang_up_at_random(service.port, prefix, body_of(stream=chance.random() < 0.7), chance)


@pytest.mark.parametrize("prefix", ["", PLAIN_PREFIX], ids=["channel", "serve"])
def test_200_clients_that_leave_at_random_points_leave_nothing_behind(service, prefix):
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda seed: come_and_go(service, prefix, seed), range(CLIENTS)))
    eventually(service.is_idle, 10)
    assert [engine["streams"] for engine in service.engines("m")] == [0]
    sdk = service.sdk(prefix)
    assert sdk.completions.create(model=MODEL, prompt="x", max_tokens=3).usage.completion_tokens > 0


@pytest.mark.parametrize("header", ["x-request-disconnect-disabled: ?1", "x-request-timeout-seconds: 0.2"])
def test_a_client_cannot_steer_serve_by_its_headers(service, header):
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.sendall(request_bytes(service.port, "", body_of(stream=True), f"{header}\r\n"))
        received = b""
        while received.count(b"data: ") < 40:  # of 10 ms each: the timeout would have struck
            chunk = client.recv(4096)
            assert chunk, received
            received += chunk
        assert not service.is_idle()
    eventually(service.is_idle, 5)
