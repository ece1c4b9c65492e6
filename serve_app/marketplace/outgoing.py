"""The body that a remote upstream gets: the caller's, in which only what must differ is changed."""

import json
from collections.abc import Collection, Iterable
from typing import Final

from serve_app.base.json_structure import edited, members
from serve_app.config.marketplace import UpstreamConfig

_USAGE = "include_usage"
_READ: Final = frozenset({"stream", "max_tokens", "max_completion_tokens", "n", "best_of", "messages", "prompt"})
"""What the service reads besides what it changes: the upstream must read the same."""


def outgoing(content: bytes, upstream: UpstreamConfig, *, stream: bool) -> bytes:
    """`content`: a body that was parsed as a JSON object. Every other field keeps its bytes."""
    given = members(content)
    changes: dict[str, bytes | None] = {"model": json.dumps(upstream.model).encode(), "price": None}
    if not upstream.takes.prompt_cache_key:
        changes["prompt_cache_key"] = None
    if stream:
        changes["stream_options"] = _stream_options(given.get("stream_options", b"null"), upstream)
    changes |= {name: given[name] for name in _READ & given.keys()}  # once, if it is repeated
    return edited(content, changes | _variants(given, changes))


def _stream_options(given: bytes, upstream: UpstreamConfig) -> bytes | None:
    """Usage is always asked for, whether the caller wants it or not."""
    options = given if given.strip().startswith(b"{") else b"{}"
    changes = {_USAGE: b"true" if upstream.takes.stream_usage else None}
    options = edited(options, changes | _variants(members(options), changes))
    return options if members(options) else None


def _variants(given: Iterable[str], names: Collection[str]) -> dict[str, None]:
    """What differs from these names by capitals only goes: servers in Go would read `Model` as `model`."""
    known = {*names, *_READ}
    return dict.fromkeys(name for name in given if name not in known and name.casefold() in known)
