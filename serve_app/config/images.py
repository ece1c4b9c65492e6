"""The `args` of the image application in config.yaml: the processes that decode and resize images for vision models."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve_app.config.service import Count, Seconds
from serve_app.errors import ConfigRefused
from serve_app.explain import Complaint, explain


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class ImageReplicas(_Section):
    """Bounds of autoscaling; equal bounds switch it off."""

    min: Annotated[int, Field(ge=0, le=10_000, description="0: none runs without images; the first starts one.")] = 1
    max: Annotated[int, Field(ge=1, le=10_000, description="Processes at most.")] = 1
    target: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)] = Field(
        default=2.0, description="Requests with images per process that autoscaling aims at."
    )
    upscale_delay_s: Annotated[float, Field(ge=0, strict=False)] = Field(
        default=2.0, description="How long the load must be higher before a process is added."
    )
    downscale_delay_s: Annotated[float, Field(ge=0, strict=False)] = Field(
        default=300.0, description="How long the load must be lower before a process is ended."
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise Complaint(f"must be at most max, which is {self.max}", self.min, ".min")
        return self


class ImageArgs(_Section):
    """The deployment that prepares images. It never sees a GPU."""

    replicas: ImageReplicas = Field(default=ImageReplicas(), description="How many processes.")
    cpus_per_replica: Annotated[float, Field(ge=0, le=1024, strict=False)] = Field(
        default=1.0, description="What Ray reserves for a process."
    )
    threads: Count = Field(default=1, description="Images that a process prepares at a time.")
    max_ongoing_requests: Count = Field(default=16, description="Requests that a process holds at a time.")
    cache_bytes: Annotated[int, Field(ge=0)] = Field(
        default=256 * 2**20, description="Prepared images that a process keeps, for conversations that send them again."
    )
    fetch_timeout_s: Seconds = Field(
        default=10.0, description="How long an image behind an https URL may take, where a model allows fetching."
    )
    graceful_shutdown_timeout_s: Seconds = Field(
        default=60.0, description="How long a process that stops may finish its requests."
    )


def parse_image_args(raw: object) -> ImageArgs:
    """Check the arguments of the image application. Raises `ConfigRefused` with one sentence."""
    try:
        return ImageArgs.model_validate(raw)
    except ValidationError as exc:
        raise ConfigRefused(explain(exc.errors()[0], "args")[1]) from exc
