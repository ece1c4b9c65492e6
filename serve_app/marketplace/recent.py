"""How fast an endpoint was recently."""

from typing import Final

_NEW: Final = 0.2  # the weight of a new measurement


class Recent:
    """Exponentially weighted means of its replies, for one event loop; None before the first measurement."""

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.tokens_per_s: float | None = None

    def saw_first_token(self, after_s: float) -> None:
        self.first_token_s = _mean(self.first_token_s, after_s)

    def saw_tokens(self, count: int, within_s: float) -> None:
        """A reply's tokens after the first, and the time from the first to the last."""
        if count > 0 and within_s > 0:
            self.tokens_per_s = _mean(self.tokens_per_s, count / within_s)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _NEW * (new - before)
