"""How many replicas a deployment has, and when Serve adds and removes some. Models and images share these options."""

from typing import Annotated, Self

from annotated_types import Ge, Le
from pydantic import model_validator
from typing_extensions import Doc

from serve_app.base.explain import Complaint
from serve_app.config.checking.section import Delay, Seconds, Section

LookBack = Annotated[Seconds, Doc("Time over which the number of requests is averaged.")]
DownscaleDelay = Annotated[Delay, Doc("How long the load must be below the target before a replica is removed.")]
UpscaleDelay = Annotated[Delay, Doc("How long the load must be above the target before a replica is added.")]


class Autoscaling(Section):
    """Bounds and delays; equal bounds switch it off. Each kind of deployment adds its `target`."""

    min: Annotated[
        int, Ge(0), Le(10_000), Doc("Fewest replicas; at 0 the last ends when idle, and a request starts one.")
    ] = 1
    max: Annotated[int, Ge(1), Le(10_000), Doc("Most replicas.")] = 1
    look_back_period_s: LookBack = 30.0
    upscale_delay_s: UpscaleDelay = 5.0
    downscale_delay_s: DownscaleDelay = 300.0

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise Complaint(f"must be at most max, which is {self.max}", self.min, ".min")
        return self
