"""The `args` of the `api` application in config.yaml: how the ingress runs. What it serves is its `user_config`
(`config.py`), which can change without a restart.

    args:
      replicas: 1                  # ingress processes
      cpus_per_replica: 0.25       # what Ray reserves
      max_ongoing_requests: 4096   # per ingress process; more are refused (503)
      transport: channel           # how tokens come from the replicas: the side channel, or serve: Ray Serve's streams
      channel_host: null           # the address that replicas reach this process by; null: its address in the cluster
      no_replica_timeout_s: 10     # how long a request waits for a replica while none is up; then 503
      graceful_shutdown_timeout_s: 900   # how long an ingress that stops may finish its requests
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_app.config.service import Count, NonEmptyText, Seconds
from serve_app.errors import ConfigRefused
from serve_app.explain import explain


class ApiArgs(BaseModel):
    """How the ingress runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    cpus_per_replica: Annotated[float, Field(ge=0, le=1024, strict=False)] = 0.25
    max_ongoing_requests: Count = 4096
    transport: Literal["channel", "serve"] = "channel"
    channel_host: NonEmptyText | None = None
    no_replica_timeout_s: Seconds = 10.0
    graceful_shutdown_timeout_s: Seconds = 900.0


def parse_api_args(raw: object) -> ApiArgs:
    """Check the arguments of the `api` application. Raises `ConfigRefused` with one sentence."""
    try:
        return ApiArgs.model_validate(raw)
    except ValidationError as exc:
        raise ConfigRefused(explain(exc.errors()[0], "args")[1]) from exc
