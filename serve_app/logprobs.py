"""Log-probabilities as each endpoint shows them."""

from collections.abc import Sequence
from typing import TypedDict

from engines.protocol import TokenLogprob
from renderers.detokenize import TokenTable

_LEAST = -9999.0  # JSON has no infinity


class ChatTop(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatTop):
    top_logprobs: list[ChatTop]


class TextLogprobs(TypedDict):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprob(found: TokenLogprob, table: TokenTable) -> ChatLogprob:
    sampled = _chat_top(found.token_id, found.logprob, table)
    return {
        "token": sampled["token"],
        "logprob": sampled["logprob"],
        "bytes": sampled["bytes"],
        "top_logprobs": [_chat_top(token_id, logprob, table) for token_id, logprob in _with_sampled(found)],
    }


def text_logprobs(
    found: Sequence[TokenLogprob | None], token_ids: Sequence[int], offsets: Sequence[int], table: TokenTable
) -> TextLogprobs:
    """`found` has a None for a token that nothing comes before. All three have one entry per token."""
    return {
        "tokens": [_spelling(token_id, table) for token_id in token_ids],
        "token_logprobs": [None if entry is None else max(entry.logprob, _LEAST) for entry in found],
        "top_logprobs": [None if entry is None else _text_top(entry, table) for entry in found],
        "text_offset": list(offsets),
    }


def joined(parts: Sequence[TextLogprobs]) -> TextLogprobs:
    return {
        "tokens": [token for part in parts for token in part["tokens"]],
        "token_logprobs": [logprob for part in parts for logprob in part["token_logprobs"]],
        "top_logprobs": [top for part in parts for top in part["top_logprobs"]],
        "text_offset": [offset for part in parts for offset in part["text_offset"]],
    }


def _with_sampled(found: TokenLogprob) -> Sequence[tuple[int, float]]:
    """The most likely tokens, and the sampled one if it is not among them."""
    if not found.top or any(token_id == found.token_id for token_id, _ in found.top):
        return found.top
    return (*found.top, (found.token_id, found.logprob))


def _chat_top(token_id: int, logprob: float, table: TokenTable) -> ChatTop:
    return {
        "token": table.token_text(token_id),
        "logprob": max(logprob, _LEAST),
        "bytes": list(table.token_bytes(token_id)),
    }


def _text_top(found: TokenLogprob, table: TokenTable) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in _with_sampled(found) or [(found.token_id, found.logprob)]:
        top.setdefault(_spelling(token_id, table), max(logprob, _LEAST))
    return top


def _spelling(token_id: int, table: TokenTable) -> str:
    """A token's text; one that is no text by itself as its bytes, so that different tokens look different."""
    content = table.token_bytes(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
