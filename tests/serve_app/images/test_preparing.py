"""Where prepared images go in a prompt, and what a request may make of them."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from engines.fake import FakeConfig, FakeEngine
from engines.interface.errors import RequestRefused
from engines.interface.protocol import GenerateRequest, HostTensor, SamplingParams
from serve_app.base.errors import InvalidRequest
from serve_app.images.prepared import Frame, ImageLimits, ImageOrder, PreparedImage, PreparedImages, Refusal
from serve_app.images.preparing import fill_placeholders, join_chunks
from serve_app.images.preprocessor import Preprocessor
from serve_app.images.recorder import ImageRecorder
from tests.support.files.image_files import data_url, encoded, picture
from tests.support.readme_blocks import ROOT

PLACEHOLDER, FEATURE, START, END, BREAK = 5, 6, 7, 8, 9
FRAME = Frame(PLACEHOLDER, FEATURE, START, END)
PIXELS = {"pixel_values": HostTensor("|u1", (2,), b"ab")}
WHOLE = (10, START, FEATURE, FEATURE, BREAK, FEATURE, END, 10)
IMAGE = PreparedImage.of(WHOLE, PIXELS)
SOURCE = str(ROOT / "cluster" / "examples" / "tiny-vision")


def test_an_image_is_the_same_with_its_frame_and_without() -> None:
    chat = fill_placeholders((1, PLACEHOLDER, 2), FRAME, [IMAGE])
    chunks = join_chunks([(1, 10, START), IMAGE, (END, 10, 2)], FRAME)
    assert chat == chunks
    assert chat.token_ids == (1, *WHOLE, 2)
    (placed,) = chat.images
    assert (placed.start, placed.length, placed.digest) == (3, 4, IMAGE.digest)


def test_a_template_with_too_few_places_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="has places for 1 of the 2 images"):
        fill_placeholders((1, PLACEHOLDER, 2), FRAME, [IMAGE, IMAGE])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(1,), IMAGE, (END,)], r"prompt_chunks\[1\] must have the image token 7 right before it, got token 1\."),
        ([(START,), IMAGE, (2,)], r"prompt_chunks\[1\] must have the image token 8 right after it, got token 2\."),
        ([(START,), IMAGE], r"prompt_chunks\[1\] must have the image token 8 right after it, got no token\."),
        ([(START,), IMAGE, IMAGE], r"prompt_chunks\[1\] must have the image token 8 right after it, got no token\."),
        ([(START,), IMAGE, (END, FEATURE)], r"prompt_chunks\[2\] must have no image token 6"),
    ],
)
def test_what_is_wrong_in_chunks_is_named_with_its_place(
    parts: list[tuple[int, ...] | PreparedImage], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        join_chunks(parts, FRAME)


def prepared(total_bytes: int, *urls: str, recorder: ImageRecorder | None = None) -> PreparedImages:
    preprocessor = Preprocessor(threads=1, cache_bytes=1 << 20, recorder=recorder)
    try:
        order = ImageOrder(SOURCE, None, urls, ImageLimits(), total_bytes=total_bytes)
        return asyncio.run(preprocessor.prepare(order))
    finally:
        preprocessor.close()


def test_images_that_become_too_large_together_are_refused_from_there_on() -> None:
    red, blue = (data_url(encoded(picture(colour))) for colour in ("red", "blue"))
    (one,) = prepared(1 << 30, red).images
    assert isinstance(one, PreparedImage)
    assert prepared(one.num_bytes, red).images == (one,)
    refused = prepared(one.num_bytes, red, blue, red).images
    assert refused == (
        one,
        Refusal(f"makes the images of this request {2 * one.num_bytes} bytes, more than {one.num_bytes}"),
        Refusal("comes after too many others"),
    )


@dataclass
class Counted:
    """An `ImageRecorder` that keeps what it is told."""

    events: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def fetched(self, seconds: float) -> None:
        self.events.append("fetched")
        self.seconds.append(seconds)

    def prepared(self, seconds: float) -> None:
        self.events.append("prepared")
        self.seconds.append(seconds)

    def reused(self) -> None:
        self.events.append("reused")

    def refused(self) -> None:
        self.events.append("refused")


def test_what_happens_to_each_image_is_counted() -> None:
    red = data_url(encoded(picture("red")))
    recorder = Counted()
    began_at = time.monotonic()
    prepared(1 << 30, red, red, "https://example.com/a.png", recorder=recorder)
    assert recorder.events == ["prepared", "reused", "refused"]
    assert 0 < sum(recorder.seconds) <= time.monotonic() - began_at


def test_an_image_larger_than_the_cache_is_not_kept() -> None:
    preprocessor = Preprocessor(threads=1, cache_bytes=1)
    order = ImageOrder(SOURCE, None, (data_url(encoded(picture("red"))),), ImageLimits())

    async def twice() -> None:
        first, again = await preprocessor.prepare(order), await preprocessor.prepare(order)
        assert first == again
        assert first.images[0] is not again.images[0]

    asyncio.run(twice())
    preprocessor.close()


def test_the_deterministic_engine_takes_no_images() -> None:
    class NoSink:
        def deliver(self, outputs: object) -> None:
            raise AssertionError("nothing was submitted")

    async def submit() -> None:
        engine = FakeEngine(FakeConfig())
        await engine.start()
        images = fill_placeholders((PLACEHOLDER,), FRAME, [IMAGE]).images
        request = GenerateRequest("r", WHOLE, SamplingParams(max_tokens=1, seed=0), images=images)
        try:
            with pytest.raises(RequestRefused, match=r"This model takes no images\."):
                engine.submit(request, NoSink())
        finally:
            await engine.close()

    asyncio.run(submit())
