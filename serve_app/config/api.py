"""The `args` of the `api` application in config.yaml: how the ingress runs. A change restarts it. What it serves is its
`user_config` (`service.py`), which can change without a restart.
"""

from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, model_validator
from typing_extensions import Doc

from serve_app.base.explain import Complaint
from serve_app.config.autoscaling import DownscaleDelay, LookBack, UpscaleDelay
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


def _fixed(value: object) -> object:
    return {"min": value, "max": value} if isinstance(value, int) and not isinstance(value, bool) else value


class ApiScaling(Section):
    """Bounds and delays; equal bounds switch autoscaling off."""

    min: Annotated[
        Annotated[int, Ge(1), Le(1000)] | None, Doc("Fewest; null: two where the cluster has two nodes, else one.")
    ] = None
    max: Annotated[
        Annotated[int, Ge(1), Le(1000)] | None,
        Doc("Most; null: as many as `min`, or one per node if that is null too."),
    ] = None
    target: Annotated[float, Gt(0), Doc("Target of autoscaling: requests per ingress.")] = 250.0
    look_back_period_s: LookBack = 30.0
    upscale_delay_s: UpscaleDelay = 10.0
    downscale_delay_s: DownscaleDelay = 600.0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise Complaint(f"must be at most max, which is {self.max}", self.min, ".min")
        return self

    def on(self, num_nodes: int) -> Self:
        """With the bounds that a cluster of so many nodes has."""
        least = self.min or min(2, self.max or 2, max(1, num_nodes))
        most = self.max or (max(least, num_nodes) if self.min is None else least)
        return self.model_copy(update={"min": least, "max": most})


class ApiArgs(Section):
    """How the ingress runs."""

    replicas: Annotated[ApiScaling, BeforeValidator(_fixed), Doc("Ingress processes; a number is `min` and `max`.")] = (
        ApiScaling()
    )
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

    @property
    def is_alone(self) -> bool:
        """Whether there is never another ingress."""
        return self.replicas.max == 1


def parse_api_args(raw: object) -> ApiArgs:
    """Check the arguments of the `api` application. Raises `ConfigRefused` with one sentence."""
    return parse_section(ApiArgs, raw, "args")
