"""Hides an upstream's key in what the upstream sends."""

import re
from typing import Final

_SHOWN: Final = "***"


class Secret:
    """The key of an upstream. It is replaced wherever it stands in a text or in JSON, however its characters are
    escaped there.
    """

    def __init__(self, key: str | None) -> None:
        """None: there is nothing to hide."""
        self._key = key or ""
        self._bytes = self._key.encode()
        self._has_short_escapes = any(each in self._key for each in '"\\/')
        self._escaped = re.compile(b"".join(map(_spellings, self._bytes)))

    @property
    def plain(self) -> bytes:
        """As it stands in a JSON string without escapes; empty for none."""
        return self._bytes

    def hide_in(self, text: str) -> str:
        return text.replace(self._key, _SHOWN) if self._key else text

    def hide_in_json(self, content: bytes) -> bytes:
        if not self._key:
            return content
        if b"\\u00" in content or (self._has_short_escapes and b"\\" in content):
            return self._escaped.sub(_SHOWN.encode(), content)
        return content.replace(self._bytes, _SHOWN.encode())


def _spellings(character: int) -> bytes:
    """All that JSON allows for a printable ASCII character in a string."""
    plain = re.escape(bytes([character]))
    digits = b"".join(
        b"[%b%b]" % (digit.lower(), digit.upper()) for digit in (b"%c" % each for each in b"%02x" % character)
    )
    escaped = [rb"\\" + plain] if character in b'"\\/' else []
    own = [] if character in b'"\\' else [plain]  # these stand in no string as they are
    return b"(?:%b)" % b"|".join((*own, *escaped, rb"\\u00" + digits))
