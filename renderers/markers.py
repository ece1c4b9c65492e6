"""The markers of a vocabulary: added tokens that steer a model and never come from a caller's text.

A marker is an added token that is special (`<|im_start|>`), or one that is not special but looks like no word of any
language (Qwen's `<think>`, `<tool_call>`). Added tokens that are plain words, single characters or whitespace (Gemma's
runs of newlines) are ordinary text that happens to have its own id.
"""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

_METASPACE = "▁"


class Tokenizer(Protocol):
    """What renderers use of a transformers fast tokenizer."""

    @property
    def backend_tokenizer(self) -> Backend: ...

    @property
    def chat_template(self) -> str | dict[str, str] | None: ...

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        """Values are strings or lists of strings."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """A vocabulary's added tokens by id: the markers, which of them are special, and those that are plain text."""

    markers: Mapping[int, AddedToken]
    special_ids: frozenset[int]
    plain: Mapping[int, AddedToken]

    def id_of(self, marker: str) -> int | None:
        """The id of the marker with this spelling."""
        return next((token_id for token_id, token in self.markers.items() if token.content == marker), None)


def added_tokens(backend: Backend) -> AddedTokens:
    """Sort the added tokens of a tokenizer."""
    tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    markers = {token_id: token for token_id, token in tokens.items() if token.special or not _is_text(token.content)}
    return AddedTokens(
        markers=markers,
        special_ids=frozenset(token_id for token_id, token in tokens.items() if token.special),
        plain={token_id: token for token_id, token in tokens.items() if token_id not in markers},
    )


def _is_text(content: str) -> bool:
    return len(content) == 1 or all(
        char == _METASPACE or char.isspace() or unicodedata.category(char)[0] in "LMN" for char in content
    )
