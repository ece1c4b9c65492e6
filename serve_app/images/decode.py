"""Decodes an image file to RGB pixels: four formats, with limits that are checked before decoding.

Orientation is applied, transparent parts become white, and of an animation only the first frame is used. Pillow may use
only these four decoders. Others allocate memory before they check the data: a BLP of 284 bytes takes 650 MB.
"""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from serve_app.images.prepared import ImageLimits

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
MEDIA_TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/gif": "GIF", "image/webp": "WEBP"}
_NAMES = {"PNG": "PNG", "JPEG": "JPEG", "GIF": "GIF", "WEBP": "WebP"}
_TAKEN = "PNG, JPEG, GIF or WebP"
# The exceptions of Pillow's decoders for damaged data.
_FAULTS = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)


class ImageRefused(ValueError):
    """The image cannot be used; the message is a predicate for the caller."""


# Pillow's own bound would apply first, with a message without numbers; `_check` checks every image from its header.
Image.MAX_IMAGE_PIXELS = None


def decode(content: bytes, limits: ImageLimits, declared: str | None = None) -> Image.Image:
    """RGB pixels. `declared`: the media type that came with the content. Raises `ImageRefused`."""
    if len(content) > limits.bytes:
        raise ImageRefused(f"must have at most {limits.bytes} bytes, got {len(content)}")
    if not content:
        raise ImageRefused("must not be empty")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check(image, limits, declared)
            return _to_rgb(image)
    except ImageRefused:
        raise
    except UnidentifiedImageError as exc:
        raise ImageRefused(f"must be a {_TAKEN} image; its bytes have another format") from exc
    except (*_FAULTS, MemoryError) as exc:
        raise ImageRefused("is damaged: its pixels cannot be decoded") from exc


def _check(image: Image.Image, limits: ImageLimits, declared: str | None) -> None:
    kind = "JPEG" if image.format == "MPO" else image.format  # MPO: a JPEG with further pictures after the first
    assert kind is not None
    if declared is not None and MEDIA_TYPES[declared] != kind:
        raise ImageRefused(f"is declared as {declared}, but its bytes are {_NAMES[kind]}")
    width, height = image.size
    if max(width, height) > limits.side:
        raise ImageRefused(f"must have at most {limits.side} pixels a side, got {width} x {height}")
    if width * height > limits.pixels:
        raise ImageRefused(f"must have at most {limits.pixels} pixels, got {width} x {height} = {width * height}")


def _to_rgb(image: Image.Image) -> Image.Image:
    image.seek(0)
    image.load()
    oriented = _oriented(image)
    if oriented.mode.startswith("I"):  # 16 bits a pixel: convert() would clip, not scale
        oriented = Image.fromarray((np.asarray(oriented, dtype=np.uint32) // 257).astype(np.uint8))
    if oriented.has_transparency_data:
        layer = oriented.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return oriented.convert("RGB")


def _oriented(image: Image.Image) -> Image.Image:
    """The image in the orientation of its EXIF data; unchanged where that cannot be read."""
    try:
        return ImageOps.exif_transpose(image)
    except _FAULTS:
        return image
