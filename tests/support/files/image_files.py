"""Small image files that tests make: pictures of a colour, and hostile ones."""

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 30, 30), "blue": (40, 70, 220), "green": (30, 160, 50), "yellow": (240, 220, 40)}


def picture(colour: str, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """A disc of this colour on white."""
    image = Image.new("RGB", size, (245, 245, 245))
    x, y, radius = size[0] // 2, size[1] // 2, min(size) * 2 // 5
    ImageDraw.Draw(image).ellipse([x - radius, y - radius, x + radius, y + radius], fill=COLOURS[colour])
    return image


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def png(width: int, height: int, *, rows: bytes = b"", declared_only: bool = False) -> bytes:
    """A greyscale PNG of any declared size. `rows`: the raw bytes of its rows, zeros by default; `declared_only`: its
    data is one row.
    """
    content = rows or bytes((width + 1) * (1 if declared_only else height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    compressed = zlib.compress(content, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", compressed) + chunk(b"IEND", b"")
