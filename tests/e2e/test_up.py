"""`python -m serve_app up` with the real config.yaml (HAProxy, the fast path), a deterministic engine in its model."""

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

import httpx
import pytest
import yaml

from serve_app.cli.processes import command_line
from serve_app.config.deploy import free_port
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
KEY = "roundhouse-demo"
MARK = "ROUNDHOUSE_TEST_MARK"


class Up:
    """A running `up`, what it printed so far, and which processes it started."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self.mark = f"{MARK}={os.urandom(8).hex()}"
        name, _, value = self.mark.partition("=")
        self.printed: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", "up", "--config", str(config), *arguments],
            cwd=ROOT,
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if text in line:
                return
        raise AssertionError("".join(self.printed))

    def end(self, how: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Exit status and all that was printed."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        rest, _ = self.process.communicate(timeout=90)
        return self.process.returncode, "".join(self.printed) + rest

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def left_over(self) -> list[str]:
        return [title(pid) for pid in processes(self)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> dict[str, Any]:
    """config.yaml with a model that costs nothing."""
    raw = yaml.safe_load((ROOT / "config.yaml").read_text())
    api, model = raw["applications"]
    (served,) = api["deployments"][0]["user_config"]["models"]
    served["source"] = model_folder
    fake = {"vocab_size": 512, "step_s": 0.02, "reply_tokens": None}
    model["args"] = {"id": MODEL, "source": model_folder, "engine": "fake", "fake": fake, "cpus_per_replica": 0.1}
    return raw


def write(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


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
            up.read_until("is ready")
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
    up.read_until("-d ")
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
    assert "Ending" in printed
    assert up.left_over() == []
    assert haproxies_of(url) == []


def processes(up: Up) -> list[int]:
    marked = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and up.mark in (entry / "environ").read_text(errors="replace"):
                marked.append(int(entry.name))
        except OSError:
            continue
    return marked


def title(pid: int) -> str:
    """Its command line; empty when it is gone."""
    return " ".join(command_line(pid))


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


def test_a_port_in_use_is_said_before_anything_starts(config, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        status, printed = Up(write(config, tmp_path), "--port", str(port)).end(signal.SIGCONT)
    assert status == 2
    assert printed.startswith(f"Port {port} on 127.0.0.1 cannot be used, something else has it")
    assert "--port" in printed
    assert time.monotonic() - started < 20


def test_a_mistake_in_the_file_is_said_before_anything_starts(config, tmp_path):
    broken = {**config, "applications": [{**config["applications"][0], "args": {"replica": 2}}]}
    status, printed = Up(write(broken, tmp_path)).end(signal.SIGCONT)
    assert status == 2
    assert "applications[0] (api): replica is not a known key, got 2.\n" in printed
    assert status == 2


def with_catalogue(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    api, model = config["applications"]
    user_config = {**api["deployments"][0]["user_config"], **changes}
    return {
        **config,
        "applications": [{**api, "deployments": [{"name": "ingress", "user_config": user_config}]}, model],
    }


def test_a_key_that_cannot_be_read_is_said_before_anything_starts(config, tmp_path):
    broken = with_catalogue(config, keys=[{"name": "ci", "env": "NO_SUCH_VARIABLE_HERE"}])
    status, printed = Up(write(broken, tmp_path)).end(signal.SIGCONT)
    assert status == 2
    assert printed == "The key 'ci' is empty in the environment variable 'NO_SUCH_VARIABLE_HERE'.\n"


@pytest.mark.slow
def test_a_catalogue_that_the_ingress_refuses_ends_it_with_the_reason(config, tmp_path):
    """`check` loads no tokenizer, so this is found by the ingress alone."""
    (served,) = config["applications"][0]["deployments"][0]["user_config"]["models"]
    broken = with_catalogue(config, models=[{**served, "renderer": "gpt9"}])
    with Up(write(broken, tmp_path), "--port", str(free_port())) as up:
        up.read_until("failed to deploy: ")  # Serve tries three times: on a busy machine longer than `end` waits
        status, printed = up.end(signal.SIGCONT)
    assert status == 1
    reason = f"The model '{MODEL}' cannot have the renderer 'gpt9': renderer must be one of "
    assert f"The application 'api' failed to deploy: {reason}" in printed
    assert up.left_over() == []


def test_when_serve_dies_early_it_says_so_and_leaves_nothing(config, tmp_path):
    with Up(write(config, tmp_path), "--port", str(free_port())) as up:
        up.read_until("Starting the service")
        children: list[int] = []

        def has_child() -> bool:
            children[:] = [pid for pid in processes(up) if "serve_app.cli.driver" in title(pid)]
            return bool(children)

        eventually(has_child, 20)
        os.kill(children[0], signal.SIGKILL)
        status, printed = up.end(signal.SIGCONT)
    assert status == 1
    assert "Ray Serve ended with status -9" in printed
    assert up.left_over() == []


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_named_with_the_reason(config, model_folder, tmp_path):
    api, model = config["applications"]
    args = {"id": MODEL, "source": model_folder, "cpus_per_replica": 0.1}  # it has no weights
    broken = {**config, "applications": [api, {**model, "args": args}]}
    with Up(write(broken, tmp_path), "--port", str(free_port())) as up:
        up.read_until("failed to deploy: ")  # three times torch is loaded first
        status, printed = up.end(signal.SIGCONT)
    assert status == 1
    assert "The application 'smollm2-135m' failed to deploy: " in printed
    assert "no file named model.safetensors" in printed
    assert up.left_over() == []


@pytest.mark.slow
def test_two_signals_end_it_at_once(config, tmp_path):
    with Up(write(config, tmp_path), "--port", str(free_port())) as up:
        up.read_until("Starting the service")
        eventually(lambda: any("raylet" in title(pid) for pid in processes(up)))
        up.process.send_signal(signal.SIGTERM)
        up.read_until("Ending")
        asked_at = time.monotonic()
        status, printed = up.end(signal.SIGTERM)
    assert status == 0
    assert "Ending at once." in printed
    assert time.monotonic() - asked_at < 15
    assert up.left_over() == []
