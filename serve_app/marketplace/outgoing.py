"""The body that a remote upstream gets: the caller's, in which only what must differ is changed."""

from serve_app.config.marketplace import UpstreamConfig


def outgoing(content: bytes, upstream: UpstreamConfig, *, stream: bool) -> bytes:
    """`content`: a body that was parsed as a JSON object. Every other field keeps its bytes."""
    raise NotImplementedError
