"""A string that remembers which of its characters the chat template wrote itself.

Trusted are only the characters of the template's own literals and of the renderer's own text: roles and the tokenizer's
special tokens. A marker becomes a token only where all its characters are trusted. So no text of a caller can turn into
one, whatever the template does with it.

Trust is positive: an operation that is not handled below yields an ordinary `str`, which is trusted nowhere. A handled
one moves the mask with the same indices that move the text.
"""

import re
from collections.abc import Iterable
from typing import Self, SupportsIndex

from markupsafe import Markup, escape

_TRUSTED, _UNTRUSTED = b"\x01", b"\x00"
_TRUSTED_RUN = re.compile(rb"\x01+")


_LONG = 100_000
"""Longer texts lose their trust in operations that need a Python step per part."""

_ESCAPED = re.compile("[&<>'\"]")


def mask_of(text: str) -> bytes:
    """One byte per character of `text`, 1 where it is trusted."""
    return text.mask if isinstance(text, TracedText | SafeText) else _UNTRUSTED * len(text)


class TracedText(str):
    """A `str` with a trust mask, equal to and hashing like its plain text."""

    __slots__ = ("mask",)

    mask: bytes

    def __new__(cls, text: str, mask: bytes) -> Self:
        """`mask` has one byte per character of `text`."""
        self = super().__new__(cls, text)
        self.mask = mask
        return self

    @classmethod
    def trusted(cls, text: str) -> Self:
        return cls(text, _TRUSTED * len(text))

    def trusted_runs(self) -> Iterable[tuple[int, int]]:
        """The maximal stretches of trusted characters as (start, end), in order."""
        return (match.span() for match in _TRUSTED_RUN.finditer(self.mask))

    def __str__(self) -> str:
        # `str(x)` is how the compiled template prints a value: it must not lose the mask.
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> "TracedText":
        if isinstance(key, slice):
            return TracedText(str.__getitem__(self, key), self.mask[key])
        index = key.__index__()
        return TracedText(str.__getitem__(self, index), self.mask[index : index + 1 or None])

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented  # an Undefined raises its own error then
        if isinstance(other, Markup):
            return _escaped(self) + other
        return TracedText(str.__add__(self, other), self.mask + mask_of(other))

    def __radd__(self, other: str) -> "TracedText":
        if not isinstance(other, str):
            return NotImplemented
        return TracedText(str.__add__(other, self), mask_of(other) + self.mask)

    def __mul__(self, count: SupportsIndex) -> "TracedText":
        return TracedText(str.__mul__(self, count), self.mask * count)

    __rmul__ = __mul__

    def join(self, items: Iterable[str], /) -> "TracedText":
        parts = list(items)
        return TracedText(str.join(self, parts), self.mask.join(map(mask_of, parts)))

    def strip(self, chars: str | None = None, /) -> "TracedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "TracedText":
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "TracedText":
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> "TracedText":
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> "TracedText":
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if len(self) > _LONG:
            return str.split(self, sep, maxsplit)
        parts: list[str] = []
        start = 0
        for part in str.split(self, sep, maxsplit):
            # Split at whitespace, a part begins with none, so the first place where it fits is its own.
            start = str.index(self, part, start) if sep is None else start
            parts.append(self[start : start + len(part)])
            start += len(part) + len(sep or "")
        return parts

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if len(self) > _LONG:
            return str.rsplit(self, sep, maxsplit)
        parts: list[str] = []
        end = len(self)
        for part in reversed(str.rsplit(self, sep, maxsplit)):
            end = str.rindex(self, part, 0, end) + len(part) if sep is None else end
            parts.append(self[end - len(part) : end])
            end -= len(part) + len(sep or "")
        return parts[::-1]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old or len(self) > _LONG:  # an empty `old` matches between all characters
            return str.replace(self, old, new, count)
        return TracedText(str.replace(self, old, new, count), mask_of(new).join(map(mask_of, self.split(old, count))))


class SafeText(Markup):
    """What the filters `safe` and `escape` make: a text that HTML-escapes whatever is added to it.

    No chat template needs that. Most use `safe` without need, and some of those add markers to the result.
    """

    __slots__ = ("mask",)

    mask: bytes

    def __new__(cls, text: str = "", mask: bytes | None = None) -> Self:
        self = super().__new__(cls, text)
        self.mask = _UNTRUSTED * len(self) if mask is None else mask
        return self

    def __str__(self) -> str:
        return TracedText("".join([self]), self.mask)

    def __add__(self, other: object) -> "SafeText":
        if not isinstance(other, str):
            return NotImplemented
        other = other if isinstance(other, Markup) else _escaped(other)
        return SafeText(str.__add__(self, other), self.mask + mask_of(other))

    def __radd__(self, other: object) -> "SafeText":
        return _escaped(other) + self if isinstance(other, str) else NotImplemented


def _escaped(text: str) -> SafeText:
    """As markupsafe escapes. The characters of an entity are trusted if the original character was."""
    escaped = str.__str__(escape("".join([text])))
    if not isinstance(text, TracedText) or len(text) > _LONG:
        return SafeText(escaped)
    mask, done = bytearray(), 0
    for found in _ESCAPED.finditer("".join([text])):
        start, end = found.span()
        mask += text.mask[done:start] + text.mask[start:end] * len(escape(found[0]))
        done = end
    return SafeText(escaped, bytes(mask + text.mask[done:]))


def safe(value: object) -> SafeText:
    """The filter `safe`."""
    text = str(value)
    return SafeText(text, mask_of(text))


def escape_html(value: object) -> SafeText:
    """The filter `escape`."""
    return value if isinstance(value, SafeText) else _escaped(str(value))
