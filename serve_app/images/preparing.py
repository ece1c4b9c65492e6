"""The interface of image preprocessing for the API, and the placement of prepared images in a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.interface.protocol import PromptImage
from serve_app.base.errors import InvalidRequest
from serve_app.images.prepared import Frame, ImageOrder, PreparedImage, PreparedImages, Refusal


class Images(Protocol):
    """Prepares images: either a separate deployment or this process."""

    async def prepare(self, order: ImageOrder) -> PreparedImages:
        """All images of one request. Raises `ConfigRefused` or a `ServingError`."""


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """An image of a request as the caller sent it. `param`: its path in the body."""

    url: str
    param: str


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Token ids that include every image's tokens, and the positions of these."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


def accepted(prepared: PreparedImages, urls: Sequence[ImageUrl]) -> tuple[PreparedImage, ...]:
    """The prepared images if all can be used. Raises `InvalidRequest` that names the first that cannot."""
    images: list[PreparedImage] = []
    for image, url in zip(prepared.images, urls, strict=True):
        if isinstance(image, Refusal):
            raise InvalidRequest(f"The image at {url.param} {image.message}.", url.param, "invalid_image")
        images.append(image)
    return tuple(images)


def fill_placeholders(token_ids: Sequence[int], frame: Frame, images: Sequence[PreparedImage]) -> ImagePrompt:
    """A rendered prompt with each image's tokens where the template wrote one placeholder for it."""
    found: list[int] = []
    placed: list[PromptImage] = []
    waiting = iter(images)
    for token_id in token_ids:
        image = next(waiting, None) if token_id == frame.placeholder_id else None
        if image is None:
            found.append(token_id)
            continue
        placed.append(frame.place(image, len(found), image.token_ids))
        found += image.token_ids
    if len(placed) != len(images):
        raise InvalidRequest(
            f"The model's chat template has places for {len(placed)} of the {len(images)} images of this conversation.",
            "messages",
        )
    return ImagePrompt(tuple(found), tuple(placed))


def join_chunks(parts: Sequence[tuple[int, ...] | PreparedImage], frame: Frame) -> ImagePrompt:
    """Concatenate the parts of `prompt_chunks`: token ids unchanged, and images, which need the special tokens of their
    frame around them. Raises `InvalidRequest` that names the place of a missing one.
    """
    found: list[int] = []
    placed: list[PromptImage] = []
    for index, part in enumerate(parts):
        if not isinstance(part, PreparedImage):
            _check_tokens(index, part, frame)
            found += part
            continue
        before = found[-1] if found else None
        following = parts[index + 1] if index + 1 < len(parts) else ()
        after = following[0] if not isinstance(following, PreparedImage) and following else None
        _check_frame(index, "before", frame.start_id, before)
        _check_frame(index, "after", frame.end_id, after)
        inner = frame.inner(part.token_ids)
        placed.append(frame.place(part, len(found), inner))
        found += inner
    return ImagePrompt(tuple(found), tuple(placed))


def _check_tokens(index: int, token_ids: tuple[int, ...], frame: Frame) -> None:
    """Raises `InvalidRequest` for a token that would stand for an image that is not there."""
    if frame.feature_id in token_ids:
        raise InvalidRequest(
            f"prompt_chunks[{index}] must have no image token {frame.feature_id}: images have parts of their own.",
            f"prompt_chunks[{index}]",
        )


def _check_frame(index: int, side: str, expected: int | None, actual: int | None) -> None:
    if expected is None or actual == expected:
        return
    got = "no token" if actual is None else f"token {actual}"
    raise InvalidRequest(
        f"prompt_chunks[{index}] must have the image token {expected} right {side} it, got {got}.",
        f"prompt_chunks[{index}]",
    )
