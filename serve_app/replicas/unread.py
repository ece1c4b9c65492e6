"""The unread deltas of one generation. Bounded, because a client may read slowly or not at all."""

from collections import deque
from collections.abc import Sequence

from engines.interface.protocol import TokenDelta
from serve_app.base.errors import ClientTooSlow

MAX_WEIGHT = 200_000  # tokens and log-probabilities


class Unread:
    """Deltas in order of arrival."""

    def __init__(self) -> None:
        self._deltas: deque[TokenDelta] = deque()
        self._weight = 0

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def add(self, delta: TokenDelta) -> ClientTooSlow | None:
        """Add a delta. Returns the error that ends the generation if too much is unread. The last delta is always
        accepted, because nothing follows it.
        """
        self._deltas.append(delta)
        self._weight += _weight(delta)
        if self._weight > MAX_WEIGHT and delta.finish_reason is None:
            return ClientTooSlow(f"The client reads too slowly: {len(self._deltas)} deltas are unread.")
        return None

    def take(self) -> TokenDelta:
        """Remove all deltas and return them as one; there must be at least one."""
        delta = merge(self._deltas)
        self._deltas.clear()
        self._weight = 0
        return delta


def merge(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Consecutive deltas of one stream as one."""
    if len(deltas) == 1:
        return deltas[0]
    return TokenDelta(
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        deltas[-1].finish_reason,
        deltas[0].cached_tokens,
        deltas[0].prompt_logprobs,
        deltas[0].timing,
    )


def _weight(delta: TokenDelta) -> int:
    return len(delta.token_ids) + sum(1 + len(logprob.top) for logprob in delta.logprobs)
