"""`up` itself, with a driver that starts processes as Ray's but no Ray. With Ray: `tests/e2e/test_up.py`."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from serve_app.config.deploy import free_port
from tests.support.processes.demo_config import text_config
from tests.support.processes.fake_driver import DASHBOARD, REASON
from tests.support.readme_blocks import blocks
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[3]
GRACE_S = 1.0
PROGRAM = f"""
import sys
from pathlib import Path
from serve_app.cli.launch import LaunchFailed, up
from serve_app.config.deploy import load_deploy_config
from serve_app.base.errors import ConfigRefused
path, port, *traits = sys.argv[1:]
driver = (sys.executable, "-m", "tests.support.processes.fake_driver", *traits)
try:
    up(load_deploy_config(Path(path)).bound_to(None, int(port)), Path(path), driver=driver, serve_grace_s={GRACE_S})
except (ConfigRefused, LaunchFailed) as exc:
    sys.exit(f"{{type(exc).__name__}}: {{exc}}")
"""


class Up:
    def __init__(self, config: Path, folder: Path, traits: tuple[str, ...], port: int | None = None) -> None:
        self.port = port or free_port()
        self.folder = folder / f"roundhouse-{os.getuid()}" / str(self.port)
        self.printed = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(config), str(self.port), *traits],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder), "RAY_AUTH_TOKEN": "another cluster's"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if text in line:
                return
        raise AssertionError(self.printed)

    def end(self) -> tuple[int, str]:
        """Waits for it; the exit status and all that was printed."""
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, self.printed + rest

    def daemon(self, name: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [child for child in children if child.cmdline()[:1] == [str(self.folder / name)]]
        return found


class Starter:
    """Starts `up`s; whatever is left of them ends with the test."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.started: list[Up] = []

    def __call__(self, *traits: str, port: int | None = None) -> Up:
        self.started.append(Up(self.config, self.folder, traits, port))
        return self.started[-1]

    def end(self) -> None:
        for up in self.started:
            if up.process.poll() is None:
                for how in (signal.SIGTERM, signal.SIGTERM):
                    up.process.send_signal(how)
                up.process.communicate(timeout=60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    raw = text_config()
    for application in raw["applications"]:
        application["args"]["graceful_shutdown_timeout_s"] = 0.5
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
    folder = Path(tempfile.mkdtemp(prefix="rh-", dir="/tmp"))
    starter = Starter(tmp_path / "config.yaml", folder)
    yield starter
    starter.end()
    shutil.rmtree(folder)


def test_it_says_its_stages_and_how_to_change_and_watch_what_runs(start: Starter) -> None:
    up = start()
    up.read_until("-d ")
    token = up.folder / "auth_token"
    stages = [line.partition(" ")[0] for line in up.printed.splitlines() if line[:1].isupper()]
    assert stages[0] == stages[1] == "Starting"
    assert stages[-1] == "Roundhouse"
    assert f"  log: {up.folder}/serve.log\n" in up.printed
    (block,) = blocks("change")  # of the README
    command = block.text.replace("config.yaml", str(start.config)).replace("8000", str(up.port))
    assert f"  to change it: {command.replace('.venv/bin/python', sys.executable)}" in up.printed.replace(
        " .venv/bin/python", f" {sys.executable}"
    )
    assert f"  dashboard: {DASHBOARD} (the token is in {token})\n" in up.printed
    assert f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token} " in up.printed


def test_the_child_has_a_token_of_its_own_and_no_other_clusters(start: Starter) -> None:
    up = start()
    up.read_until("is ready")
    environment = up.daemon("raylet").environ()
    token = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert (token, environment["RAY_AUTH_MODE"]) == (up.folder / "auth_token", "token")
    assert "RAY_AUTH_TOKEN" not in environment
    assert (token.stat().st_mode & 0o777, len(token.read_text())) == (0o600, 64)
    assert up.folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("daemon", "name"), [("raylet", "raylet"), ("gcs_server", "control store (gcs_server)")])
def test_a_dead_daemon_ends_it_with_one_sentence(start: Starter, daemon: str, name: str) -> None:
    up = start()
    up.read_until("is ready")
    up.daemon(daemon).kill()
    killed_at = time.monotonic()
    status, printed = up.end()
    assert time.monotonic() - killed_at < 10
    assert status == 1
    reason = (
        f"LaunchFailed: Ray's {name} has ended unexpectedly; the service cannot continue without it. Ray's logs are in "
    )
    assert printed.splitlines()[-1] == f"{reason}{up.folder}/session_latest/logs."


def test_ctrl_c_with_a_dead_raylet_ends_it_at_once(start: Starter) -> None:
    up = start("ignores-sigint")
    up.read_until("is ready")
    up.process.send_signal(signal.SIGINT)
    up.read_until("Stopping")
    up.daemon("raylet").kill()
    status, printed = up.end()
    assert status == 0
    assert "Ray's raylet has ended unexpectedly" in printed
    assert "did not end within" not in printed


def test_ctrl_c_ends_it_within_the_limit_that_it_states(start: Starter) -> None:
    up = start("ignores-sigint")
    up.read_until("is ready")
    up.process.send_signal(signal.SIGINT)
    asked_at = time.monotonic()
    status, printed = up.end()
    assert status == 0
    assert "Stopping after running requests have finished, within 2 s. Press Ctrl-C again to stop at once.\n" in printed
    assert "Some processes did not end within 2 s. Killing them.\n" in printed
    assert time.monotonic() - asked_at < 2 + 10


def test_ctrl_c_leaves_the_log_and_nothing_else(start: Starter) -> None:
    up = start()
    up.read_until("is ready")
    (up.folder / "session_1").mkdir()
    (up.folder / "session_latest").symlink_to("session_1")
    up.process.send_signal(signal.SIGINT)
    status, _ = up.end()
    assert status == 0
    assert {entry.name for entry in up.folder.iterdir()} == {"serve.log", "lock"}
    assert "Starting Ray" in (up.folder / "serve.log").read_text()


def test_a_ray_that_does_not_start_in_time_is_tried_again(start: Starter) -> None:
    up = start("ray-fails-1")
    up.read_until("is ready")
    assert f"Ray did not start: {REASON} Trying again, 2 of 3.\n" in up.printed


def test_a_ray_that_never_starts_ends_it_with_one_sentence(start: Starter) -> None:
    up = start("ray-fails-3")
    status, printed = up.end()
    log = up.folder / "serve.log"
    assert status == 1
    assert printed.splitlines()[-1] == f"LaunchFailed: Ray did not start in 3 tries: {REASON} The log is {log}."
    assert "Traceback" not in printed
    assert log.read_text().count("Traceback") == 3


def test_the_log_of_the_run_before_is_kept_beside(start: Starter) -> None:
    first = start("ray-fails-3")
    assert first.end()[0] == 1
    second = start(port=first.port)
    second.read_until("is ready")
    assert (second.folder / "serve.log.1").read_text().count("Traceback") == 3
    assert "Traceback" not in (second.folder / "serve.log").read_text()


def test_a_second_one_with_the_same_port_is_refused_before_anything_starts(start: Starter) -> None:
    up = start("ray-fails-1")
    eventually(lambda: (up.folder / "auth_token").exists())
    status, printed = start(port=up.port).end()
    assert status == 1
    assert printed.startswith(("ConfigRefused: Your service on port", "ConfigRefused: Port "))
    up.read_until("is ready")
