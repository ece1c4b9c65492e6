"""Attacks on a started service, and what clients saw of each: one row per attack, as a table.

    python -m serve_app up --config config.yaml --port 8000 &
    python tests/bench/break.py --url http://127.0.0.1:8000 --pid $! [--attacks 1,2,7]

Only for a service of your own on this machine. Nothing here fails: the tests say what must hold.

    1   connections that send nothing, and senders of slow headers, beside health probes
    2   a body whose digits a slow scan goes over again and again
    3   bodies full of names that nobody knows
    4   an engine that is stopped (SIGSTOP), and what /readyz says
    5   a key taken away in a change that also holds a model that cannot be
    6   a raylet that is killed; `up` should end (the last attack: the service is gone)
    7   one request more than an ingress takes (--max-ongoing: `args.max_ongoing_requests` of `api`)
    8   a second key beside 50 streams of the first one
    10  HAProxy killed

3, 4, 6 and 10 look at processes of the service: they need --pid, that of `up`. 5 needs --config, the file that runs,
--dashboard and --auth-token; 8 needs --second-key.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from serve_app.cli.processes import command_line  # noqa: E402

PROBES = ("/healthz", "/readyz")
QUIET_S = 12.0
LONG = 500  # tokens of a request that is to last


@dataclass(frozen=True)
class Target:
    """The service, and what the attacks need to know of it."""

    url: str
    key: str
    second_key: str | None
    model: str
    health_url: str | None
    pid: int | None
    config: Path | None
    dashboard: str
    auth_token: Path
    max_ongoing: int

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return parts.hostname, parts.port or 80

    def post(self, path: str, body: Any, timeout_s: float, key: str | None = "") -> str:
        """The status, or how it failed, and how long that took."""
        headers = {} if key is None else {"authorization": f"Bearer {key or self.key}"}
        return seen(lambda: httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=timeout_s))

    def completion(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": "x", "max_tokens": 1, **fields}

    def chat(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}

    def processes(self, title: str) -> list[int]:
        """Those of the service whose command line has this in it."""
        if self.pid is None:
            raise Missing("--pid")
        return [pid for pid in family(self.pid) if title in " ".join(command_line(pid))]


class Missing(Exception):
    """An argument without which the attack cannot be made."""


def family(root: int) -> set[int]:
    """A process and all below it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def seen(call: Callable[[], httpx.Response]) -> str:
    started = time.monotonic()
    try:
        reply = call()
        said = str(reply.status_code)
        with contextlib.suppress(ValueError, LookupError, TypeError):
            said += f" {reply.json()['error']['code']}"
    except httpx.HTTPError as exc:
        said = type(exc).__name__
    return f"{said} after {time.monotonic() - started:.1f} s"


def probes(url: str, timeout_s: float = 3) -> str:
    return ", ".join(f"{path} {seen(lambda path=path: httpx.get(url + path, timeout=timeout_s))}" for path in PROBES)


@contextlib.contextmanager
def connections(target: Target, count: int) -> Iterator[list[socket.socket]]:
    """As many as are let in."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                opened.append(stack.enter_context(socket.create_connection(target.address, 3)))
        yield opened


def closed(opened: list[socket.socket]) -> int:
    """How many of them the server has ended."""
    ended = 0
    for connection in opened:
        connection.setblocking(False)
        try:
            ended += connection.recv(65536, socket.MSG_PEEK) == b"" or ended_after_words(connection)
        except BlockingIOError:
            continue
        except OSError:
            ended += 1
    return ended


def ended_after_words(connection: socket.socket) -> bool:
    """Whether what the server said was its last: a 408 comes with the end."""
    return connection.recv(65536).startswith(b"HTTP/1.1 408")


def idle_connections(target: Target) -> str:
    with connections(target, 4200) as opened:
        public = probes(target.url)
        reserved = f"; own port: {probes(target.health_url)}" if target.health_url else ""
        time.sleep(QUIET_S)
        held = f"{len(opened)} held, {closed(opened)} ended after {QUIET_S:.0f} s; then {probes(target.url)}"
    with connections(target, 25) as slow:
        for byte in b"GET /healthz HTTP/1.1\r\nx-a: b\r\n"[: int(QUIET_S)]:
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.send(bytes([byte]))
            time.sleep(1)
        slow_ones = f"{closed(slow)} of {len(slow)} slow senders ended"
    return f"{public}{reserved}; {held}; {slow_ones}"


class Pulse(threading.Thread):
    """Asks for /healthz all the time; `longest_s` is the longest that an answer took."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self._ended = threading.Event()
        self.longest_s = 0.0

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._ended.wait(0.01):
                started = time.monotonic()
                with contextlib.suppress(httpx.HTTPError):
                    client.get(f"{self._target.url}/healthz")
                self.longest_s = max(self.longest_s, time.monotonic() - started)

    def __enter__(self) -> "Pulse":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self.join()


def digits(target: Target) -> str:
    number = "1" * 299
    texts = {"text": '"' + f"{number}x " * 25_000 + '"', "list": "[" + f"{number}," * 25_000 + "1]"}
    said = []
    for name, arguments in texts.items():
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {arguments}}}'}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "a", "content": "y"}, {"role": "user", "content": "z"}]
        with Pulse(target) as pulse:
            status = target.post("/v1/chat/completions", target.chat(messages=messages), 120)
        said.append(f"{name}: {status}, /healthz took up to {pulse.longest_s:.2f} s")
    return "; ".join(said)


def unknown_fields(target: Target) -> str:
    ingresses = target.processes("ServeReplica:api:ingress")
    body = target.completion(max_tokens=LONG, junk=[{"a": 1}] * 950_000)
    before = resident_mb(ingresses)
    with ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(target.post, "/v1/completions", body, 120) for _ in range(6)]
        most = before
        while not all(request.done() for request in asked):
            most = max(most, resident_mb(ingresses))
            time.sleep(0.05)
    return f"ingress {before} MB, up to {most} MB with 6 bodies; {counted(request.result() for request in asked)}"


def resident_mb(pids: list[int]) -> int:
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def counted(said: Iterator[str]) -> str:
    words = [re.sub(r" after .*", "", one) for one in said]
    return ", ".join(f"{words.count(word)} x {word}" for word in dict.fromkeys(words))


def frozen_replica(target: Target) -> str:
    (engine, *_) = target.processes(":engine")
    os.kill(engine, signal.SIGSTOP)
    started, said = time.monotonic(), []
    try:
        while time.monotonic() - started < 40:
            said.append((time.monotonic() - started, seen(lambda: httpx.get(f"{target.url}/readyz", timeout=5))))
            time.sleep(1)
        request = target.post("/v1/completions", target.completion(), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
    noticed = next((f"{at:.0f} s" for at, status in said if not status.startswith("200")), "never")
    replaced = "replaced" if target.processes(":engine") != [engine] else "not replaced"
    return f"not ready after: {noticed} (of 40 s); {replaced}; a request then: {request}"


def revoked_key(target: Target) -> str:
    if target.config is None:
        raise Missing("--config")
    good = yaml.safe_load(target.config.read_text())
    changed = json.loads(json.dumps(good))
    (ingress,) = (app for app in changed["applications"] if app.get("route_prefix") == "/")
    settings = ingress["deployments"][0]["user_config"]
    settings["keys"] = [{"name": "other", "sha256": "0" * 64}]
    settings["models"].append({**settings["models"][0], "id": "bad/model", "source": "/no/such/folder"})
    deployed = deploy(target, changed)
    time.sleep(10)
    said = f"deploy {deployed}; 10 s later the key gets {target.post('/v1/completions', target.completion(), 20)}"
    said += f"; {probes(target.url)}"
    deploy(target, good)
    return said


def deploy(target: Target, config: Any) -> str:
    """What `serve deploy` does."""
    token = target.auth_token
    headers = {"authorization": f"Bearer {token.read_text().strip()}"} if token.is_file() else {}
    url = f"{target.dashboard}/api/serve/applications/"
    return seen(lambda: httpx.put(url, json=config, headers=headers, timeout=60))


def dead_raylet(target: Target) -> str:
    if target.pid is None:
        raise Missing("--pid")
    for raylet in target.processes("/raylet/raylet"):
        os.kill(raylet, signal.SIGKILL)
    started = time.monotonic()
    while time.monotonic() - started < 60:
        if not is_running(target.pid):
            return f"`up` ended after {time.monotonic() - started:.0f} s"
        time.sleep(0.5)
    return f"`up` still runs after 60 s; {probes(target.url)}"


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextlib.contextmanager
def streams(target: Target, count: int) -> Iterator[None]:
    """Long ones of the first key, open for as long as the context lasts."""
    body = json.dumps(target.completion(max_tokens=LONG, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {target.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with connections(target, count) as opened:
        for connection in opened:
            connection.sendall(head.encode() + body)
        time.sleep(1)
        yield


def one_too_many(target: Target) -> str:
    with streams(target, target.max_ongoing):
        with_key = target.post("/v1/completions", target.completion(), 5)
        without = target.post("/v1/completions", target.completion(), 5, key=None)
        return f"with a key {with_key}; without {without}; {probes(target.url)}"


def second_key(target: Target) -> str:
    if target.second_key is None:
        raise Missing("--second-key")
    with streams(target, 50):
        started, said, times = time.monotonic(), [], []
        while len(said) < 17 and time.monotonic() - started < 40:
            asked_at = time.monotonic()
            said.append(target.post("/v1/completions", target.completion(), 10, key=target.second_key))
            times.append(time.monotonic() - asked_at)
    median = statistics.median(times)
    return f"of {len(said)} requests of the second key: {counted(iter(said))}; median {median:.1f} s"


def killed_proxy(target: Target) -> str:
    for proxy in target.processes("haproxy -db"):
        os.kill(proxy, signal.SIGKILL)
    started, said = time.monotonic(), []
    while time.monotonic() - started < 60 and said[-1:] != ["200"]:
        said.append(seen(lambda: httpx.get(f"{target.url}/readyz", timeout=3)).partition(" after")[0])
        time.sleep(0.02)
    return f"/readyz back after {time.monotonic() - started:.1f} s; on the way: {counted(iter(said))}"


ATTACKS: dict[int, tuple[str, Callable[[Target], str]]] = {
    1: ("4,200 idle connections, 25 slow senders", idle_connections),
    2: ("runs of digits", digits),
    3: ("unknown fields", unknown_fields),
    10: ("HAProxy killed", killed_proxy),
    7: ("one request too many", one_too_many),
    8: ("50 streams of another key", second_key),
    5: ("a key revoked beside a bad model", revoked_key),
    4: ("a frozen replica", frozen_replica),
    6: ("a dead raylet", dead_raylet),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--health-url", help="the port for probes alone (ROUNDHOUSE_HEALTH_PORT)")
    parser.add_argument("--key", default="roundhouse-demo")
    parser.add_argument("--second-key")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--dashboard", default="http://127.0.0.1:8265")
    parser.add_argument(
        "--auth-token", type=Path, default=Path("~/.ray/auth_token").expanduser(), help="of Ray; `up` says where"
    )
    parser.add_argument("--max-ongoing", type=int, default=4096)
    parser.add_argument("--attacks", default=",".join(map(str, ATTACKS)), help="their numbers, in this order")
    given = vars(parser.parse_args())
    numbers = [int(number) for number in given.pop("attacks").split(",")]
    target = Target(**given)
    print("| attack | what clients saw |\n|---|---|", flush=True)
    for number in numbers:
        name, attack = ATTACKS[number]
        try:
            said = attack(target)
        except Missing as exc:
            said = f"not made: it needs {exc}"
        print(f"| {number}. {name} | {said} |", flush=True)


if __name__ == "__main__":
    main()
