import base64

import pytest

from serve_app.images.data_url import ImageFile, parse_data_url
from serve_app.images.decode import ImageRefused

CONTENT = bytes(range(100))
TEXT = base64.b64encode(CONTENT).decode()


def refusal(url: str, max_bytes: int = 1000) -> str:
    with pytest.raises(ImageRefused) as caught:
        parse_data_url(url, max_bytes)
    return str(caught.value)


@pytest.mark.parametrize("media_type", ["image/png", "IMAGE/JPEG", "image/jpg", "image/gif", "image/webp"])
def test_the_content_and_its_type(media_type: str) -> None:
    expected = ImageFile(CONTENT, media_type.lower())
    assert parse_data_url(f"data:{media_type};base64,{TEXT}", 1000) == expected
    assert parse_data_url(f"DATA:{media_type};charset=utf-8;BASE64,{TEXT.rstrip('=')}", 1000) == expected


def test_everything_else_is_refused_with_what_is_wrong() -> None:
    assert refusal(f"data:image/svg+xml;base64,{TEXT}") == (
        "must have the media type image/png, image/jpeg, image/jpg, image/gif or image/webp, got 'image/svg+xml'"
    )
    assert refusal(f"data:image/png,{TEXT}") == 'must be base64: "data:image/png;base64,…"'
    assert refusal("data:image/png;base64") == 'must be a data URL, "data:image/png;base64,…"; it has no comma'
    assert refusal("data:image/png;base64,a%2Bb=") == "must be base64: its data cannot be decoded"
    assert refusal("data:image/png;base64,AAAAA") == "must be base64: its data cannot be decoded"
    assert refusal(f"data:image/png;base64,{TEXT}", 50) == "must have at most 50 bytes, got about 102"
