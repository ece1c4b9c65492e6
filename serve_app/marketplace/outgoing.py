"""The body that a remote upstream gets: the caller's, in which only what must differ is changed."""

import json

from serve_app.config.marketplace import UpstreamConfig
from serve_app.json_structure import edited, members

_USAGE = "include_usage"


def outgoing(content: bytes, upstream: UpstreamConfig, *, stream: bool) -> bytes:
    """`content`: a body that was parsed as a JSON object. Every other field keeps its bytes."""
    changes: dict[str, bytes | None] = {"model": json.dumps(upstream.model).encode(), "price": None}
    if not upstream.takes.prompt_cache_key:
        changes["prompt_cache_key"] = None
    if stream:
        changes["stream_options"] = _stream_options(members(content).get("stream_options", b"null"), upstream)
    return edited(content, changes)


def _stream_options(given: bytes, upstream: UpstreamConfig) -> bytes | None:
    """Usage is always asked for, whether the caller wants it or not."""
    options = given if given.strip().startswith(b"{") else b"{}"
    options = edited(options, {_USAGE: b"true" if upstream.takes.stream_usage else None})
    return options if members(options) else None
