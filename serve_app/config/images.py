"""The `args` of the image application in config.yaml: the processes that decode and resize images for vision models."""

from typing import Annotated

from annotated_types import Ge, Gt
from typing_extensions import Doc

from serve_app.config.autoscaling import Autoscaling, UpscaleDelay
from serve_app.config.checking.refusal import parse_section
from serve_app.config.checking.section import Count, Cpus, Seconds, Section


class ImageScaling(Autoscaling):
    """The load that a process should have."""

    target: Annotated[float, Gt(0), Doc("Target of autoscaling: requests with images per replica.")] = 2.0
    upscale_delay_s: UpscaleDelay = 2.0


class ImageArgs(Section):
    """The deployment that prepares images. It never sees a GPU."""

    replicas: Annotated[ImageScaling, Doc("How many processes there are.")] = ImageScaling()
    cpus_per_replica: Annotated[Cpus, Doc("CPUs that Ray reserves for each process.")] = 1.0
    threads: Annotated[Count, Doc("Images that a process prepares at a time.")] = 1
    max_ongoing_requests: Annotated[Count, Doc("Requests that a process holds at a time.")] = 16
    cache_bytes: Annotated[
        int, Ge(0), Doc("Bytes of prepared images that a process caches, for conversations that send them again.")
    ] = 256 * 2**20
    fetch_timeout_s: Annotated[
        Seconds, Doc("Longest download of an image from an https URL, where a model allows fetching.")
    ] = 10.0
    graceful_shutdown_timeout_s: Annotated[
        Seconds, Doc("How long a process that stops may take to finish its requests.")
    ] = 60.0


def parse_image_args(raw: object) -> ImageArgs:
    """Check the arguments of the image application. Raises `ConfigRefused` with one sentence."""
    return parse_section(ImageArgs, raw, "args")
