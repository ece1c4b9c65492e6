"""What `marketplace.py` compares: an upstream asked directly, and through this service or LiteLLM's proxy."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from serve_app.cli.processes import command_line, descendants  # noqa: E402
from serve_app.config.deploy import free_port  # noqa: E402

KEY = "rh-bench-key"
TICKS = os.sysconf("SC_CLK_TCK")
# The upstream's path by the name of a slug, with the seconds between two tokens.
PACES = {"flat": "every/0", "paced": "every/0.05", "steps": "steps/0.05", "slow": "every/2"}


@dataclass(frozen=True, slots=True)
class Side:
    """A server to ask. `model` has {} for the pace, `prefix` too. `pids`: its processes that a token passes through."""

    name: str
    port: int
    prefix: str
    model: str
    pids: Callable[[], dict[int, str]]

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, by what the process is."""
        seconds: dict[str, float] = {}
        for pid, name in self.pids().items():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                seconds[name] = seconds.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS
        return seconds

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory that no other process shares, by what the process is."""
        held: dict[str, int] = {}
        for pid, name in self.pids().items():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
                held[name] = held.get(name, 0) + private * 1024
        return held


@contextlib.contextmanager
def started(command: Sequence[str], ready: str) -> Iterator[str]:
    """A process, from the line of its output that holds `ready`, which is given."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield next(line for line in process.stdout if ready in line)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@contextlib.contextmanager
def upstream() -> Iterator[int]:
    script = str(Path(__file__).with_name("fast_upstream.py"))
    with started([sys.executable, script], "listening on") as line:
        yield int(line.rpartition(":")[2])


def configuration(upstream_port: int, folder: Path) -> dict[str, object]:
    """config.yaml as a pure gateway, with a slug for each pace. The upstream's key and the ledger are in the folder."""
    config: dict[str, object] = yaml.safe_load((ROOT / "config.yaml").read_text())
    applications = config["applications"]
    assert isinstance(applications, list)
    api = applications[0]
    slugs = [
        {
            "id": f"bench/{pace}",
            "endpoints": [
                {
                    "name": "up",
                    "upstream": {
                        "url": f"http://127.0.0.1:{upstream_port}/{path}/v1",
                        "model": pace,
                        "key": {"file": str(folder / "upstream-key")},
                        "allow_private": True,
                    },
                    "price": {"prompt": 0.1, "cached": 0.02, "completion": 0.4},
                }
            ],
        }
        for pace, path in PACES.items()
    ]
    api["deployments"][0]["user_config"] = {
        "models": [],
        "marketplace": {"slugs": slugs},
        "keys": [{"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
        "limits": {"per_key": {"concurrency": 1000}},
        "ledger": {"directory": str(folder / "ledger")},
    }
    return {**config, "applications": [api]}


@contextlib.contextmanager
def roundhouse(upstream_port: int, folder: Path) -> Iterator[Side]:
    port, path = free_port(), folder / "config.yaml"
    (folder / "upstream-key").write_text("sk-bench")
    path.write_text(yaml.safe_dump(configuration(upstream_port, folder)))

    def pids() -> dict[int, str]:
        titles = {pid: " ".join(command_line(pid)) for pid in descendants()}
        ours = {"ServeReplica:api:ingress": "ingress", "haproxy": "HAProxy"}
        return {pid: name for pid, title in titles.items() for part, name in ours.items() if part in title}

    command = [sys.executable, "-m", "serve_app", "up", "--config", str(path), "--port", str(port)]
    with started(command, "is ready"):
        yield Side("Roundhouse", port, "", "bench/{}", pids)


@contextlib.contextmanager
def litellm(venv: Path, upstream_port: int, folder: Path) -> Iterator[Side]:
    """With one worker, as we have one ingress, and what its documents advise for production."""
    port, config = free_port(), folder / "litellm.yaml"
    served = [
        {
            "model_name": f"bench/{pace}",
            "litellm_params": {
                "model": f"openai/{pace}",
                "api_base": f"http://127.0.0.1:{upstream_port}/{path}/v1",
                "api_key": "sk-bench",
            },
        }
        for pace, path in PACES.items()
    ]
    settings = {"set_verbose": False, "json_logs": True}
    config.write_text(
        yaml.safe_dump({"model_list": served, "litellm_settings": settings, "general_settings": {"master_key": KEY}})
    )
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(venv / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "litellm.log").open("w") as log:
        process = subprocess.Popen([*command, "--num_workers", "1"], stdout=log, stderr=log, env=os.environ | quiet)
        try:
            while not _is_alive(f"http://127.0.0.1:{port}/health/liveliness"):
                assert process.poll() is None, (folder / "litellm.log").read_text()
                time.sleep(0.5)
            yield Side("LiteLLM", port, "", "bench/{}", lambda: {process.pid: "proxy"})
        finally:
            process.terminate()
            process.wait()


def _is_alive(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
        return bool(reply.status == 200)
    return False
