"""`python -m serve_app deploy`: deploys a config.yaml to a running service and reports the result.

It differs from `serve deploy` in four points:

- It finds the service that `up` started, and that service's token.
- It deploys to another cluster only if one is named.
- It gives a first deployment free ports for HAProxy.
- It waits until the deployment has ended.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ray._private.authentication.authentication_token_setup import AuthenticationTokenLoader, _enable_token_auth
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from serve_app.base.errors import ConfigRefused
from serve_app.cli.client import ServiceRefused
from serve_app.cli.output import say
from serve_app.cli.run_folder import RunFolder
from serve_app.cli.serve_log import last_exception
from serve_app.config.deploy import DeployConfig

_POLL_S = 0.5
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_UNDER_WAY = ("NOT_STARTED", "DEPLOYING", "DELETING")


@dataclass(frozen=True, slots=True)
class Cluster:
    """`headers` let one in; without any Ray's own variables and files count."""

    dashboard: str
    headers: Mapping[str, str] | None = None

    @staticmethod
    def of_service(port: int) -> "Cluster":
        """That of the `up` that serves on this port. Raises `ConfigRefused` if there is none."""
        folder = RunFolder.of(port)
        if not (folder.is_claimed() and folder.dashboard.exists()):
            raise ConfigRefused(
                f"No service that `up` started serves on port {port}. "
                "Name its port with --port, or another cluster's dashboard with --address."
            )
        return Cluster(folder.dashboard.read_text(), {"Authorization": f"Bearer {folder.token.read_text()}"})

    def deploy(self, config: DeployConfig) -> None:
        """Returns when all applications run. Raises `ServiceRefused`, and `ConfigRefused`."""
        try:
            # `ray start` turns tokens on where there is one; Ray's own commands then do not send it by themselves.
            if self.headers is None and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
                _enable_token_auth()
            client = ServeSubmissionClient(self.dashboard, headers=None if self.headers is None else {**self.headers})
            before = client.get_serve_details()
            if not before.get("proxies") and urlsplit(self.dashboard).hostname in _LOOPBACK:
                config = config.with_own_ports()  # Serve starts: the usual ones may be another cluster's
            client.deploy_applications(config.raw)
            say(f"Sent to {self.dashboard}")
            self._wait(client, _times(before), list(config.apps))
        except (ConnectionError, RuntimeError, ValueError) as exc:
            raise ServiceRefused(f"{self.dashboard} does not take the configuration: {_first_line(exc)}") from exc

    def _wait(self, client: ServeSubmissionClient, before: Mapping[str, float], names: list[str]) -> None:
        waiting = set(names)
        while waiting:
            applications = client.get_serve_details()["applications"]
            for name in sorted(waiting):
                application = applications.get(name)
                if application is None or application["last_deployed_time_s"] == before.get(name):
                    continue  # Serve has not begun
                if application["status"] == "RUNNING":
                    say(f"{name} runs.")
                    waiting.discard(name)
                elif application["status"] not in _UNDER_WAY:
                    raise ServiceRefused(f"The application {name!r} failed to deploy: {_reason(application)}")
            time.sleep(_POLL_S)


def _times(details: Mapping[str, Any]) -> dict[str, float]:
    """When each application was deployed, in the cluster's time."""
    return {name: application["last_deployed_time_s"] for name, application in details["applications"].items()}


def _reason(application: Mapping[str, Any]) -> str:
    return last_exception(application["message"]) or str(application["status"])


def _first_line(exc: Exception) -> str:
    return next((line for line in str(exc).splitlines() if line.strip()), type(exc).__name__)
