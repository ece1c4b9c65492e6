"""Chooses the endpoints of a request, best first.

1. Endpoints that cool down or are down are left out, and those that cost more than the request allows.
2. With a prompt cache key, a weighted rendezvous hash orders the rest: the same key prefers the same endpoint, and
   losing one moves only its keys.
3. Without one, the cheapest comes first, or the one with the lowest latency or the highest throughput recently.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from serve_app.base.errors import NoEndpoint
from serve_app.marketplace.slugs import Endpoint, Wanted

_HASH_BITS = 53  # as many as a float holds exactly


@dataclass(frozen=True, slots=True)
class PriceOptions:
    """The request field `price`; limits in USD per million tokens, None for none."""

    max_prompt: Decimal | None = None
    max_completion: Decimal | None = None
    sort: Literal["price", "latency", "throughput"] = "price"


def order(
    wanted: Wanted, options: PriceOptions, cache_key: str, is_up: Callable[[Endpoint], bool]
) -> tuple[Endpoint, ...]:
    """The endpoints to try, at least one. `cache_key`: "" for none. `is_up`: False for what cools down for this caller,
    or is not ready. Raises `NoEndpoint`, which says why.
    """
    endpoints = wanted.slug.endpoints if wanted.pinned is None else (wanted.pinned,)
    up = [endpoint for endpoint in endpoints if is_up(endpoint)]
    eligible = [endpoint for endpoint in up if _is_within(endpoint, options)]
    if not eligible:
        raise NoEndpoint(_why(wanted, len(endpoints), len(endpoints) - len(up)))
    if cache_key:
        key = f"{wanted.slug.id}\0{cache_key}"
        return tuple(sorted(eligible, key=lambda endpoint: _score(key, endpoint), reverse=True))
    return tuple(sorted(eligible, key=_RANKS[options.sort]))


def _is_within(endpoint: Endpoint, options: PriceOptions) -> bool:
    price = endpoint.price
    return (options.max_prompt is None or price.prompt <= options.max_prompt) and (
        options.max_completion is None or price.completion <= options.max_completion
    )


def _by_price(endpoint: Endpoint) -> Decimal:
    """A million prompt tokens and as many completion tokens."""
    return endpoint.price.prompt + endpoint.price.completion


def _by_latency(endpoint: Endpoint) -> float:
    """An endpoint that was not measured yet comes first, so that it will be."""
    return endpoint.recent.first_token_s or 0.0


def _by_throughput(endpoint: Endpoint) -> float:
    rate = endpoint.recent.tokens_per_s
    return -math.inf if rate is None else -rate


_RANKS: Mapping[str, Callable[[Endpoint], Decimal | float]] = {
    "price": _by_price,
    "latency": _by_latency,
    "throughput": _by_throughput,
}


def _score(key: str, endpoint: Endpoint) -> float:
    """The chance that this is the highest score of all is the endpoint's share of the weights."""
    digest = hashlib.blake2b(f"{key}\0{endpoint.name}".encode(), digest_size=8).digest()
    fraction = ((int.from_bytes(digest) >> (64 - _HASH_BITS)) + 0.5) / 2**_HASH_BITS
    return endpoint.config.weight / -math.log(fraction)


def _why(wanted: Wanted, count: int, num_down: int) -> str:
    if wanted.pinned is not None:
        reason = "is not available now" if num_down else "costs more than price allows"
        return f"The endpoint {wanted.pinned.name!r} of {wanted.slug.id!r} {reason}."
    reasons = [f"{num_down} of {count} are not available now"] if num_down else []
    if num_down < count:
        reasons.append(f"{count - num_down} of {count} cost more than price allows")
    return f"No endpoint of {wanted.slug.id!r} can be used: {', and '.join(reasons)}."
