"""Images of a request, prepared for its model."""

from collections.abc import Sequence

from serve_app.api.answer import Edge
from serve_app.api.ticket import Ticket
from serve_app.base.errors import InvalidRequest
from serve_app.catalog.catalog import ResolvedModel
from serve_app.config.paths import resolve_source
from serve_app.config.service import LimitsConfig
from serve_app.images.prepared import Frame, ImageLimits, ImageOrder, PreparedImage
from serve_app.images.preparing import ImageUrl, accepted


async def prepare_images(
    edge: Edge, ticket: Ticket, target: ResolvedModel, urls: Sequence[ImageUrl]
) -> tuple[Frame, tuple[PreparedImage, ...]]:
    """The prepared images in order, and how the model marks them. Raises `InvalidRequest`, `LimitReached` or a
    `ServingError`.
    """
    if edge.images is None:
        raise InvalidRequest(f"{urls[0].param} is an image, and this service accepts no images.", urls[0].param)
    config = target.model.config
    order = ImageOrder(
        source=resolve_source(config.source),
        revision=config.revision,
        urls=tuple(url.url for url in urls),
        limits=_limits(edge.limits),
        total_bytes=edge.limits.image_tensor_bytes,
        fetch=config.fetch_images,
        request_id=ticket.record.request_id,
    )
    with ticket.record.stages.during("images"):
        prepared = await edge.images.prepare(order)
    images = accepted(prepared, urls)
    ticket.hold_images(sum(image.num_bytes for image in images))
    return prepared.frame, images


def _limits(limits: LimitsConfig) -> ImageLimits:
    return ImageLimits(bytes=limits.image_bytes, pixels=limits.image_pixels, side=limits.image_side)
