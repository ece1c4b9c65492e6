"""Decodes `data:image/png;base64,…` to bytes."""

import base64
from dataclasses import dataclass

from serve_app.images.decode import MEDIA_TYPES, ImageRefused

_SHOWN_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class ImageFile:
    """`media_type`: the declared type of the content, one of `decode.MEDIA_TYPES`; None without a declaration."""

    content: bytes
    media_type: str | None


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def parse_data_url(url: str, max_bytes: int) -> ImageFile:
    """Linear in its length. Raises `ImageRefused`."""
    header, comma, text = url.partition(",")
    if not comma:
        raise ImageRefused('must be a data URL, "data:image/png;base64,…"; it has no comma')
    media_type, *parameters = header[5:].split(";")
    kind = media_type.strip().lower()
    if kind not in MEDIA_TYPES:
        shown = media_type[:_SHOWN_CHARACTERS]
        raise ImageRefused(f"must have the media type {_list(MEDIA_TYPES)}, got {shown!r}")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise ImageRefused('must be base64: "data:image/png;base64,…"')
    if (size := len(text) * 3 // 4) > max_bytes + 2:
        raise ImageRefused(f"must have at most {max_bytes} bytes, got about {size}")
    try:
        content = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)  # padding is often left out
    except ValueError as exc:
        raise ImageRefused("must be base64: its data cannot be decoded") from exc
    return ImageFile(content, kind)


def _list(names: dict[str, str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
