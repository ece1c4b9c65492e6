"""`python -m serve_app up` with the real config.yaml (HAProxy, the fast path), a deterministic engine in its model."""

import hashlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml

from serve_app.config.deploy import free_port
from tests.support.processes.running_up import (
    KEY,
    MODEL,
    Up,
    plain_environment,
    processes,
    title,
    with_catalogue,
    write,
)
from tests.support.waiting import eventually
from tests.support.watching import WATCH, Prometheus, tool

# What listens where other machines reach it although the service's host is 127.0.0.1, and why that must be.
LISTEN_ELSEWHERE = {
    "ray::ServeReplica": "Serve binds each replica's gRPC server to [::], without a switch; it asks for Ray's token",
}


class Shared:
    """One service for the tests that can share it, begun again when one of them has ended it."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._running: tuple[Up, str] | None = None

    def running(self) -> tuple[Up, str]:
        if self._running is None or self._running[0].process.poll() is not None:
            port = free_port()
            up = Up(self._config, "--port", str(port))
            self._running = up, f"http://127.0.0.1:{port}"
            up.read_until("-d ")  # the end of the curl, which is the last that it prints
        return self._running

    def end(self) -> None:
        if self._running is not None:
            self._running[0].end()


@pytest.fixture(scope="module")
def shared(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(write(config, tmp_path_factory.mktemp("up")))
    yield shared
    shared.end()


@pytest.fixture
def running(shared: Shared) -> tuple[Up, str]:
    return shared.running()


def test_the_curl_that_it_prints_works(running):
    up, _ = running
    curl = "".join(up.printed[-3:]).replace("curl ", "curl --silent --fail ").replace("}'", ', "max_tokens": 5}\'')
    reply = json.loads(subprocess.run(["bash", "-c", curl], check=True, capture_output=True, text=True).stdout)
    assert reply["choices"][0]["finish_reason"] == "length"


def test_statuses_of_the_service_pass_through_haproxy(running):
    _, url = running
    headers = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert httpx.get(f"{url}/v1/nope", headers=headers).json()["error"]["code"] == "not_found"
    assert httpx.post(f"{url}/v1/completions", json={}).status_code == 401
    reply = httpx.get(f"{url}/v1/models", headers=headers | {"x-request-id": "mine"})
    assert reply.headers.get_list("x-request-id") == ["mine"]


def test_replicas_do_not_give_way_to_the_rest_of_the_machine(running):
    up, _ = running
    replicas = [pid for pid in processes(up) if "ServeReplica:" in title(pid)]
    names = {"api:ingress", "smollm2-135m:engine"}
    assert {name for name in names for pid in replicas if name in title(pid)} == names
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in replicas} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_with_a_loopback_host_nothing_listens_elsewhere_but_what_is_named(running):
    up, _ = running
    found = {title(pid).split(":smollm2")[0].split(":api")[0] for pid in processes(up) if listens_elsewhere(pid)}
    assert {Path(name.split(" ")[0]).name for name in found} <= LISTEN_ELSEWHERE.keys()


def test_what_listens_elsewhere_turns_away_who_has_no_token(running):
    up, _ = running
    ports = [port for pid in processes(up) if "ServeReplica" in title(pid) for port in listens_elsewhere(pid)]
    assert len(ports) == 3
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refusal:
                call(b"", timeout=10)
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_the_dashboard_turns_away_who_has_no_token(running):
    up, _ = running
    (line,) = [line for line in up.printed if "dashboard: " in line and "token" in line]
    reply = httpx.get(f"{line.split()[1]}/api/serve/applications/")
    assert reply.status_code == 401


@pytest.mark.slow
def test_prometheus_beside_it_reads_its_metrics(running):
    """What `make dashboards` runs, where Prometheus is installed."""
    tool("prometheus")
    up, url = running
    port = free_port()
    command = [sys.executable, str(WATCH / "start.py"), "--port", url.rpartition(":")[2]]
    command += ["--prometheus-port", str(port)]
    with subprocess.Popen(command, env={**plain_environment(), "TMPDIR": up.folder}) as watching:
        prometheus = Prometheus(f"http://127.0.0.1:{port}/api/v1")
        eventually(prometheus.is_up)
        eventually(lambda: prometheus.ask("ray_roundhouse_engine_blocks"), 60)
        assert prometheus.ask('min(up{job="ray"})')[0]["value"][1] == "1"
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 0


def test_rays_own_tools_work_by_the_line_that_it_prints(running):
    up, _ = running
    done = up.command("Ray's own tools")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["applications"].keys() == {"api", "smollm2-135m"}


def test_a_change_is_deployed_by_the_line_that_it_prints(running, config):
    up, url = running
    (line,) = [line for line in up.printed if "to change it: " in line]
    path = Path(line.partition("--config ")[2].split(" ")[0])
    digest = hashlib.sha256(b"another-key-of-mine").hexdigest()
    path.write_text(yaml.safe_dump(with_catalogue(config, keys=[*keys_of(config), {"name": "x", "sha256": digest}])))
    done = up.command("to change it")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()[1:]) == ["api runs.", "smollm2-135m runs."]
    headers = {"authorization": "Bearer another-key-of-mine"}
    eventually(lambda: httpx.get(f"{url}/v1/models", headers=headers).status_code == 200)


def test_when_the_model_dies_the_refusal_keeps_its_advice_through_haproxy(running):
    up, url = running
    (engine,) = [pid for pid in processes(up) if "ServeReplica:smollm2-135m:engine" in title(pid)]
    os.kill(engine, signal.SIGKILL)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    statuses = []
    deadline = time.monotonic() + 60
    while 200 not in statuses:
        assert time.monotonic() < deadline
        reply = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        statuses.append(reply.status_code)
        assert reply.status_code == 200 or int(reply.headers["retry-after"]) >= 1


def test_ctrl_c_lets_requests_finish_and_leaves_nothing(running):
    up, url = running
    body = {"model": MODEL, "prompt": "x", "max_tokens": 150, "stream": True}
    lines = []
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as reply:
        for line in reply.iter_lines():
            if not lines:
                up.process.send_signal(signal.SIGINT)
            lines += [line] if line else []
    assert lines[-1] == "data: [DONE]"
    status, printed = up.end()
    assert status == 0
    assert "Stopping" in printed
    assert up.left_over() == []
    assert haproxies_of(url) == []


def listens_elsewhere(pid: int) -> list[int]:
    """The ports on which a process listens where other machines reach it."""
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return []
    listening = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
    return [address.port for address in listening if not is_loopback(address.ip)]


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def keys_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    keys: list[dict[str, Any]] = config["applications"][0]["deployments"][0]["user_config"]["keys"]
    return keys


def haproxies_of(url: str) -> list[str]:
    """Nobody may still listen where the service was."""
    port = int(url.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            return [str(exc)]
    return []
