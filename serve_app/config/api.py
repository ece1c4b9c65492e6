"""The `args` of the `api` application in config.yaml: how the ingress runs. A change restarts it. What it serves is its
`user_config` (`service.py`), which can change without a restart.
"""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc

from serve_app.config.checking.refusal import parse_section
from serve_app.config.checking.section import Count, Cpus, Seconds, Section, Text
from serve_app.config.checking.url import HttpUrl


class TracingConfig(Section):
    """OpenTelemetry traces of requests. Needs the extra `tracing`."""

    endpoint: Annotated[HttpUrl, Doc("Where the spans go: a receiver of OTLP over HTTP.")]
    sample: Annotated[
        float,
        Ge(0),
        Le(1),
        Doc("Share of the requests that are traced; where a caller sent `traceparent`, that decides."),
    ] = 1.0


class ApiArgs(Section):
    """How the ingress runs."""

    replicas: Annotated[int, Ge(1), Le(1000), Doc("Ingress processes.")] = 1
    cpus_per_replica: Annotated[Cpus, Doc("CPUs that Ray reserves for each.")] = 0.25
    max_ongoing_requests: Annotated[Count, Doc("Most requests in one ingress; more are refused (503).")] = 4096
    transport: Annotated[
        Literal["channel", "serve"],
        Doc("How tokens reach the ingress: a TCP side channel, or Ray Serve's own streams, which use more CPU."),
    ] = "channel"
    channel_host: Annotated[
        Text | None, Doc("Address at which replicas reach the ingress; null: its address in the cluster.")
    ] = None
    tracing: Annotated[TracingConfig | None, Doc("Traces of requests; null: none.")] = None
    no_replica_timeout_s: Annotated[
        Seconds,
        Doc("How long a request waits while no replica is running, or its tokenizer is being loaded; then 503."),
    ] = 10.0
    graceful_shutdown_timeout_s: Annotated[
        Seconds, Doc("How long an ingress that stops may take to finish its requests.")
    ] = 900.0


def parse_api_args(raw: object) -> ApiArgs:
    """Check the arguments of the `api` application. Raises `ConfigRefused` with one sentence."""
    return parse_section(ApiArgs, raw, "args")
