"""Turns the events of an upstream into those that the client gets, and counts tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.marketplace.events import Event


@dataclass(frozen=True, slots=True)
class Used:
    """The tokens of a reply. `cached` is a part of `prompt`, `reasoning` of `completion`. `is_estimated`: the upstream
    did not say.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    is_estimated: bool = False


class Relay:
    """One reply of an upstream. Chunks keep their bytes, except for `model` and `usage`."""

    def __init__(self, requested: str, *, prompt_bytes: int, wants_usage: bool, secret: str | None) -> None:
        """`requested`: what `model` becomes. `prompt_bytes`: the prompt is estimated from them if the upstream does not
        count. `wants_usage`: the client asked for usage in the stream. `secret`: the upstream's key.
        """
        self.finish_reason = ""

    @property
    def used(self) -> Used:
        """What was used so far; an estimate until the upstream reports."""
        raise NotImplementedError

    def pass_on(self, events: Sequence[Event]) -> bytes:
        """What the client gets for these events; empty if nothing. Raises `UpstreamLost` for an error among them."""
        raise NotImplementedError

    def end(self) -> bytes:
        """The last events: the usage if it is wanted, and `[DONE]`. Call it once the upstream's stream has ended.
        Raises `UpstreamLost` if the reply was cut.
        """
        raise NotImplementedError

    def whole(self, content: bytes) -> bytes:
        """What the client gets for a whole reply."""
        raise NotImplementedError
