"""`python -m serve_app up`: the service as one foreground process that leaves nothing behind.

The child (`driver.py`) is `serve run` with a Ray cluster of its own; what that starts is this process' to end.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import yaml

from serve_app.cli.processes import adopt_orphans, command_line, descendants, end_descendants, end_with_parent
from serve_app.cli.serve_log import deploy_failure, plain
from serve_app.config.deploy import DEMO_KEY, DeployConfig, require_free

_POLL_S = 0.25
_STILL_STARTING_S = 20.0
_SERVE_GRACE_S = 60.0  # once the requests are finished: Serve gives itself 30 s to shut down, and Ray some more
_REST_GRACE_S = 5.0
_TAIL_LINES = 30


class LaunchFailed(Exception):
    """The service did not come up, or ended by itself; the message says why."""


class _Interrupted(BaseException):
    """Somebody asked for the end. Not an `Exception`: nothing on the way may take it for a failure of its own."""


def up(config: DeployConfig) -> None:
    """Run the service until a signal. Raises `ConfigRefused` before anything is started, and `LaunchFailed`."""
    require_free(config.host, config.port, "end that, or choose another port with --port")
    config = config.with_own_ports()
    adopt_orphans()
    service = _Service(config)
    with _interruptible() as signals:
        try:
            _run(service, config)
            service.finish()
        except _Interrupted:
            say("Ending at once.")
        finally:
            signals.ignored = True
            service.destroy()


def _run(service: "_Service", config: DeployConfig) -> None:
    try:
        service.start()
        service.wait_until_ready()
        say(welcome(config))
        service.wait_for_the_end()
    except _Interrupted:
        say("\nEnding: requests under way are finished first. Once more to end at once.")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def welcome(config: DeployConfig) -> str:
    """What to tell whoever started the service; the curl works as it stands."""
    host = _reachable(config.host)
    url = f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"
    lines = [f"Roundhouse is ready at {url}/v1 (Ctrl-C ends it)."]
    lines += [f"  model: {model_id}" for model_id in config.model_ids]
    if config.has_demo_key:
        lines += [f"  demo key: {DEMO_KEY}", "", *_curl(url, config.model_ids[0])]
    return "\n".join(lines)


def _curl(url: str, model: str) -> list[str]:
    message = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "messages": [message], "temperature": 0}
    return [
        f"curl {url}/v1/chat/completions \\",
        f"  -H 'Authorization: Bearer {DEMO_KEY}' -H 'Content-Type: application/json' \\",
        f"  -d '{json.dumps(body)}'",
    ]


class _Service:
    """`serve run`, and everything that it starts."""

    def __init__(self, config: DeployConfig) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="roundhouse-"))
        self._log = self._folder / "serve.log"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        derived = self._folder / "config.yaml"
        derived.write_text(yaml.safe_dump(self._config.raw, sort_keys=False))
        say(f"Starting the service (log: {self._log})")
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "serve_app.cli.driver", str(derived)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_child_environment(),
                # A session of its own: Ctrl-C in the terminal reaches this process alone, which passes it on.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def wait_until_ready(self) -> None:
        """Raises `LaunchFailed` with the reason."""
        started = shown = time.monotonic()
        while (state := _readiness(self._config)) is not None:
            self._require_alive()
            if failure := self._failure():
                raise LaunchFailed(failure)
            if time.monotonic() - shown > _STILL_STARTING_S:
                shown = time.monotonic()
                say(f"Still starting after {shown - started:.0f} s. {state}")
            time.sleep(_POLL_S)

    def wait_for_the_end(self) -> None:
        while True:
            self._require_alive()
            time.sleep(_POLL_S)

    def finish(self) -> None:
        """End as a service should: when the requests are finished."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(self._config.graceful_shutdown_timeout_s + _SERVE_GRACE_S)

    def destroy(self) -> None:
        """End whatever is left."""
        end_descendants(_REST_GRACE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _require_alive(self) -> None:
        assert self._child is not None
        status = self._child.poll()
        if status is not None:
            raise LaunchFailed(f"Ray Serve ended with status {status}. Its last words:\n{_tail(self._log)}")

    def _failure(self) -> str | None:
        failures = (deploy_failure(log.read_text(errors="replace")) for log in self._controller_logs())
        return next(filter(None, failures), None)

    def _controller_logs(self) -> Iterator[Path]:
        """Serve keeps what its controller says in the session folder of Ray, which the daemons have on their command
        lines.
        """
        for pid in descendants():
            for argument in command_line(pid):
                if argument.startswith(_SESSION):
                    yield from Path(argument.removeprefix(_SESSION)).glob("logs/serve/controller_*.log")
                    return


_SESSION = "--session-dir="


def _readiness(config: DeployConfig) -> str | None:
    """None when the service is ready, else what it says."""
    connection = http.client.HTTPConnection(_reachable(config.host), config.port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        body = response.read()
        if response.status == 200:
            return None
        message: str = json.loads(body)["error"]["message"]
        return message
    except (OSError, http.client.HTTPException, ValueError, LookupError):
        return "It does not answer yet."
    finally:
        connection.close()


def _reachable(host: str) -> str:
    """Where this machine reaches what listens there."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _child_environment() -> dict[str, str]:
    environment = dict(os.environ)  # noqa: TID251 - handed on as it is, not read
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray lets its workers give way to everything else on the machine (15). The replicas are what this machine is for.
    environment.setdefault("RAY_worker_niceness", "0")
    # Workers start elsewhere and must find this package even when it is not installed.
    checkout = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (checkout, environment.get("PYTHONPATH"))))
    return environment


def _tail(log: Path) -> str:
    return "\n".join(plain(log.read_text(errors="replace")).splitlines()[-_TAIL_LINES:])


@dataclass(slots=True)
class _Signals:
    ignored: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.ignored:
            raise _Interrupted


@contextlib.contextmanager
def _interruptible() -> Iterator[_Signals]:
    """Raise `_Interrupted` in the body on each SIGINT, SIGTERM and SIGHUP."""
    signals = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signals.handle) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
