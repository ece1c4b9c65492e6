"""`python -m serve_app up`: runs the service as one foreground process. After its end only the log remains.

The child (`driver.py`) is `serve run` with its own Ray cluster. This process ends everything that the child started.
"""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import yaml

from serve_app.cli.daemons import Daemons
from serve_app.cli.output import say
from serve_app.cli.processes import adopt_orphans, end_descendants, end_with_parent
from serve_app.cli.run_folder import RunFolder
from serve_app.cli.serve_log import deploy_failure, last_exception
from serve_app.config.deploy import DeployConfig, free_port, require_free
from serve_app.config.keys import DEMO_KEY

DRIVER = (sys.executable, "-m", "serve_app.cli.driver")
RAY_DID_NOT_START = 75
"""The driver's exit status when a retry can succeed: EX_TEMPFAIL of sysexits.h."""

_RAY_STARTS = 3
_POLL_S = 0.25
_STILL_STARTING_S = 20.0
SERVE_GRACE_S = 60.0  # after the requests have finished: Serve may take 30 s to shut down, and Ray a few more
_REST_GRACE_S = 5.0
_METRIC_PORTS = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
_REACHED_BY_LOOPBACK = ("127.0.0.1", "localhost", "0.0.0.0")


class LaunchFailed(Exception):
    """The service did not start, or ended unexpectedly; the message gives the reason."""


class _Interrupted(BaseException):
    """A signal asked for shutdown. Not an `Exception`, so that no handler takes it for a failure."""


def up(
    config: DeployConfig, config_path: Path, *, driver: Sequence[str] = DRIVER, serve_grace_s: float = SERVE_GRACE_S
) -> None:
    """Run the service until a signal. Raises `ConfigRefused` before anything is started, and `LaunchFailed`.

    `driver` is called with the service's port, and finds everything else in that port's `RunFolder`.
    """
    require_free(config.host, config.port, "stop that process, or choose another port with --port")
    config.with_own_ports()  # says at once what another try would not change
    folder = RunFolder.of(config.port)
    with folder.claimed():
        adopt_orphans()
        service = _Service(config, folder, driver, serve_grace_s)
        with _interruptible() as signals:
            try:
                _run(service, config_path)
                service.finish()
            except _Interrupted:
                say("Stopping at once.")
            finally:
                signals.ignored = True
                end_descendants(_REST_GRACE_S)
        folder.clear()


def _run(service: "_Service", config_path: Path) -> None:
    try:
        service.start()
        service.wait_until_ready()
        say(welcome(service.config, service.operations(config_path)))
        service.wait_for_the_end()
    except _Interrupted:
        limit = f"within {service.finish_limit_s:.0f} s"
        say(f"\nStopping after running requests have finished, {limit}. Press Ctrl-C again to stop at once.")


def welcome(config: DeployConfig, operations: Sequence[str] = ()) -> str:
    """The message once the service is ready; its curl command works as printed."""
    url = _url(config.host, config.port)
    lines = [f"Roundhouse is ready at {url}/v1 (Ctrl-C ends it)."]
    lines += [f"  model: {model_id}" for model_id in config.model_ids]
    lines += [f"  slug: {slug_id}" for slug_id in config.slug_ids]
    if config.health_port is not None:
        lines.append(f"  probes: {_url(config.host, config.health_port)}/readyz")
    lines += operations
    if config.has_demo_key:
        lines += [f"  demo key: {DEMO_KEY}", "", *_curl(url, config)]
    return "\n".join(lines)


def _url(host: str, port: int) -> str:
    host = _reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _curl(url: str, config: DeployConfig) -> list[str]:
    name = [*config.model_ids, *config.slug_ids][0]
    message = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": name, "messages": [message], "temperature": 0}
    if not config.model_ids:
        body["stream"] = True  # as slugs need it
    return [
        f"curl {url}/v1/chat/completions \\",
        f"  -H 'Authorization: Bearer {DEMO_KEY}' -H 'Content-Type: application/json' \\",
        f"  -d '{json.dumps(body)}'",
    ]


class _Service:
    """The `serve run` process, and everything that it starts."""

    def __init__(self, config: DeployConfig, folder: RunFolder, driver: Sequence[str], serve_grace_s: float) -> None:
        self.config = config
        self._folder = folder
        self._driver = driver
        self._child: subprocess.Popen[bytes] | None = None
        self._daemons: Daemons | None = None
        self.finish_limit_s = config.graceful_shutdown_timeout_s + serve_grace_s

    def start(self) -> None:
        """Returns when Ray runs. Ray must start within 30 s, which can fail on a busy machine, so it is retried. Raises
        `LaunchFailed`.
        """
        wanted = self.config
        say(f"Starting Ray and Serve (log: {self._folder.log})")
        for tries in range(1, _RAY_STARTS + 1):
            # Anew for each try: a service that starts at the same time may have taken a port meanwhile.
            self.config = wanted.with_own_ports()
            self._folder.config.write_text(yaml.safe_dump(self.config.raw, sort_keys=False))
            self._spawn()
            if self._ray_starts():
                return
            end_descendants(_REST_GRACE_S)
            self._folder.forget_session()
            reason = last_exception(self._folder.log.read_text(errors="replace"))
            if tries < _RAY_STARTS:
                say(f"Ray did not start: {reason} Trying again, {tries + 1} of {_RAY_STARTS}.")
        raise LaunchFailed(f"Ray did not start in {_RAY_STARTS} tries: {reason} The log is {self._folder.log}.")

    def wait_until_ready(self) -> None:
        """Raises `LaunchFailed` with the reason."""
        started = shown_at = time.monotonic()
        shown = ""
        while (state := _readiness(self.config)) is not None:
            self._require_alive()
            if failure := self._failure():
                raise LaunchFailed(failure)
            now = time.monotonic()
            if now - shown_at > _STILL_STARTING_S:
                say(f"Still starting after {now - started:.0f} s. {state}")
                shown_at = now
            elif state != shown:
                say(f"Waiting: {state}")
            shown = state
            time.sleep(_POLL_S)

    def operations(self, config_path: Path) -> list[str]:
        """How to change and watch the service; each command works as printed."""
        dashboard = self._folder.dashboard.read_text()
        python = Path(sys.executable)
        token = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={self._folder.token}"
        deploy = f"{_shown(python)} -m serve_app deploy --config {config_path} --port {self.config.port}"
        return [
            f"  log: {self._folder.log}",
            f"  to change it: {deploy}",
            f"  dashboard: {dashboard} (the token is in {self._folder.token})",
            f"  Ray's own tools: {token} {_shown(python.with_name('serve'))} status -a {dashboard}",
        ]

    def wait_for_the_end(self) -> None:
        while True:
            self._require_alive()
            time.sleep(_POLL_S)

    def finish(self) -> None:
        """Shut down after the requests have finished, within `finish_limit_s`."""
        if self._child is None or self._child.poll() is not None:
            return
        self._child.send_signal(signal.SIGINT)
        deadline = time.monotonic() + self.finish_limit_s
        while self._child.poll() is None:
            if lost := self._lost():
                say(f"{lost} Running requests are cut off.")
                return
            if time.monotonic() > deadline:
                say(f"Some processes did not end within {self.finish_limit_s:.0f} s. Killing them.")
                return
            time.sleep(_POLL_S)

    def _spawn(self) -> None:
        with self._folder.log.open("ab") as log:
            self._child = subprocess.Popen(
                [*self._driver, str(self.config.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_child_environment(self.config, self._folder),
                # A session of its own: Ctrl-C in the terminal reaches this process alone, which passes it on.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def _ray_starts(self) -> bool:
        """Wait until Ray has started (True) or failed. Raises `LaunchFailed` when a retry would fail too."""
        assert self._child is not None
        started = shown_at = time.monotonic()
        while not self._folder.dashboard.exists():
            if self._child.poll() == RAY_DID_NOT_START:
                return False
            self._require_alive()
            if time.monotonic() - shown_at > _STILL_STARTING_S:
                shown_at = time.monotonic()
                say(f"Ray is still starting after {shown_at - started:.0f} s.")
            time.sleep(_POLL_S)
        self._daemons = Daemons.find()
        say(f"Starting the applications (dashboard: {self._folder.dashboard.read_text()})")
        return True

    def _require_alive(self) -> None:
        assert self._child is not None
        if lost := self._lost():
            raise LaunchFailed(f"{lost} Ray's logs are in {self._folder.ray_logs}.")
        status = self._child.poll()
        if status is not None:
            log = self._folder.log
            reason = f" ({last_exception(text)})" if "Traceback" in (text := log.read_text(errors="replace")) else ""
            raise LaunchFailed(f"Ray Serve ended with status {status}{reason}. The log is {log}.")

    def _lost(self) -> str | None:
        """A sentence about a daemon that ended unexpectedly."""
        name = None if self._daemons is None else self._daemons.lost()
        if name is None or not self._folder.dashboard.exists():
            return None
        return f"Ray's {name} has ended unexpectedly; the service cannot continue without it."

    def _failure(self) -> str | None:
        logs = self._folder.ray_logs.glob("serve/controller_*.log")
        return next(filter(None, (deploy_failure(log.read_text(errors="replace")) for log in logs)), None)


def _readiness(config: DeployConfig) -> str | None:
    """None when the service is ready, else its message."""
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
        return "The API does not answer yet."
    finally:
        connection.close()


def _reachable(host: str) -> str:
    """The address at which this machine reaches a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _child_environment(config: DeployConfig, folder: RunFolder) -> dict[str, str]:
    environment = dict(os.environ)  # noqa: TID251 - passed on unchanged, not read
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives its workers the low priority 15. Here the replicas are the machine's main work.
    environment.setdefault("RAY_worker_niceness", "0")
    environment.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # 30 are too few on a busy machine
    for name in _METRIC_PORTS:  # fixed in Ray: a second cluster on the machine would have none
        environment.setdefault(name, str(free_port()))
    # Connections to Ray's ports need this service's token. Ray would prefer these two, which belong to another cluster.
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        environment.pop(name, None)
    environment["RAY_AUTH_MODE"] = "token"
    environment["RAY_AUTH_TOKEN_PATH"] = str(folder.token)
    if config.host in _REACHED_BY_LOOPBACK:
        # Ray's own ports on loopback only, as on macOS. Ray has no other switch: it replaces a node address 127.0.0.1.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Workers start elsewhere and must find this package even when it is not installed.
    checkout = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (checkout, environment.get("PYTHONPATH"))))
    return environment


def _shown(path: Path) -> str:
    """Relative to the working folder where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


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
