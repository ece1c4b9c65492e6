"""Image files to RGB pixels: the right colours of every kind, and a clear refusal of everything else."""

import io
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from serve_app.images.decode import ImageRefused, decode
from serve_app.images.prepared import ImageLimits
from tests.support.files.image_files import encoded, png

LIMITS = ImageLimits()
RED, BLUE, WHITE = (220, 30, 30), (40, 70, 220), (255, 255, 255)


def decoded(content: bytes, declared: str | None = None) -> Image.Image:
    image = decode(content, LIMITS, declared)
    assert image.mode == "RGB"
    return image


def refusal(content: bytes, declared: str | None = None, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(ImageRefused) as caught:
        decode(content, limits, declared)
    return str(caught.value)


def corners(image: Image.Image) -> list[object]:
    """Top left, top right, bottom left, bottom right."""
    right, bottom = image.width - 1, image.height - 1
    return [image.getpixel(place) for place in ((0, 0), (right, 0), (0, bottom), (right, bottom))]


def halves() -> Image.Image:
    """Red above, blue below, 8 x 16."""
    image = Image.new("RGB", (8, 16), RED)
    image.paste(BLUE, (0, 8, 8, 16))
    return image


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP", "JPEG"])
def test_the_four_formats_give_the_pixels(format: str) -> None:
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(format, {})
    found = np.asarray(decoded(encoded(halves(), format, **options))).astype(int)
    assert np.abs(found - np.asarray(halves()).astype(int)).max() <= (3 if format == "JPEG" else 0)


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [
        (1, [RED, RED, BLUE, BLUE]),
        (3, [BLUE, BLUE, RED, RED]),
        (6, [BLUE, RED, BLUE, RED]),
        (8, [RED, BLUE, RED, BLUE]),
    ],
)
def test_the_orientation_of_the_camera_is_applied(orientation: int, expected: list[object]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert corners(decoded(encoded(halves(), "PNG", exif=exif))) == expected


def test_what_is_transparent_lies_on_white() -> None:
    clear, half = Image.new("RGBA", (4, 4), (*RED, 0)), Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert decoded(encoded(clear)).getpixel((0, 0)) == WHITE
    assert decoded(encoded(half)).getpixel((0, 0)) == (127, 127, 127)
    assert decoded(encoded(Image.new("LA", (4, 4), (0, 0)))).getpixel((0, 0)) == WHITE


def test_a_transparent_place_in_a_palette_lies_on_white() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([*RED, *BLUE])
    image.putpixel((0, 0), 0)
    found = decoded(encoded(image, "PNG", transparency=0))
    assert found.getpixel((0, 0)) == WHITE
    assert found.getpixel((1, 1)) == BLUE


def test_one_bit_grey_and_sixteen_bits_keep_their_brightness() -> None:
    assert decoded(encoded(Image.new("1", (4, 4), 1))).getpixel((0, 0)) == WHITE
    assert decoded(encoded(Image.new("L", (4, 4), 77))).getpixel((0, 0)) == (77, 77, 77)
    deep = Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16))
    assert decoded(encoded(deep)).getpixel((0, 0)) == (40_000 // 257,) * 3


def test_inks_become_colours() -> None:
    found = decoded(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).getpixel((4, 4))
    assert isinstance(found, tuple)
    assert found[0] > 200
    assert max(found[1:]) < 60


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    content = encoded(
        frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {})
    )
    assert decoded(content).getpixel((0, 0)) == RED


def test_one_pixel_is_an_image() -> None:
    assert decoded(encoded(Image.new("RGB", (1, 1), RED))).getpixel((0, 0)) == RED


def test_limits_are_judged_before_anything_is_decoded() -> None:
    assert refusal(png(30_000, 30_000, declared_only=True)) == (
        "must have at most 16384 pixels a side, got 30000 x 30000"
    )
    assert refusal(png(8000, 5000, declared_only=True)) == (
        "must have at most 33554432 pixels, got 8000 x 5000 = 40000000"
    )
    assert refusal(bytes(30), limits=ImageLimits(bytes=20)) == "must have at most 20 bytes, got 30"


def test_other_formats_are_not_opened() -> None:
    nothing = "must be a PNG, JPEG, GIF or WebP image; its bytes have another format"
    for format in ("BMP", "TIFF", "ICO", "PPM", "TGA", "PDF"):
        assert refusal(encoded(Image.new("RGB", (8, 8), RED), format)) == nothing
    assert refusal(b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>") == nothing
    assert refusal(b"GIF") == nothing
    assert refusal(b"") == "must not be empty"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_any_beginning_of_a_file_is_an_image_or_refused(format: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8))
    whole = encoded(noise, format)
    for end in range(1, len(whole) - 16, 7):
        with suppress(ImageRefused):
            decoded(whole[:end])


def test_flipped_bytes_are_an_image_or_refused() -> None:
    rng = np.random.default_rng(1)
    for format in ("PNG", "JPEG", "GIF", "WEBP"):
        whole = encoded(halves(), format)
        for _ in range(200):
            spoilt = bytearray(whole)
            for place in rng.integers(0, len(whole), 3):
                spoilt[place] = int(rng.integers(0, 256))
            with suppress(ImageRefused):
                decoded(bytes(spoilt))


def test_a_file_that_is_two_things_is_what_its_beginning_says() -> None:
    both = encoded(halves(), "PNG") + b"<script>alert(1)</script>" + encoded(halves(), "JPEG")
    assert corners(decoded(both)) == [RED, RED, BLUE, BLUE]


def test_the_declared_media_type_must_be_the_contents() -> None:
    content = encoded(halves(), "PNG")
    assert decoded(content, "image/png").size == (8, 16)
    assert refusal(content, "image/jpeg") == "is declared as image/jpeg, but its bytes are PNG"


def test_a_bomb_in_the_metadata_is_refused() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "a" * (70 * 2**20), zip=True)
    content = encoded(halves(), "PNG", pnginfo=info)
    assert len(content) < 100_000
    assert refusal(content).startswith("is damaged")
    assert io.BytesIO(content).read(4) == b"\x89PNG"


def test_a_jpeg_with_more_pictures_behind_the_first_is_a_jpeg() -> None:
    pictures = [Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE)]
    content = encoded(pictures[0], "MPO", save_all=True, append_images=pictures[1:])
    found = decoded(content, "image/jpeg").getpixel((0, 0))
    assert isinstance(found, tuple)
    assert found[0] > 150
    assert refusal(content, "image/png") == "is declared as image/png, but its bytes are JPEG"
