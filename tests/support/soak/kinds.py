"""The kinds of clients: what each sends, how it reads, and which refusals it may get."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import Any

from tests.support.files.image_files import COLOURS, data_url, encoded, picture

Json = dict[str, Any]
Refusal = tuple[int, str | None]  # status and code

FULL: frozenset[Refusal] = frozenset({(429, "overloaded"), (503, "overloaded")})
OF_IMAGES = FULL | {(503, "images_unavailable")}
OF_CHECKPOINTS = FULL | {
    (404, "model_not_found"),
    (404, "checkpoint_incomplete"),
    (503, "checkpoint_changed"),
    (503, "checkpoint_unavailable"),
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Manner(Enum):
    """How a client takes its answer: to the end, until it hangs up at any moment, or with pauses."""

    READ = auto()
    LEAVE = auto()
    PAUSE = auto()


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of clients. `refusals`: what it may get instead of a reply; `must_get`: what it must get."""

    name: str
    path: str
    body: Callable[[Random], Json | bytes]
    weight: int = 4
    manner: Manner = Manner.READ
    refusals: frozenset[Refusal] = FULL
    must_get: Refusal | None = None
    key: str | None = None  # in place of the load's own


@dataclass(frozen=True, slots=True)
class Subjects:
    """The models to ask. `checkpoint`: names one that is there, or was until a moment ago."""

    text: str
    vision: str | None = None
    checkpoint: Callable[[Random], str] | None = None
    longest: int = 64  # tokens of a reply
    images: tuple[str, ...] = field(default_factory=lambda: tuple(data_url(encoded(picture(name))) for name in COLOURS))

    def kinds(self) -> list[Kind]:
        found = [*texts(self.text, self.longest), *wrong(self.text)]
        if self.vision is not None:
            found += images(self.vision, self.images)
        if self.checkpoint is not None:
            found += checkpoints(self.checkpoint, self.longest)
        return found


def chat(model: str, longest: int, **fields: Any) -> Callable[[Random], Json]:
    def body(chance: Random) -> Json:
        messages = [{"role": "user", "content": words(chance)}]
        return {"model": model, "messages": messages, "max_tokens": chance.randint(1, longest), **fields}

    return body


def completion(model: str, longest: int, **fields: Any) -> Callable[[Random], Json]:
    def body(chance: Random) -> Json:
        return {"model": model, "prompt": words(chance), "max_tokens": chance.randint(1, longest), **fields}

    return body


def words(chance: Random) -> str:
    """A prompt: half of them begin alike, so that some of it comes from the prefix cache."""
    common = "Once upon a time there was a king. " if chance.random() < 0.5 else ""
    return common + " ".join(chance.choice(["a", "red", "garden", "of", "three", "x"]) for _ in range(20))


def texts(model: str, longest: int) -> list[Kind]:
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    many = completion(model, longest, stream=True, n=2, logprobs=1)
    return [
        Kind("chat", CHAT, chat(model, longest)),
        Kind("chat, streamed", CHAT, chat(model, longest, **with_usage), weight=8),
        Kind("completion", COMPLETIONS, completion(model, longest)),
        Kind("completion, streamed", COMPLETIONS, completion(model, longest, **with_usage), weight=8),
        Kind("two choices", COMPLETIONS, many, weight=2),
        Kind("leaver", COMPLETIONS, completion(model, 4 * longest, stream=True), manner=Manner.LEAVE),
        Kind("leaver, not streamed", CHAT, chat(model, 4 * longest), weight=2, manner=Manner.LEAVE),
        Kind("slow reader", COMPLETIONS, completion(model, longest, stream=True), weight=2, manner=Manner.PAUSE),
    ]


def images(model: str, urls: Collection[str]) -> list[Kind]:
    def asking(url: str, **fields: Any) -> Json:
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour?"}]
        return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}

    choices = [*urls]
    undecodable = data_url(b"no image")
    return [
        Kind("image", CHAT, lambda chance: asking(chance.choice(choices)), refusals=OF_IMAGES),
        Kind("image, streamed", CHAT, lambda chance: asking(chance.choice(choices), stream=True), refusals=OF_IMAGES),
        Kind(
            "leaver with an image",
            CHAT,
            lambda chance: asking(chance.choice(choices)),
            weight=1,
            manner=Manner.LEAVE,
            refusals=OF_IMAGES,
        ),
        Kind(
            "no image",
            CHAT,
            lambda _: asking(undecodable),
            weight=1,
            refusals=OF_IMAGES,
            must_get=(400, "invalid_image"),
        ),
    ]


def checkpoints(name: Callable[[Random], str], longest: int) -> list[Kind]:
    def body(chance: Random) -> Json:
        return completion(name(chance), longest, stream=chance.random() < 0.5)(chance)

    return [
        Kind("checkpoint", COMPLETIONS, body, weight=8, refusals=OF_CHECKPOINTS),
        Kind("leaver of a checkpoint", COMPLETIONS, body, manner=Manner.LEAVE, refusals=OF_CHECKPOINTS),
    ]


def wrong(model: str) -> list[Kind]:
    """Requests that must be refused, each with what it must get."""
    asked: Json = {"model": model, "prompt": "x", "max_tokens": 1}
    refused: dict[str, tuple[Json | bytes, Refusal]] = {
        "no JSON": (b'{"model": ', (400, None)),
        "no messages": ({"model": model, "messages": []}, (400, None)),
        "a temperature of words": ({**asked, "temperature": "hot"}, (400, None)),
        "no tokens of a reply": ({**asked, "max_tokens": -1}, (400, None)),
        "an unknown model": ({**asked, "model": "no/Such"}, (404, "model_not_found")),
        "a prompt that is too long": ({**asked, "prompt": [5] * 200_000}, (400, "context_length_exceeded")),
    }
    found = [
        Kind(name, CHAT if name == "no messages" else COMPLETIONS, lambda _, body=body: body, weight=1, must_get=must)
        for name, (body, must) in refused.items()
    ]
    stranger = Kind(
        "a wrong key", COMPLETIONS, lambda _: asked, weight=1, must_get=(401, "invalid_api_key"), key="rh-no-such-key"
    )
    return [*found, stranger]
