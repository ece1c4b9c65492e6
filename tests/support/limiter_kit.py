"""What tests of limits share: a caller with limits of its own, and a clock that they set."""

from serve_app.access.auth import Caller
from serve_app.config.keys import KeyLimits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def caller(name: str = "k", **limits: int) -> Caller:
    return Caller(name, limits=KeyLimits(**limits))
