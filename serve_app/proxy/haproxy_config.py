"""Rewrites Serve's HAProxy configuration, from text to text.

Serve 2.60 renders the file from a template with few settings. This module adds time limits, a limit of connections per
source, connections reserved for health probes, and the service's error format. It also closes HAProxy's administration
ports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.proxy.error_pages import HEADER_BYTES, HEADER_TIMEOUT_S, Pages

_PROBES = ("/healthz", "/readyz", "/-/healthz")
_LOOPBACK = "127.0.0.1"
_HEALTH_CONNECTIONS = 256  # which the public port cannot use
_HEALTH_CONNECTIONS_PER_SOURCE = 64
_REFUSED_CONNECTIONS = 64
_PROBE_TIMEOUT_S = 5
# Without an ingress requests wait in Serve's own proxy, before any key is checked.
_NO_INGRESS_TIMEOUT_S = 60
_PIPES = 256  # each takes two files; by default HAProxy reserves one for every fourth connection
# HAProxy refuses headers over its buffer with a fixed text. The buffer is larger than our limit, so our own error
# applies first.
_BUFFER_BYTES = 2 * HEADER_BYTES
# Serve has "always": a client's first request may go to an ingress over a connection that another client left. When
# that ingress has died, HAProxy then closes the client's connection without an answer. With "safe" it answers 502 or
# 503.
_REUSE = "safe"
_SOURCES_KEPT = "size 100k expire 1m store conn_cur"


class TemplateChanged(Exception):
    """Serve's configuration lacks a line that must be replaced: the service needs another version of Ray."""


@dataclass(frozen=True, slots=True)
class Route:
    """One of Serve's backends, which serves the paths below `prefix`. `servers`: the address of each ingress by
    name.
    """

    backend: str
    prefix: str
    servers: Mapping[str, str]

    @property
    def probes(self) -> str:
        return " ".join(f"{self.prefix.rstrip('/')}{path}" for path in _PROBES)


@dataclass(frozen=True, slots=True)
class Hardening:
    """The settings to add. `connections_per_source` None: half of all; 0: no limit. `health_address` None: no port for
    probes.
    """

    pages: Pages
    max_connections: int
    connections_per_source: int | None = None
    health_address: str | None = None
    routes: Sequence[Route] = field(default=())

    @property
    def health_connections(self) -> int:
        return min(_HEALTH_CONNECTIONS, self.max_connections // 4) if self.health_address else 0

    @property
    def public_connections(self) -> int:
        return self.max_connections - self.health_connections

    @property
    def served_connections(self) -> int:
        """Connections that are served. More on the public port get 429."""
        return self.public_connections - min(_REFUSED_CONNECTIONS, self.public_connections // 4)


def harden(serves: str, hardening: Hardening) -> str:
    """Serve's configuration with our settings. Raises `TemplateChanged`."""
    sections = _parse(serves)
    process = _in(sections, "global").replace("mode 666", "mode 600")
    process.set_line("maxconn", str(hardening.max_connections)).set_line("tune.bufsize", str(_BUFFER_BYTES))
    process.append(f"maxpipes {_PIPES}")
    for name in ("frontend prometheus", "listen stats"):  # Serve binds them to all addresses, without a key
        section = _in(sections, name)
        section.set_line("bind", f"{_LOOPBACK}:{section.value('bind').rpartition(':')[2]}")
    _in(sections, "defaults").without("errorfile").append(*_defaults())
    frontend = _in(sections, "frontend http_frontend")
    frontend.insert("bind", _connections(hardening), after=True)
    frontend.insert("use_backend" if frontend.has("use_backend") else "default_backend", _requests(hardening))
    _in(sections, "backend default_backend").without("http-request").append(_no_route(hardening.routes))
    for route in hardening.routes:
        backend = _in(sections, f"backend {route.backend}").set_line("http-reuse", _REUSE)
        backend.insert("default-server", _ingress(route), after=True)
    ours = [_error_pages(hardening.pages), _sources("sources"), *map(_probe_backend, hardening.routes)]
    if hardening.health_address:
        ours += [_sources("health_sources"), _health_frontend(hardening.health_address, hardening)]
    return "\n".join(str(section) for section in [*sections.values(), *ours]) + "\n"


class _Section:
    """A section's header and lines. Methods that change it return it."""

    def __init__(self, header: str, *lines: str) -> None:
        self.header = header
        self.lines = list(lines)

    def __str__(self) -> str:
        return "\n".join([self.header, *(f"    {line}" for line in self.lines)])

    def has(self, keyword: str) -> bool:
        return any(_is(line, keyword) for line in self.lines)

    def value(self, keyword: str) -> str:
        return self.lines[self._find(keyword)].partition(" ")[2]

    def set_line(self, keyword: str, value: str) -> "_Section":
        self.lines[self._find(keyword)] = f"{keyword} {value}"
        return self

    def replace(self, old: str, new: str) -> "_Section":
        if not any(old in line for line in self.lines):
            raise TemplateChanged(f"The section {self.header!r} has no {old!r}.")
        self.lines = [line.replace(old, new) for line in self.lines]
        return self

    def without(self, keyword: str) -> "_Section":
        self._find(keyword)
        self.lines = [line for line in self.lines if not _is(line, keyword)]
        return self

    def append(self, *lines: str) -> "_Section":
        self.lines += lines
        return self

    def insert(self, keyword: str, lines: Sequence[str], *, after: bool = False) -> "_Section":
        """Before the first line with the keyword, or after it."""
        place = self._find(keyword) + after
        self.lines[place:place] = lines
        return self

    def _find(self, keyword: str) -> int:
        for index, line in enumerate(self.lines):
            if _is(line, keyword):
                return index
        raise TemplateChanged(f"The section {self.header!r} has no line {keyword!r}.")


def _is(line: str, keyword: str) -> bool:
    return line.partition(" ")[0] == keyword


def _parse(text: str) -> dict[str, _Section]:
    sections: dict[str, _Section] = {}
    section = None
    for line in text.splitlines():
        if line[:1].strip():
            section = sections[line.strip()] = _Section(line.strip())
        elif section is not None and line.strip() and not line.strip().startswith("#"):
            section.append(line.strip())
    return sections


def _in(sections: Mapping[str, _Section], name: str) -> _Section:
    if name not in sections:
        raise TemplateChanged(f"There is no section {name!r}.")
    return sections[name]


def _defaults() -> list[str]:
    return [
        f"timeout http-request {HEADER_TIMEOUT_S}s",
        "option http-ignore-probes",  # a client that sends nothing gets no answer: browsers open connections in advance
        "errorfiles roundhouse",
    ]


def _connections(hardening: Hardening) -> list[str]:
    room = hardening.public_connections
    limit = hardening.connections_per_source
    return [f"maxconn {room}", *_per_source("sources", room // 2 if limit is None else limit)]


def _per_source(table: str, limit: int) -> list[str]:
    if limit == 0:
        return []
    return [
        f"tcp-request connection track-sc0 src table {table}",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {limit} }}",
    ]


def _sources(name: str) -> _Section:
    return _Section(f"backend {name}", f"stick-table type ipv6 {_SOURCES_KEPT}")


def _requests(hardening: Hardening) -> list[str]:
    probes = [f"acl is_probe path {route.probes}" for route in hardening.routes]
    return [
        "unique-id-format %[uuid]",
        "http-after-response set-header x-request-id %[unique-id] unless { res.hdr(x-request-id) -m found }",
        *(probes or ["acl is_probe always_false"]),
        f"http-request return status 431 content-type application/json file {hardening.pages.headers_too_large} "
        f"hdr connection close if {{ req.hdrs,length gt {HEADER_BYTES} }}",
        "http-request return status 429 errorfiles roundhouse "
        f"if {{ fe_conn gt {hardening.served_connections} }} !is_probe",
        *map(_to_probe_backend, hardening.routes),
    ]


def _to_probe_backend(route: Route) -> str:
    return f"use_backend {route.backend}-probes if {{ path {route.probes} }}"


def _ingress(route: Route) -> list[str]:
    """Rules for the requests and answers of an ingress."""
    # uvicorn's own words
    bad_request = "{ status 400 } { res.hdr(content-type) -m beg text/plain }"
    lines = [f"http-response return status 400 errorfiles roundhouse if {bad_request}"]
    lines += [f"acl has_ingress srv_is_up({route.backend}/{name})" for name in route.servers]
    unless = " unless has_ingress" if route.servers else ""
    return [*lines, f"http-request set-timeout server {_NO_INGRESS_TIMEOUT_S}s{unless}"]


def _no_route(routes: Sequence[Route]) -> str:
    """The answer without a route: 503 until Serve has sent its routes, then 404."""
    return f"http-request return status {404 if routes else 503} errorfiles roundhouse"


def _error_pages(pages: Pages) -> _Section:
    return _Section("http-errors roundhouse", *(f"errorfile {status} {path}" for status, path in pages.files.items()))


def _probe_backend(route: Route) -> _Section:
    """The same servers without Serve's proxy as a backup: a probe asks whether an ingress runs now."""
    servers = [f"server {name} {at} track {route.backend}/{name}" for name, at in route.servers.items()]
    timeouts = [f"timeout {kind} {_PROBE_TIMEOUT_S}s" for kind in ("connect", "server", "queue")]
    return _Section(f"backend {route.backend}-probes", f"http-reuse {_REUSE}", *timeouts, *servers)


def _health_frontend(address: str, hardening: Hardening) -> _Section:
    return _Section(
        "frontend health",
        f"bind {address}",
        f"maxconn {hardening.health_connections}",
        f"timeout http-keep-alive {HEADER_TIMEOUT_S}s",
        *_per_source("health_sources", _HEALTH_CONNECTIONS_PER_SOURCE),
        *map(_to_probe_backend, hardening.routes),
        "default_backend default_backend",
    )
