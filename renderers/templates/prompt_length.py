"""Whether a long text can fit into so many tokens, checked at a cost that the limit bounds.

Tokenising takes about a microsecond and 300 bytes per character. Megabytes must not be tokenised as a whole only to
find that they are too long.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer as Backend

_SLICE_CHARACTERS = (1 << 11, 1 << 16)
_BORDER_TOKENS = 16  # by so many the tokens of a slice may differ from those it has within the whole


def tokens_beyond(limit: int, texts: Iterable[str], backend: Backend) -> int | None:
    """A number of tokens above the limit that the texts certainly have together. None if they may fit."""
    least, most = _SLICE_CHARACTERS
    slice_len = min(max(least, limit), most)
    count = 0
    for text in texts:
        for start in range(0, len(text), slice_len):
            piece = text[start : start + slice_len]
            # Without special tokens, and faster than `encode`, which also computes where each token begins.
            (encoding,) = backend.encode_batch_fast([piece], add_special_tokens=False)
            count += max(0, len(encoding) - _BORDER_TOKENS)
            if count > limit:
                return count
    return None
