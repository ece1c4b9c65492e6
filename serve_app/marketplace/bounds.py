"""The most tokens that a request can use at a remote endpoint, whose tokenizer is not known here.

A token of a byte-level vocabulary stands for one byte or more, and no string is shorter in JSON than in UTF-8. So a
body has at least as many bytes as its texts have tokens. The braces and names of a message cover what a template adds
to it; tools may be written with a blank after each comma and colon. What a template adds once is in the configuration,
and so is the cost of an image.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from serve_app.config.marketplace import TokenBounds

_BYTES_PER_TOKEN: Final = 4  # of a guess
_OF_TEXT: Final = frozenset({"type", "text", "cache_control"})  # the fields of a part that is only text
_DATA: Final = "data:"


@dataclass(frozen=True, slots=True)
class PromptSize:
    """`body_bytes`: as received. `text_bytes`: at most, without the images that stand in the body. `num_media`: parts
    of messages that are not only text.
    """

    body_bytes: int
    text_bytes: int
    num_media: int = 0

    @classmethod
    def of(cls, content: bytes, messages: Sequence[object]) -> Self:
        media = [part for part in _parts(messages) if not _is_text(part)]
        blanks = content.count(b",") + content.count(b":")
        return cls(len(content), len(content) + blanks - sum(map(_image_bytes, media)), len(media))


@dataclass(frozen=True, slots=True)
class Bounds:
    """`prompt`, `completion`: the most that there can be, of all choices together. `guessed_prompt`: more likely."""

    guessed_prompt: int
    prompt: int
    completion: int

    @classmethod
    def of(cls, size: PromptSize, asked: int | None, num_choices: int, tokens: TokenBounds) -> Self:
        """`asked`: the limit that the caller sets for a choice."""
        prompt = size.text_bytes + size.num_media * tokens.image + tokens.template
        reply = tokens.reply if asked is None else asked
        if tokens.context is not None:
            prompt, reply = min(prompt, tokens.context), min(reply, tokens.context)
        return cls(min(-(-size.body_bytes // _BYTES_PER_TOKEN), prompt), prompt, num_choices * reply)


def _parts(messages: Sequence[object]) -> Iterator[Mapping[str, Any]]:
    """The parts of the messages, and of what is nested in them."""
    left = list(messages)
    while left:
        holder = left.pop()
        content = holder.get("content") if isinstance(holder, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield part
                left.append(part)


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.keys() <= _OF_TEXT and part.get("type", "text") == "text"


def _image_bytes(part: Mapping[str, Any]) -> int:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return len(url) if isinstance(url, str) and url.startswith(_DATA) else 0
