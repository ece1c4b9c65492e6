"""What one key may use at a time and per minute. Counted in this process: each ingress replica counts for itself."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve_app.access.auth import Caller
from serve_app.errors import LimitReached

Clock = Callable[[], float]
_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """A minute's worth, refilled evenly. `level` may fall below zero: the next request waits until it is repaid."""

    level: float
    filled_at: float

    def refill(self, per_minute: int, now: float) -> None:
        self.level = min(per_minute, self.level + (now - self.filled_at) * per_minute / _MINUTE_S)
        self.filled_at = now


@dataclass(slots=True)
class _Use:
    running: int = 0
    buckets: dict[str, _Bucket] = field(default_factory=dict)

    def bucket(self, name: str, per_minute: int, now: float) -> _Bucket:
        bucket = self.buckets.setdefault(name, _Bucket(per_minute, now))
        bucket.refill(per_minute, now)
        return bucket


class Lease:
    """The right to run one request."""

    def __init__(self, tokens: _Bucket | None) -> None:
        self._tokens = tokens

    def charge(self, num_tokens: int) -> None:
        """Account for prompt and completion tokens; may be called several times. Below zero: they are given back."""
        if self._tokens is not None:
            self._tokens.level -= num_tokens


class Limiter:
    """Counts what each key uses. It outlives changes of the configuration."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def admit(self, caller: Caller) -> Iterator[Lease]:
        """Count a request for as long as the context lasts. Raises `LimitReached`; then nothing was counted."""
        use = self._uses.setdefault(caller.name, _Use())
        tokens = self._check(caller, use)
        use.running += 1
        try:
            yield Lease(tokens)
        finally:
            use.running -= 1

    def _check(self, caller: Caller, use: _Use) -> _Bucket | None:
        limits, now = caller.limits, self._clock()
        if limits.concurrency is not None and use.running >= limits.concurrency:
            raise LimitReached(f"This key may run {limits.concurrency} requests at a time; that many are running.", 1)
        tokens = None
        if limits.tokens_per_minute is not None:
            tokens = use.bucket("tokens", limits.tokens_per_minute, now)
            _require(tokens, 0, limits.tokens_per_minute, "tokens")
        if limits.requests_per_minute is not None:
            requests = use.bucket("requests", limits.requests_per_minute, now)
            _require(requests, 1, limits.requests_per_minute, "requests")
            requests.level -= 1
        return tokens


def _require(bucket: _Bucket, needed: float, per_minute: int, what: str) -> None:
    """At least `needed` must be in the bucket, and more than nothing."""
    missing = needed - bucket.level
    if missing > 0 or bucket.level <= 0:
        wait_s = max(missing, 0.0) * _MINUTE_S / per_minute
        raise LimitReached(f"This key may use {per_minute} {what} per minute; they are used up.", wait_s)
