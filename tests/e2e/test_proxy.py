"""The HAProxy of a service that runs as users run it: `python -m serve_app up` with config.yaml.

What HAProxy does to single requests: `tests/serve_app/proxy`.
"""

import contextlib
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.config.deploy import free_port
from tests.support.processes.demo_config import text_config
from tests.support.processes.running_up import KEY, MODEL, Up, processes, title, write
from tests.support.waiting import eventually

MAX_REQUESTS = 4
STREAM = {"model": MODEL, "prompt": "x", "max_tokens": 300, "stream": True}
HEADERS = {"authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Running:
    """The service and its two ports."""

    up: Up
    port: int
    health_port: int

    def get(self, path: str, *, port: int | None = None) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{port or self.port}{path}", timeout=10)

    def complete(self, headers: dict[str, str] = HEADERS) -> httpx.Response:
        body = {**STREAM, "max_tokens": 2, "stream": False}
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, headers=headers, timeout=10)

    def haproxies(self) -> list[int]:
        return [pid for pid in processes(self.up) if "haproxy -db" in title(pid)]


@pytest.fixture(scope="module")
def running(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    raw = text_config()
    api, model = raw["applications"]
    api["args"]["max_ongoing_requests"] = MAX_REQUESTS
    api["deployments"][0]["user_config"]["models"][0]["source"] = model_folder
    fake = {"vocab_size": 512, "step_s": 0.02, "reply_tokens": None}
    model["args"] = {"id": MODEL, "source": model_folder, "engine": "fake", "fake": fake, "cpus_per_replica": 0.1}
    port, health_port = free_port(), free_port()
    raw["controller_options"]["runtime_env"]["env_vars"]["ROUNDHOUSE_HEALTH_PORT"] = str(health_port)
    with Up(write(raw, tmp_path_factory.mktemp("proxy")), "--port", str(port)) as up:
        up.read_until("probes: ")
        assert up.printed[-1] == f"  probes: http://127.0.0.1:{health_port}/readyz\n"
        yield Running(up, port, health_port)


@contextlib.contextmanager
def connections(port: int, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(count)]
        for connection in opened:
            connection.sendall(sent)
        yield opened


def post(version: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "host: test",
        f"authorization: Bearer {KEY}",
        "content-type: application/json",
        f"content-length: {len(content)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


def test_probes_are_answered_while_thousands_of_connections_send_nothing_and_those_are_let_go(running):
    with connections(running.port, 4200) as opened:
        for port in (running.port, running.health_port):
            assert [running.get(path, port=port).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        assert running.complete().status_code == 200
        assert {connection.recv(1) for connection in opened} == {b""}


def test_requests_past_the_bound_are_refused_at_once_and_probes_do_not_wait_behind_them(running):
    with connections(running.port, MAX_REQUESTS, post("1.1", STREAM)) as streams:
        assert all(stream.recv(12) == b"HTTP/1.1 200" for stream in streams)
        started = time.monotonic()
        refused = running.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"].keys() == {"message", "type", "param", "code"}
        assert refused.json()["error"]["code"] == "overloaded"
        assert running.complete({"authorization": "Bearer wrong"}).status_code == 401
        assert [running.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        assert time.monotonic() - started < 3
    eventually(lambda: running.complete().status_code == 200)


def test_a_stream_to_an_http_1_0_client_has_no_chunk_sizes(running):
    received = b""
    with connections(running.port, 1, post("1.0", {**STREAM, "max_tokens": 5})) as (client,):
        while piece := client.recv(65536):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    lines = [line for line in body.decode().split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_haproxy_listens_on_loopback_alone_and_its_socket_is_the_owners(running):
    (proxy,) = running.haproxies()
    config = Path(title(proxy).partition("-f ")[2].split()[0])
    lines = [line.split() for line in config.read_text().splitlines()]
    binds = [line[1] for line in lines if line[:1] == ["bind"]]
    assert len(binds) == 4
    assert all(bind.startswith("127.0.0.1:") for bind in binds)
    (admin,) = [Path(line[2]) for line in lines if line[:2] == ["stats", "socket"]]
    assert stat.S_IMODE(admin.stat().st_mode) == 0o600


def test_when_the_ingress_dies_refusals_are_in_the_one_shape_until_the_next_is_up(running):
    (ingress,) = [pid for pid in processes(running.up) if "ServeReplica:api:ingress" in title(pid)]
    os.kill(ingress, signal.SIGKILL)
    statuses: list[int] = []
    deadline = time.monotonic() + 60
    while statuses[-1:] != [200]:
        assert time.monotonic() < deadline
        reply = running.get("/readyz")
        statuses.append(reply.status_code)
        if reply.status_code != 200:
            assert reply.headers["content-type"] == "application/json"
            assert reply.status_code in (502, 503)
            assert int(reply.headers["retry-after"]) >= 1
    assert 503 in statuses


def test_when_haproxy_is_killed_the_next_one_has_the_routes(running):
    eventually(lambda: running.get("/readyz").status_code == 200, 60)
    (killed,) = running.haproxies()
    os.kill(killed, signal.SIGKILL)
    died_at = time.monotonic()
    replies: list[httpx.Response] = []

    def is_back() -> bool:
        with contextlib.suppress(httpx.TransportError):
            replies.append(running.get("/readyz"))
        return bool(replies) and replies[-1].status_code == 200

    eventually(is_back, 20)
    assert time.monotonic() - died_at < 10
    for reply in replies[:-1]:
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        assert reply.json()["error"]["code"] == "unavailable"
    assert running.haproxies() != [killed]


def test_when_the_manager_of_haproxy_is_killed_there_is_no_404_and_the_service_comes_back(running):
    (manager,) = [pid for pid in processes(running.up) if "HAProxyManager" in title(pid)]
    os.kill(manager, signal.SIGKILL)
    eventually(
        lambda: [pid for pid in processes(running.up) if "HAProxyManager" in title(pid)] not in ([], [manager]), 60
    )
    deadline = time.monotonic() + 60
    answers = 0
    while answers < 100:
        assert time.monotonic() < deadline
        with contextlib.suppress(httpx.TransportError):
            reply = running.get("/readyz")
            assert reply.status_code in (200, 503)
            assert reply.status_code == 200 or reply.headers["retry-after"] == "2"
            answers = answers + 1 if reply.status_code == 200 else 0
