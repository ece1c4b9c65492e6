"""`ray up` with cluster/launch/on-premise.yaml, over ssh to this machine; then cluster/README.md's steps to a reply.

What differs from the file: addresses, user and key; the ports, which must be free here; Ray's ports stay on loopback;
an environment is there already; and no `ray stop`, which would end every other Ray of this machine.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.config.deploy import free_port
from tests.support.processes.running_up import plain_environment
from tests.support.processes.ssh_machine import SshMachine, ssh_machine
from tests.support.readme_blocks import ROOT
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

KEY = "rh-on-premise-key"
APPLICATIONS = {"api", "tiny-vision", "images"}
RAY = str(Path(sys.executable).with_name("ray"))
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_USAGE_STATS_ENABLED=0"


@dataclass(frozen=True)
class Cluster:
    """One that `ray up` started."""

    file: Path
    folder: Path
    dashboard: int

    def ray(self, *arguments: str) -> str:
        """What a command of Ray prints that is given the cluster's file."""
        environment = {**plain_environment(), "RAY_TMPDIR": str(self.folder)}
        command, *rest = arguments
        done = subprocess.run(
            [RAY, command, str(self.file), *rest],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def on_head(self, command: str) -> str:
        return self.ray("exec", f"export RAY_AUTH_MODE=token; cd ~/roundhouse && .venv/bin/{command}")

    def deploy(self, port: int) -> str:
        """By the page's command, which finds the token by itself."""
        return self.ray(
            "exec",
            "cd ~/roundhouse && .venv/bin/python -m serve_app deploy --config cluster/serve/development.yaml "
            f"--address http://127.0.0.1:{self.dashboard} --host 127.0.0.1 --port {port}",
        )


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rh-", dir="/tmp") as name:  # Ray's sockets lie below it
        yield Path(name)


@pytest.fixture(scope="module")
def machine(folder: Path) -> Iterator[SshMachine]:
    with ssh_machine(folder) as machine:
        yield machine
        machine.end()


@pytest.fixture(scope="module")
def cluster(machine: SshMachine, folder: Path) -> Cluster:
    dashboard = free_port()
    config = on_this_machine(machine, folder, dashboard)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (machine.home / "roundhouse").mkdir()
    (machine.home / "roundhouse" / ".venv").symlink_to(sys.prefix)
    cluster = Cluster(folder / "cluster.yaml", folder, dashboard)
    cluster.ray("up", "--yes", "--no-config-cache")
    return cluster


def on_this_machine(machine: SshMachine, folder: Path, dashboard: int) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / "launch" / "on-premise.yaml").read_text())
    config["provider"] |= {"head_ip": "127.0.0.1", "worker_ips": []}
    config["auth"] = {
        "ssh_user": machine.user,
        "ssh_private_key": str(machine.key),
        "ssh_proxy_command": machine.proxy_command,
    }
    (folder / "token").write_text(os.urandom(32).hex())
    assert list(config["file_mounts"]) == ["~/roundhouse", "~/.ray/auth_token"]
    config["file_mounts"] = {"~/roundhouse": str(ROOT), "~/.ray/auth_token": str(folder / "token")}
    assert config.pop("setup_commands") == ["make -C ~/roundhouse setup"]
    stop, start = config["head_start_ray_commands"]
    assert stop == "~/roundhouse/.venv/bin/ray stop"
    start = re.sub(r"--port=\d+", f"--port={free_port()}", start)
    start = re.sub(r"--metrics-export-port=\d+", f"--metrics-export-port={free_port()}", start)
    start += f" --dashboard-port={dashboard} --ray-client-server-port={free_port()} --temp-dir={folder}/ray"
    start += " --num-cpus=4 --object-store-memory=100000000"
    config["head_start_ray_commands"] = [f"export {ON_LOOPBACK}; {start}"]
    return config


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_machine_is_set_up_a_configuration_is_rolled_out_and_a_model_replies(cluster: Cluster, folder: Path) -> None:
    port = free_port()
    said = cluster.deploy(port)
    assert {f"{name} runs." for name in APPLICATIONS} <= {line.strip() for line in said.splitlines()}
    eventually(lambda: ready(port), 60)
    body = {"model": "roundhouse/tiny-vision", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    ask = {"url": f"http://127.0.0.1:{port}/v1/chat/completions", "headers": {"authorization": f"Bearer {KEY}"}}
    assert httpx.post(**ask, json=body).status_code == 401

    with_key = (ROOT / "cluster" / "serve" / "development.yaml").read_text()
    with_key = with_key.replace("0" * 64, hashlib.sha256(KEY.encode()).hexdigest())
    (folder / "development.yaml").write_text(with_key)
    changed = "~/roundhouse/cluster/serve/development.yaml"
    cluster.ray("rsync-up", str(folder / "development.yaml"), changed)
    cluster.deploy(port)
    eventually(lambda: httpx.post(**ask, json=body, timeout=60).status_code == 200)
    assert 1 <= httpx.post(**ask, json=body, timeout=60).json()["usage"]["completion_tokens"] <= 4


def test_its_nodes_can_be_listed_and_none_is_without_the_token(cluster: Cluster) -> None:
    address = f"http://127.0.0.1:{cluster.dashboard}"
    assert "ALIVE" in cluster.on_head(f"ray list nodes --address {address}")
    status = cluster.on_head(f"serve status --address {address}")
    assert [name for name in APPLICATIONS if f"  {name}:" not in status] == []
    assert httpx.get(f"http://127.0.0.1:{cluster.dashboard}/api/serve/applications/").status_code == 401
