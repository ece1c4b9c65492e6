"""What one key may use at a time and per minute. Counted in this process, with what other ingresses say that they use
(`sharing/`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve_app.access.auth import Caller
from serve_app.access.sharing.board import Used
from serve_app.base.errors import LimitReached, Overloaded

Clock = Callable[[], float]
_MINUTE_S = 60.0
_REQUESTS, _TOKENS = "requests", "tokens"
_RETRY_S = 1.0  # when a request must wait for another one to end, which can happen at any time
_UNASKED_PART = 4
"""A request that sets no `max_tokens` reserves at most this part of a minute's tokens for its reply: few replies are as
long as the context, and to reserve all of it would let one such request run at a time."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket that holds one minute's limit and refills evenly. `level` may fall below zero: the next request
    waits until it is positive.
    """

    level: float
    filled_at: float
    per_minute: int
    untold: float = 0.0  # what this process took, and other ingresses do not know

    def take(self, amount: float) -> None:
        """Take some out; a negative amount gives back."""
        self.level -= amount
        self.untold += amount

    def refill(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.level = min(per_minute, self.level + (now - self.filled_at) * per_minute / _MINUTE_S)
        self.filled_at = now

    def require(self, needed: float, what: str) -> None:
        """Raise `LimitReached` unless the bucket holds `needed`, and more than zero."""
        missing = needed - self.level
        if missing <= 0 < self.level:
            return
        left = "they are used up" if self.level < 1 else f"this request needs {needed:.0f}, {int(self.level)} are left"
        raise LimitReached(
            f"This key may use {self.per_minute} {what} per minute; {left}.",
            max(missing, 0.0) * _MINUTE_S / self.per_minute,
        )


@dataclass(slots=True)
class _Use:
    """What one key uses. `others`: its requests that other ingresses run."""

    running: int = 0
    num_bytes: int = 0
    others: int = 0
    told: int = 0  # of `running`, to other ingresses
    buckets: dict[str, _Bucket] = field(default_factory=dict)

    def bucket(self, name: str, per_minute: int, now: float) -> _Bucket:
        """What other ingresses took before the key was used here is in a bucket without a limit, as a debt that has
        shrunk since.
        """
        bucket = self.buckets.setdefault(name, _Bucket(0, now, 0))
        if not bucket.per_minute:
            bucket.level += per_minute
        bucket.refill(per_minute, now)
        return bucket

    def charge(self, name: str, amount: float, now: float) -> None:
        """Other ingresses took this."""
        if amount:
            bucket = self.buckets.setdefault(name, _Bucket(0, now, 0))
            if bucket.per_minute:
                bucket.refill(bucket.per_minute, now)
            bucket.level -= amount

    def take_used(self) -> Used:
        """What other ingresses do not know yet. They are told."""
        taken = {name: bucket.untold for name, bucket in self.buckets.items()}
        for bucket in self.buckets.values():
            bucket.untold = 0.0
        self.told = self.running
        return Used(self.running, taken.get(_REQUESTS, 0.0), taken.get(_TOKENS, 0.0))

    @property
    def is_told(self) -> bool:
        return self.told == self.running and not any(bucket.untold for bucket in self.buckets.values())


@dataclass(slots=True)
class _Buckets:
    """The buckets that one request uses; None where the key has no such limit."""

    tokens: _Bucket | None = None
    requests: _Bucket | None = None


class Limiter:
    """Counts what each key uses. It stays when the configuration changes."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self.num_bytes = 0  # that all requests hold

    @contextmanager
    def admit(self, caller: Caller, *, bytes_in_flight: int | None = None) -> Iterator["Lease"]:
        """Count a request for as long as the context lasts. `bytes_in_flight`: the bound for all keys together, None
        for no bound. Raises `LimitReached`; then nothing was counted.
        """
        use = self._use(caller.name)
        buckets = self._check(caller, use)
        use.running += 1
        lease = Lease(self, caller, use, buckets, bytes_in_flight)
        try:
            yield lease
        finally:
            use.running -= 1
            lease.let_go()

    def refill(self, bucket: _Bucket) -> None:
        bucket.refill(bucket.per_minute, self._clock())

    def is_full_by_others(self, caller: Caller) -> bool:
        """Whether the key has as many requests as it may only because of those that other ingresses run."""
        use, limit = self._uses.get(caller.name), caller.limits.concurrency
        return use is not None and limit is not None and use.running < limit <= use.running + use.others

    def take_used(self) -> dict[str, Used]:
        """What each key used since the last call, of those that used anything."""
        return {name: use.take_used() for name, use in self._uses.items() if not use.is_told}

    def hear(self, key: str, used: Used) -> None:
        """Other ingresses run so many requests of a key, and took so much of its minute since the last call."""
        use, now = self._use(key), self._clock()
        use.others = used.running
        use.charge(_REQUESTS, used.requests, now)
        use.charge(_TOKENS, used.tokens, now)

    def tell_again(self) -> None:
        """Others have forgotten what runs here."""
        for use in self._uses.values():
            use.told = 0

    def forget_others(self) -> None:
        """What other ingresses run is not known."""
        for use in self._uses.values():
            use.others = 0

    def _use(self, key: str) -> _Use:
        return self._uses.setdefault(key, _Use())

    def _check(self, caller: Caller, use: _Use) -> _Buckets:
        limits, now = caller.limits, self._clock()
        if limits.concurrency is not None and use.running + use.others >= limits.concurrency:
            raise LimitReached(f"This key may run {limits.concurrency} requests at a time; that many are running.", 1)
        found = _Buckets()
        if limits.tokens_per_minute is not None:
            found.tokens = use.bucket(_TOKENS, limits.tokens_per_minute, now)
            found.tokens.require(0, "tokens")
        if limits.requests_per_minute is not None:
            found.requests = use.bucket(_REQUESTS, limits.requests_per_minute, now)
            found.requests.require(1, "requests")
            found.requests.take(1)
        return found


class Lease:
    """The right to run one request, and what it has reserved of its key's limits."""

    def __init__(
        self, limiter: Limiter, caller: Caller, use: _Use, buckets: _Buckets, bytes_in_flight: int | None
    ) -> None:
        self._limiter = limiter
        self._use = use
        self._buckets = buckets
        self._bytes_in_flight = bytes_in_flight
        self._bytes_of_key = caller.limits.bytes_in_flight
        self._num_bytes = 0
        self._reserved = 0

    def hold(self, num_bytes: int) -> None:
        """Count `num_bytes` for the request from now on. A request that runs alone has no bound here: other limits
        bound one request. Raises `LimitReached` for the key's bound, `Overloaded` for the bound of all keys; then
        nothing was counted.
        """
        more = num_bytes - self._num_bytes
        of_key, of_all = self._use.num_bytes - self._num_bytes, self._limiter.num_bytes - self._num_bytes
        if more > 0:
            if of_key and self._bytes_of_key is not None and of_key + num_bytes > self._bytes_of_key:
                self.give_back()
                raise LimitReached(
                    f"The requests of this key may hold {self._bytes_of_key} bytes at a time; "
                    f"this one needs {num_bytes}, the others hold {of_key}.",
                    _RETRY_S,
                )
            if of_all and self._bytes_in_flight is not None and of_all + num_bytes > self._bytes_in_flight:
                self.give_back()
                raise Overloaded("The service is at its limit of request bytes; try again.")
        self._num_bytes = num_bytes
        self._use.num_bytes += more
        self._limiter.num_bytes += more

    def reserve(self, num_prompt: int, asked: int | None, most: int) -> None:
        """Reserve the tokens of prompt and reply. `asked`: `max_tokens` of the request, None where it is unset and the
        reply may have `most`. A request that is larger than a minute's limit reserves all of it, and may finish. Raises
        `LimitReached`; then nothing was counted.
        """
        tokens = self._buckets.tokens
        if tokens is None:
            return
        self._limiter.refill(tokens)
        expected = min(most, tokens.per_minute // _UNASKED_PART) if asked is None else asked
        needed = min(num_prompt + expected, tokens.per_minute)
        try:
            tokens.require(needed, "tokens")
        except LimitReached:
            self.give_back()
            raise
        tokens.take(needed)
        self._reserved += needed

    def settle(self, num_tokens: int) -> None:
        """Replace the reserved amount by the used amount."""
        if self._buckets.tokens is not None:
            self._limiter.refill(self._buckets.tokens)
            self._buckets.tokens.take(num_tokens - self._reserved)
        self._reserved = 0

    def let_go(self) -> None:
        """End the lease. Return what the request reserved and did not settle."""
        self.settle(0)
        self.hold(0)

    def give_back(self) -> None:
        """A request that is refused does not count against the requests of the minute."""
        requests, self._buckets.requests = self._buckets.requests, None
        if requests is not None:
            requests.take(-1)
