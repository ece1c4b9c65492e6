"""A stand-in for a remote OpenAI-compatible upstream: a real server that records what it got and behaves as it is told.

    with running_upstream() as upstream:            # on a thread, with a loop of its own
        upstream.behaves(Stream(until=2, then=(Reset(),)))
        ...
        assert upstream.received[0].header("authorization") == "Bearer its-key"

    with upstream_process("paced") as process:      # a process of its own, which can be killed
        ...

    python -m tests.support.marketplace.upstream --port 9000 --behaviour paced

Its URL takes a behaviour for one request: `http://127.0.0.1:9000/as/html-502/v1`. `upstream_behaviours.py` has the
names, `upstream_replies.py` makes other behaviours.

Under `/control/` it says what it received and takes the switches of the process: see `Control`.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.marketplace.upstream_behaviours import BEHAVIOURS
from tests.support.marketplace.upstream_replies import (
    Act,
    Asked,
    Behaviour,
    Close,
    Forever,
    Hang,
    Pause,
    Reset,
    Wait,
    refusal,
    response,
)
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
HEAD_END = b"\r\n\r\n"
# The kernel takes little, so that a client that does not read is soon felt here.
SEND_BUFFER_BYTES = 1 << 16


@dataclass(slots=True)
class Received(Asked):
    """A request and what became of it. Times are of `time.monotonic`."""

    at: float = field(default_factory=time.monotonic)
    sent_bytes: int = 0  # taken over by the kernel
    waits: int = 0  # how many `Wait` it came to
    ended_at: float | None = None  # when all of the reply was sent
    left_at: float | None = None  # when its client left before that
    left: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)  # ended, left or cut

    def summary(self) -> dict[str, Any]:
        """For `/control/received`."""
        shown = {
            name: getattr(self, name) for name in ("method", "path", "headers", "connection", "turn", "sent_bytes")
        }
        body = self.body.decode(errors="replace")
        return shown | {"body": body, "ended": self.ended_at is not None, "left": self.left_at is not None}


class Upstream:
    """The server. Everything public may be used from the test's thread."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.received: list[Received] = []
        self.connections = 0  # accepted so far
        self.open_connections = 0
        self.failures: list[BaseException] = []  # of behaviours, which are faults of the test
        self.tls = tls
        self.port = 0
        self._usual: Behaviour = BEHAVIOURS["normal"]
        self._next: deque[Behaviour] = deque()
        self._loop = asyncio.get_running_loop()
        self._permits = asyncio.Semaphore(0)
        self._server: asyncio.Server | None = None
        self._held: set[_Connection] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/v1"

    def url_as(self, name: str) -> str:
        """The URL under which it always shows one behaviour of `BEHAVIOURS`."""
        assert name in BEHAVIOURS, name
        return self.url.removesuffix("v1") + f"as/{name}/v1"

    def behaves(self, behaviour: Behaviour | str) -> None:
        """From now on, at the plain URL."""
        self._usual = BEHAVIOURS[behaviour] if isinstance(behaviour, str) else behaviour

    def behaves_next(self, *behaviours: Behaviour | str) -> None:
        """For the next requests at the plain URL, one each; afterwards as before."""
        self._next.extend(BEHAVIOURS[each] if isinstance(each, str) else each for each in behaviours)

    def release(self, times: int = 1) -> None:
        """Let as many waits go on, those of now or later ones."""
        for _ in range(times):
            self._loop.call_soon_threadsafe(self._permits.release)

    def wait_for(self, requests: int) -> list[Received]:
        """Until so many came."""
        eventually(lambda: len(self.received) >= requests)
        return self.received

    def go_down(self) -> None:
        """Close the port and every connection: what comes is refused."""
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result(30)

    def come_back(self) -> None:
        """Listen on the same port again."""
        asyncio.run_coroutine_threadsafe(self.start(self.port), self._loop).result(30)

    async def start(self, port: int = 0) -> None:
        listening = socket.create_server(("127.0.0.1", port), backlog=1024)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.port = listening.getsockname()[1]
        self._server = await self._loop.create_server(lambda: _Connection(self), sock=listening, ssl=self.tls)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._held):
            connection.abort()
        while self._held:  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.001)

    def opened(self, connection: "_Connection") -> int:
        self._held.add(connection)
        self.connections += 1
        self.open_connections += 1
        return self.connections

    def closed(self, connection: "_Connection") -> None:
        self._held.discard(connection)
        self.open_connections -= 1

    async def released(self, received: Received) -> None:
        received.waits += 1
        await self._permits.acquire()

    def behaviour_for(self, asked: Asked) -> Behaviour:
        first, _, rest = asked.path.lstrip("/").partition("/")
        if first == "control":
            return Control(self)
        if first == "as":
            return BEHAVIOURS.get(rest.partition("/")[0], refusal(404))
        return self._next.popleft() if self._next else self._usual


@dataclass(frozen=True, slots=True)
class Control:
    """Switches for those in other processes.

    GET /control/received, POST /control/behaves/NAME, POST /control/release
    """

    upstream: Upstream

    def __call__(self, asked: Asked) -> Iterable[Act]:
        _, what, *names = asked.path.strip("/").split("/")
        if what == "behaves":
            self.upstream.behaves(names[0])
        elif what == "release":
            self.upstream.release()
        requests = [each.summary() for each in self.upstream.received]
        state = {
            "connections": self.upstream.connections,
            "open_connections": self.upstream.open_connections,
            "received": requests,
        }
        return response([json.dumps(state).encode()], framing="length")


class _Connection(asyncio.Protocol):
    """One connection, its requests one after the other. Each reply is a task, which ends when the client leaves."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._buffer = b""
        self._turn = 0
        self._received: Received | None = None
        self._reply: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(1, 0)  # what is not with the kernel holds up the reply; 0 blocks TLS
        self._number = self._upstream.opened(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._take_request()

    def eof_received(self) -> None:
        self._client_left()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client_left()
        self._upstream.closed(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def abort(self) -> None:
        self._transport.abort()

    def _client_left(self) -> None:
        received = self._received
        if received is not None and not received.over.is_set():
            received.left_at = time.monotonic()
            received.left.set()
            received.over.set()
        if self._reply is not None:
            self._reply.cancel()

    def _take_request(self) -> None:
        """Begin the reply to a request that is here in full, if none is going on."""
        head, found, rest = self._buffer.partition(HEAD_END)
        if self._reply is not None or not found:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = tuple((name, value.strip()) for name, _, value in (line.partition(":") for line in lines))
        length = int(next((value for name, value in headers if name.lower() == "content-length"), 0))
        if len(rest) < length:
            return
        self._turn += 1
        self._buffer = rest[length:]
        self._received = Received(method, path, headers, rest[:length], self._number, self._turn)
        if not path.startswith("/control/"):
            self._upstream.received.append(self._received)
        self._reply = asyncio.ensure_future(self._answer(self._received))
        self._reply.add_done_callback(self._answered)

    async def _answer(self, received: Received) -> None:
        for act in self._upstream.behaviour_for(received)(received):
            await self._perform(act, received)
            if isinstance(act, Close | Reset):
                return
        received.ended_at = time.monotonic()

    def _answered(self, reply: asyncio.Task[None]) -> None:
        assert self._received is not None
        self._received.over.set()
        self._reply = None
        if not reply.cancelled() and (failure := reply.exception()):
            self._upstream.failures.append(failure)
            self._transport.abort()
        elif not self._transport.is_closing():
            self._take_request()

    async def _perform(self, act: Act, received: Received) -> None:
        match act:
            case bytes():
                await self._send(act, received)
            case Wait():
                await self._upstream.released(received)
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case Forever(content, pause_s):
                while True:
                    await self._send(content, received)
                    await asyncio.sleep(pause_s)
            case Hang():
                await asyncio.get_running_loop().create_future()
            case Close():
                received.over.set()
                self._transport.close()
            case Reset():
                received.over.set()
                connection = self._transport.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._transport.abort()

    async def _send(self, content: bytes, received: Received) -> None:
        self._transport.write(content)
        await self._writable.wait()
        received.sent_bytes += len(content)


@contextlib.contextmanager
def running_upstream(
    behaviour: Behaviour | str = "normal", *, certificate: tuple[Path, Path] | None = None
) -> Iterator[Upstream]:
    """One on a thread with its own loop, ended without leftovers. A behaviour that failed fails the test."""
    tls = None
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*certificate)
    found: list[Upstream] = []
    ready, done = threading.Event(), asyncio.Event()

    async def main() -> None:
        upstream = Upstream(tls)
        upstream.behaves(behaviour)
        await upstream.start()
        found.append(upstream)
        ready.set()
        await done.wait()
        await upstream.stop()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="upstream")
    thread.start()
    try:
        assert ready.wait(30), "the upstream did not start"
        yield found[0]
    finally:
        found[0]._loop.call_soon_threadsafe(done.set)
        thread.join(30)
    assert not found[0].failures, found[0].failures


@dataclass(frozen=True, slots=True)
class UpstreamProcess:
    """One in a process of its own."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def url_as(self, name: str) -> str:
        assert name in BEHAVIOURS, name
        return f"http://127.0.0.1:{self.port}/as/{name}/v1"

    def behaves(self, name: str) -> None:
        self.control(f"behaves/{name}", post=True)

    def release(self) -> None:
        self.control("release", post=True)

    def control(self, path: str = "received", *, post: bool = False) -> dict[str, Any]:
        """`connections`, `open_connections` and `received`, after the switch."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/control/{path}", b"" if post else None)
        with urllib.request.urlopen(request, timeout=30) as reply:
            state: dict[str, Any] = json.load(reply)
            return state

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def upstream_process(behaviour: str = "normal", port: int = 0) -> Iterator[UpstreamProcess]:
    command = [
        sys.executable,
        "-m",
        "tests.support.marketplace.upstream",
        "--port",
        str(port),
        "--behaviour",
        behaviour,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield UpstreamProcess(process, int(process.stdout.readline().rpartition(":")[2].split("/")[0]))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def _serve(port: int, behaviour: Behaviour) -> None:
    upstream = Upstream()
    upstream.behaves(behaviour)
    await upstream.start(port)
    print(f"listening on {upstream.url}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--behaviour", choices=BEHAVIOURS, default="normal")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options.port, BEHAVIOURS[options.behaviour]))


if __name__ == "__main__":
    main()
