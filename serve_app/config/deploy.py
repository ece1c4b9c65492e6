"""The whole config.yaml: checked before anything is started, and bound to a host and a port.

It is a Serve config file, so `serve run config.yaml` accepts it unchanged. This module checks what Serve would find
only while it deploys: the arguments of our applications, the catalogue, and that the two match.
"""

import errno
import hashlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import SystemRandom
from typing import Any

import yaml

from serve_app.base.errors import ConfigRefused
from serve_app.config.api import ApiArgs, parse_api_args
from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.images import ImageArgs, parse_image_args
from serve_app.config.keys import DEMO_KEY
from serve_app.config.model import ModelArgs, parse_model_args
from serve_app.config.paths import resolve_source
from serve_app.config.proxy import HEALTH_PORT, parse_proxy_config
from serve_app.config.service import ServiceConfig, parse_config

API = "serve_app.app:api"
MODEL = "serve_app.app:model"
IMAGES = "serve_app.app:images"
INGRESS = "ingress"

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
_LAST_PORT = 65535
_SERVER_PORTS = range(20_000, 30_000)
"""The range for free ports. It excludes the ports of Ray and Serve, and those that the system gives to clients: a
client could take such a port between choice and use.
"""

_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_HAPROXY_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
"""Ports that HAProxy mode uses besides the service's own."""

AppArgs = ApiArgs | ModelArgs | ImageArgs
Yaml = dict[str, Any]  # a file of Serve's, of which we know only our parts


@dataclass(frozen=True, slots=True)
class DeployConfig:
    """A checked config.yaml. `apps`: the arguments of our applications by name; `service`: what the ingress serves,
    None if the file has no `api` application.
    """

    raw: Yaml
    apps: Mapping[str, AppArgs]
    service: ServiceConfig | None
    host: str
    port: int

    @property
    def model_ids(self) -> list[str]:
        return [] if self.service is None else [model.id for model in self.service.models]

    @property
    def slug_ids(self) -> list[str]:
        return [] if self.service is None else [slug.id for slug in self.service.marketplace.slugs]

    @property
    def has_demo_key(self) -> bool:
        digest = hashlib.sha256(DEMO_KEY.encode()).hexdigest()
        return self.service is not None and any(key.sha256 == digest for key in self.service.keys)

    @property
    def ingress_variables(self) -> dict[str, str]:
        """The environment variables that the file gives to the ingress."""
        for application in self.raw["applications"]:
            if application.get("import_path") == API:
                return _environment(application.get("runtime_env"))
        return {}

    @property
    def graceful_shutdown_timeout_s(self) -> float:
        """The longest time to finish requests at shutdown: the API first, then the models."""
        timeouts = [args.graceful_shutdown_timeout_s for args in self.apps.values()]
        return 2 * max(timeouts, default=0.0)

    def bound_to(self, host: str | None, port: int | None) -> "DeployConfig":
        """The same configuration on another address; None leaves that part unchanged."""
        options = {**(self.raw.get("http_options") or {})}
        options["host"] = self.host if host is None else host
        options["port"] = self.port if port is None else port
        raw = {**self.raw, "http_options": options}
        return replace(self, raw=raw, host=options["host"], port=options["port"])

    @property
    def health_port(self) -> int | None:
        """The port for health probes only; None if HAProxy has none."""
        variables = _controller_variables(self.raw)
        return parse_proxy_config(variables).health_port if variables.get(_HAPROXY) == "1" else None

    def with_own_ports(self) -> "DeployConfig":
        """The same configuration with free ports for HAProxy's internal use, unless the file names them: a second
        service on the machine needs other ports than the defaults. The probe port moves when it is in use. Raises
        `ConfigRefused` where another port that the file names is in use.
        """
        variables = _controller_variables(self.raw)
        if variables.get(_HAPROXY) != "1":
            return self
        ports = free_ports()
        chosen = {name: str(next(ports)) for name in _HAPROXY_PORTS if name not in variables}
        if self.health_port is None or not is_free(self.host, self.health_port):
            chosen[HEALTH_PORT] = str(next(ports))
        for name in _HAPROXY_PORTS:
            if name in variables:
                require_free("0.0.0.0", _port(name, variables[name]), f"change {name} in controller_options")
        options = {**self.raw["controller_options"]}
        options["runtime_env"] = {**options["runtime_env"], "env_vars": {**variables, **chosen}}
        return replace(self, raw={**self.raw, "controller_options": options})


def load_deploy_config(path: Path) -> DeployConfig:
    """Read and check a config.yaml. Raises `ConfigRefused` with one sentence for each thing that is wrong."""
    raw = _read(path)
    apps: dict[str, AppArgs] = {}
    services: list[ServiceConfig] = []
    problems = list(_parse(raw["applications"], apps, services))
    try:
        parse_proxy_config(_controller_variables(raw))
    except ConfigRefused as exc:
        problems.append(f"controller_options: {exc}")
    problems += [problem for service in services for problem in _unserved(service, apps)]
    if problems:
        raise ConfigRefused("\n".join(problems))
    return DeployConfig(raw, apps, services[0] if services else None, *_address(raw))


def is_free(host: str, port: int) -> bool:
    return _why_not_bound(host, port) is None


def require_free(host: str, port: int, remedy: str) -> None:
    """Raises `ConfigRefused` when the port cannot be bound or is in use."""
    if not 1 <= port <= _LAST_PORT:
        raise ConfigRefused(f"The port must be from 1 to {_LAST_PORT}, got {port}.")
    error = _why_not_bound(host, port)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        raise ConfigRefused(f"Port {port} on {host} is in use by another process: {remedy}.")
    raise ConfigRefused(f"Port {port} on {host!r} cannot be used: {error.strerror}.") from error


def _why_not_bound(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # names are for IPv4, as in Serve
    try:
        address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
        with closing(socket.socket(family)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        return exc
    return None


def free_ports() -> Iterator[int]:
    """Ports without a listener now, each once, in random order."""
    ports = SystemRandom().sample(_SERVER_PORTS, len(_SERVER_PORTS))
    return (port for port in ports if is_free("127.0.0.1", port))


def free_port() -> int:
    return next(free_ports())


def _read(path: Path) -> Yaml:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigRefused(f"{path} cannot be read: {exc.strerror}.") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigRefused(f"{path} is not YAML: {' '.join(str(exc).split())}.") from exc
    if not isinstance(raw, dict) or not isinstance(raw.get("applications"), list):
        raise ConfigRefused(f"{path} must be an object with a list of applications.")
    return raw


def _parse(applications: Sequence[object], apps: dict[str, AppArgs], services: list[ServiceConfig]) -> Iterator[str]:
    """Fill `apps` and `services`; yield the errors."""
    for index, application in enumerate(applications):
        if not isinstance(application, dict) or not isinstance(application.get("name"), str):
            yield f"applications[{index}] must be an object with a name."
            continue
        name, args, kind = application["name"], application.get("args") or {}, application.get("import_path")
        try:
            if kind == MODEL:
                apps[name] = parse_model_args(args)
            elif kind == IMAGES:
                apps[name] = parse_image_args(args)
            elif kind == API:
                apps[name] = parse_api_args(args)
                services.append(parse_config(_user_config(application)))
        except ConfigRefused as exc:
            yield f"applications[{index}] ({name}): {exc}"


def _unserved(service: ServiceConfig, apps: Mapping[str, AppArgs]) -> Iterator[str]:
    for model in service.models:
        args = apps.get(model.app)
        if isinstance(args, ModelArgs):
            yield from _contradictions(model, args)
        else:
            yield f"models: {model.id!r} names the application {model.app!r}, which is not in this file."
    if service.images is not None and not isinstance(apps.get(service.images.app), ImageArgs):
        yield f"images.app must be the image application of this file, got {service.images.app!r}."


def _contradictions(model: ModelConfig, args: ModelArgs) -> Iterator[str]:
    """Yields each place where the catalogue contradicts the model's application."""
    where = f"of its application {model.app!r}"
    if args.engine == "torch":  # the other one reads no source
        if resolve_source(model.source) != resolve_source(args.source):
            yield f"models: the source of {model.id!r} must be that {where}, {args.source!r}, got {model.source!r}."
        if model.revision != args.revision:
            got = f"{args.revision!r}, got {model.revision!r}"
            yield f"models: the revision of {model.id!r} must be that {where}, {got}."
    limit = args.context_length
    if limit is None:
        return
    if model.context_length is None:
        yield f"models: {model.id!r} needs a context_length of at most {limit}, which is that {where}."
    lengths = {model.id: model.context_length or 0, **{f"{model.id}:{name}": n for name, n in model.variants.items()}}
    for name, length in lengths.items():
        if length > limit:
            yield f"models: the context_length of {name!r} must be at most that {where}, {limit}, got {length}."


def _user_config(application: Yaml) -> object:
    deployments = application.get("deployments") or []
    for deployment in deployments:
        if isinstance(deployment, dict) and deployment.get("name") == INGRESS:
            return deployment.get("user_config")
    raise ConfigRefused(f"deployments must have one named {INGRESS!r} with a user_config.")


def _address(raw: Yaml) -> tuple[str, int]:
    """Host and port. Serve accepts a port that is a string; here it becomes an integer. Raises `ConfigRefused`."""
    options = raw.get("http_options") or {}
    if not isinstance(options, dict):
        raise ConfigRefused("http_options must be an object.")
    host, port = options.get("host", DEFAULT_HOST), options.get("port", DEFAULT_PORT)
    if not isinstance(host, str):
        raise ConfigRefused(f"http_options.host must be a string, got {host!r}.")
    return host, _port("http_options.port", port)


def _port(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError as exc:
        raise ConfigRefused(f"{name} must be an integer, got {value!r}.") from exc


def _controller_variables(raw: Yaml) -> dict[str, str]:
    """The environment variables that the file gives to all processes of Serve."""
    return _environment((raw.get("controller_options") or {}).get("runtime_env"))


def _environment(runtime_env: Yaml | None) -> dict[str, str]:
    return (runtime_env or {}).get("env_vars") or {}
