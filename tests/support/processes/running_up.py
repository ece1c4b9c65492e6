"""`python -m serve_app up` as a process: what it printed so far, and which processes it started."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.processes import command_line

ROOT = Path(__file__).parents[3]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
KEY = "roundhouse-demo"
MARK = "ROUNDHOUSE_TEST_MARK"


def plain_environment() -> dict[str, str]:
    """As in a user's terminal: without the token of the Ray that other tests share."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}


class Up:
    """A running `up`, what it printed so far, and which processes it started."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self.mark = f"{MARK}={os.urandom(8).hex()}"
        name, _, value = self.mark.partition("=")
        self.printed: list[str] = []
        self.folder = tempfile.mkdtemp(
            prefix="rh-", dir="/tmp"
        )  # Ray's sockets lie below it: their paths must be short
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", "up", "--config", str(config), *arguments],
            cwd=ROOT,
            env={**plain_environment(), name: value, "TMPDIR": self.folder},
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
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.process.returncode, "".join(self.printed) + rest

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def command(self, what: str) -> subprocess.CompletedProcess[str]:
        """A command that it printed, as a user would paste it into a terminal."""
        (line,) = [line for line in self.printed if f"{what}: " in line]
        environment = {**plain_environment(), "TMPDIR": self.folder}
        text = line.partition(": ")[2]
        return subprocess.run(
            ["bash", "-c", text], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )

    def left_over(self) -> list[str]:
        return [title(pid) for pid in processes(self)]


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


def write(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def with_catalogue(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    api, model = config["applications"]
    user_config = {**api["deployments"][0]["user_config"], **changes}
    return {
        **config,
        "applications": [{**api, "deployments": [{"name": "ingress", "user_config": user_config}]}, model],
    }
