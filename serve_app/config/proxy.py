"""The environment variables that configure HAProxy beyond Serve's own variables
(`controller_options.runtime_env.env_vars`).

- `ROUNDHOUSE_HEALTH_PORT`: a second port for /healthz and /readyz. A flood of the public port cannot fill it.
- `ROUNDHOUSE_CONNECTIONS_PER_SOURCE`: most connections of one address; default: half of all; 0: no limit.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.base.errors import ConfigRefused

HEALTH_PORT = "ROUNDHOUSE_HEALTH_PORT"
CONNECTIONS_PER_SOURCE = "ROUNDHOUSE_CONNECTIONS_PER_SOURCE"
_LAST_PORT = 65535
_MOST_CONNECTIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """`health_port` None: no such port. `connections_per_source` None: half of all; 0: no limit."""

    health_port: int | None = None
    connections_per_source: int | None = None


def parse_proxy_config(variables: Mapping[str, str]) -> ProxyConfig:
    """Raises `ConfigRefused` that names the variable."""
    return ProxyConfig(
        health_port=_integer(variables, HEALTH_PORT, 1, _LAST_PORT),
        connections_per_source=_integer(variables, CONNECTIONS_PER_SOURCE, 0, _MOST_CONNECTIONS),
    )


def read_proxy_config() -> ProxyConfig:
    """The configuration in this process's environment, which Serve set. Raises `ConfigRefused`."""
    return parse_proxy_config(os.environ)  # noqa: TID251 - Serve hands the proxy nothing else of the file


def _integer(variables: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    if name not in variables:
        return None
    raw = str(variables[name])
    if not (raw.isascii() and raw.isdigit() and least <= int(raw[:19]) <= most):
        raise ConfigRefused(f"{name} must be an integer from {least} to {most}, got {raw!r}.")
    return int(raw)
