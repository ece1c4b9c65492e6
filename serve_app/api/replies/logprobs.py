"""Log-probabilities as each endpoint shows them, in JSON."""

import json
import math
from collections.abc import Iterable, Sequence

from engines.interface.protocol import TokenLogprob
from renderers.replies.detokenize import TokenTable
from serve_app.api.replies.scores import Scored
from serve_app.api.schema.replies import ChatLogprob, ChatTop

_LEAST = -9999.0

quoted = json.encoder.encode_basestring_ascii
encoded = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def chat_logprobs(scored: Iterable[Scored], table: TokenTable) -> str:
    """A JSON list of `ChatLogprob`. Written token by token: one encoder call for a long list would block every other
    thread.
    """
    return _list(encoded(_chat_logprob(entry.logprob, table)) for entry in scored if entry.logprob is not None)


def text_logprobs(scored: Iterable[Scored], table: TokenTable) -> str:
    """A JSON object of parallel lists: tokens, token_logprobs, top_logprobs and text_offset."""
    columns = {
        "tokens": _list(quoted(_spelling(entry.token_id, table)) for entry in scored),
        "token_logprobs": _list(_text_logprob(entry.logprob) for entry in scored),
        "top_logprobs": _list(_text_top(entry.logprob, table) for entry in scored),
        "text_offset": _list(str(entry.offset) for entry in scored),
    }
    return "{" + ",".join(f'"{name}":{column}' for name, column in columns.items()) + "}"


def _list(items: Iterable[str]) -> str:
    return f"[{','.join(items)}]"


def _finite(logprob: float) -> float:
    """A value that JSON can hold; it has no infinity. NaN is an engine fault and raises."""
    if math.isnan(logprob):
        raise ValueError("a log-probability is NaN")
    return max(min(logprob, 0.0), _LEAST)


def _chat_logprob(found: TokenLogprob, table: TokenTable) -> ChatLogprob:
    sampled = _chat_top(found.token_id, found.logprob, table)
    top = [_chat_top(token_id, logprob, table) for token_id, logprob in _with_sampled(found)]
    return {**sampled, "top_logprobs": top}


def _with_sampled(found: TokenLogprob) -> Sequence[tuple[int, float]]:
    """The most likely tokens, and the sampled one if it is not among them."""
    if not found.top or any(token_id == found.token_id for token_id, _ in found.top):
        return found.top
    return (*found.top, (found.token_id, found.logprob))


def _chat_top(token_id: int, logprob: float, table: TokenTable) -> ChatTop:
    return {
        "token": table.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(table.token_bytes(token_id)),
    }


def _text_logprob(found: TokenLogprob | None) -> str:
    return "null" if found is None else repr(_finite(found.logprob))


def _text_top(found: TokenLogprob | None, table: TokenTable) -> str:
    if found is None:
        return "null"
    top: dict[str, float] = {}
    for token_id, logprob in _with_sampled(found) or [(found.token_id, found.logprob)]:
        top.setdefault(_spelling(token_id, table), _finite(logprob))
    return encoded(top)


def _spelling(token_id: int, table: TokenTable) -> str:
    """A token's text, or its bytes if it is not valid text alone: different tokens must look different."""
    content = table.token_bytes(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
