"""The real HAProxy under our configuration: what clients of any kind see of it."""

import contextlib
import os
import resource
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve_app.config.deploy import free_port
from serve_app.proxy.error_pages import HEADER_TIMEOUT_S
from tests.serve_app.proxy.conftest import PIECES
from tests.support.processes.haproxy import Proxy, running_proxy
from tests.support.waiting import eventually

REQUEST = b"GET /v1 HTTP/1.1\r\nhost: test\r\n\r\n"


def get(port: int, path: str = "/v1") -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=10)


def exchange(port: int, sent: bytes) -> bytes:
    """All that comes back until the connection is closed."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                received += piece
    return received


@contextlib.contextmanager
def silent(port: int, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Connections that send nothing; those that are refused are left out."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            with contextlib.suppress(ConnectionError):
                opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 10, (source, 0))))
        yield opened


def is_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed or reset it."""
    try:
        return connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def assert_in_shape(reply: httpx.Response, status: int, code: str) -> None:
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json"
    (error,) = reply.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, None)


def parsed(raw: bytes) -> httpx.Response:
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    pairs = [tuple(line.split(": ", 1)) for line in headers]
    return httpx.Response(int(status.split()[1]), headers=pairs, content=body)


def test_who_sends_nothing_or_too_slowly_is_let_go(proxy):
    def send_slowly(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for byte in REQUEST:
                client.sendall(bytes([byte]))
                time.sleep(1)

    with silent(proxy.port, 2) as (mute, slow):
        started = time.monotonic()
        threading.Thread(target=send_slowly, args=(slow,)).start()
        assert mute.recv(1000) == b""
        assert slow.recv(5000).startswith(b"HTTP/1.1 408 Request Time-out\r\n")
        assert HEADER_TIMEOUT_S - 1 < time.monotonic() - started < HEADER_TIMEOUT_S + 3


def test_one_address_cannot_take_the_connections_of_others(app_port):
    with (
        running_proxy({"ingress": app_port}, connections_per_source=50) as proxy,
        silent(proxy.port, 120, "127.0.0.2") as opened,
    ):
        eventually(lambda: len(opened) - sum(map(is_ended, opened)) <= 50, 3)
        assert get(proxy.port).status_code == 200


def test_it_starts_with_as_many_connections_as_the_limit_on_files_allows(app_port):
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running_proxy({"ingress": app_port}, maxconn=10_000_000) as proxy:
        assert get(proxy.port).status_code == 200
        assert f"maxconn {(files - 1000) // 2}\n" in Path(proxy.api.config_file_path).read_text()


def test_an_address_may_hold_half_of_all_connections_unless_told_otherwise(proxy):
    assert f"sc0_conn_cur gt {(4096 - 256) // 2}" in Path(proxy.api.config_file_path).read_text()


def test_a_full_proxy_refuses_requests_and_answers_probes(app_port):
    room = 1024 - 256
    with running_proxy({"ingress": app_port}, maxconn=1024, connections_per_source=0) as proxy:
        with silent(proxy.port, room - 20):
            reply = get(proxy.port)
            assert_in_shape(reply, 429, "overloaded")
            assert reply.headers["retry-after"] == "2"
            assert get(proxy.port, "/healthz").status_code == 200
        eventually(lambda: get(proxy.port).status_code == 200)


def test_probes_have_a_port_that_a_flood_of_the_other_does_not_fill(app_port):
    room = 1024 - 256
    with (
        running_proxy({"ingress": app_port}, maxconn=1024, connections_per_source=0) as proxy,
        silent(proxy.port, room + 100),
    ):
        started = time.monotonic()
        assert [get(proxy.health_port, path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        assert time.monotonic() - started < HEADER_TIMEOUT_S - 1


def test_the_port_for_probes_answers_nothing_else(proxy):
    assert_in_shape(get(proxy.health_port, "/v1/models"), 404, "not_found")


def test_without_an_ingress_the_answer_is_503_at_once(app_port):
    with running_proxy({"ingress": free_port()}) as proxy:
        for port, path in ((proxy.port, "/v1"), (proxy.port, "/readyz"), (proxy.health_port, "/readyz")):
            reply = get(port, path)
            assert_in_shape(reply, 503, "unavailable")
            assert reply.headers["retry-after"] == "2"


def test_a_route_without_any_server_is_503():
    with running_proxy({}) as proxy:
        for port in (proxy.port, proxy.health_port):
            assert_in_shape(get(port, "/readyz"), 503, "unavailable")


def test_few_files_are_shared_between_the_ports(app_port):
    with running_proxy({"ingress": app_port}, maxconn=16) as proxy:
        assert get(proxy.port).status_code == get(proxy.health_port, "/readyz").status_code == 200


def test_before_serve_has_named_a_route_the_answer_is_503(app_port):
    with running_proxy({}, has_routes=False) as proxy:
        for path in ("/v1/models", "/readyz", "/nope"):
            reply = get(proxy.port, path)
            assert_in_shape(reply, 503, "unavailable")
            assert reply.headers["retry-after"] == "2"
            assert reply.headers["x-request-id"]


def test_an_ingress_that_breaks_off_is_502():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept_and_close() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    request = connection.recv(5000)
                    if b"/-/healthz" in request or b"GET /healthz" in request:
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    connection.close()

        threading.Thread(target=accept_and_close, daemon=True).start()
        with running_proxy({"ingress": server.getsockname()[1]}) as proxy:
            assert_in_shape(get(proxy.port), 502, "unavailable")


@contextlib.contextmanager
def keeping_ingress(path: str, count: int) -> Iterator[socket.socket]:
    """An ingress that keeps its connections, and answers requests for the path `count` at a time. At the end it resets
    all of them, as a killed process does.
    """
    kept: list[socket.socket] = []
    together = threading.Barrier(count)
    wanted = f"GET {path} ".encode()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while request := connection.recv(5000):
                if request.startswith(wanted):
                    together.wait(10)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                kept.append(server.accept()[0])
                threading.Thread(target=answer, args=(kept[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RD)  # ends the wait of its thread, which holds the file
        connection.close()


@pytest.mark.parametrize("path", ["/v1", "/readyz"])
def test_when_an_ingress_dies_new_clients_get_an_answer_on_connections_that_others_left(path):
    count = 8
    request = f"GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:

        def ask(proxy: Proxy) -> list[socket.socket]:
            clients = [socket.create_connection(("127.0.0.1", proxy.port), 20) for _ in range(count)]
            for client in map(stack.enter_context, clients):
                client.sendall(request)
            return clients

        with keeping_ingress(path, count) as server:
            proxy = stack.enter_context(running_proxy({"ingress": server.getsockname()[1]}))
            assert {client.recv(12) for client in ask(proxy)} == {b"HTTP/1.1 200"}
            os.kill(proxy.api._proc.pid, signal.SIGSTOP)  # so that HAProxy meets the requests and the resets at once
            clients = ask(proxy)
        os.kill(proxy.api._proc.pid, signal.SIGCONT)
        assert {client.recv(12) for client in clients} <= {b"HTTP/1.1 502", b"HTTP/1.1 503"}


def test_headers_that_are_too_large_are_refused_in_the_one_shape(proxy):
    sent = b"GET /v1 HTTP/1.1\r\nhost: test\r\nx-long: " + b"x" * 20_000 + b"\r\n\r\n"
    assert_in_shape(parsed(exchange(proxy.port, sent)), 431, "headers_too_large")


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"POST /v1 HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"GET /v1 HTTP/1.1\r\nx-long: " + b"x" * 40_000 + b"\r\n\r\n",
    ],
    ids=["not HTTP", "two lengths", "huge headers"],
)
def test_what_is_no_request_is_400_in_haproxys_words(proxy, sent):
    """They are part of its HTTP/1 parser, and no configuration of 2.8 reaches them."""
    assert exchange(proxy.port, sent).startswith(b"HTTP/1.1 400 Bad request\r\n")


def test_an_http_1_0_client_gets_the_body_without_chunks(proxy):
    head, _, body = exchange(proxy.port, b"GET /stream HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body == b"".join(PIECES)


def test_an_http_1_0_client_gets_a_body_of_known_length_with_its_length(proxy):
    reply = parsed(exchange(proxy.port, b"GET /v1 HTTP/1.0\r\n\r\n"))
    assert (reply.headers["content-length"], reply.content) == ("2", b"ok")


def test_an_http_1_1_client_gets_the_body_in_chunks(proxy):
    reply = get(proxy.port, "/stream")
    assert reply.headers["transfer-encoding"] == "chunked"
    assert reply.content == b"".join(PIECES)


def test_a_request_id_of_the_service_is_kept(proxy):
    assert get(proxy.port).headers.get_list("x-request-id") == ["the-app's"]


def test_administration_is_open_to_nobody_else(proxy):
    listening = listeners(proxy.api._proc.pid)
    assert listening == {("127.0.0.1", port) for port in listening_ports(proxy)}
    assert stat.S_IMODE(os.stat(proxy.api.cfg.socket_path).st_mode) == 0o600


def listening_ports(proxy: Proxy) -> list[int]:
    return [proxy.port, proxy.health_port, proxy.stats_port, proxy.metrics_port]


def listeners(pid: int) -> set[tuple[str, int]]:
    """Addresses on which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and f"socket:[{rest[5]}]" in inodes:
            host, port = local.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def test_when_haproxy_is_killed_it_is_back_with_its_routes(app_port):
    with running_proxy({"ingress": app_port}) as proxy:
        killed = proxy.api._proc.pid
        os.kill(killed, signal.SIGKILL)
        died_at = time.monotonic()
        statuses = []

        def is_back() -> bool:
            with contextlib.suppress(httpx.TransportError):
                statuses.append(get(proxy.port).status_code)
            return bool(statuses)

        eventually(is_back, 10)
        assert time.monotonic() - died_at < 5
        assert statuses == [200]
        eventually(lambda: proxy.api._proc.pid != killed)


def test_a_reload_is_not_taken_for_a_death(app_port):
    with running_proxy({"ingress": app_port}) as proxy:
        proxy.reload()
        pid = proxy.api._proc.pid
        assert get(proxy.port).status_code == 200
        eventually(lambda: proxy.api.count_haproxy_processes() == 1)
        assert proxy.api._proc.pid == pid


def test_the_next_manager_takes_over_what_the_last_one_left_running_with_its_routes(app_port):
    with running_proxy({"ingress": app_port}, restarts=False) as proxy:
        left = proxy.api._proc.pid
        next_one = proxy.succeed()
        try:
            assert get(proxy.port).status_code == 200
            assert get(proxy.health_port, "/readyz").status_code == 200
            eventually(lambda: proxy.api.count_haproxy_processes() == 1)
            assert next_one._proc.pid != left
        finally:
            proxy.stop(next_one)
