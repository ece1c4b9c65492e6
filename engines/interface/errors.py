"""What can go wrong in an engine.

    EngineError
    ├── RequestRefused     this request cannot run here: an id out of the vocabulary, a prompt longer than the KV cache
    ├── QueueFull          the waiting queue is at its limit; nothing was run
    ├── AdapterError
    │   ├── AdapterRefused     the files cannot be served, or overflow; the message names the file, field or tensor
    │   ├── AdapterChanged     the files do not hold the content that the request was bound to
    │   └── AdapterUnavailable loading took too long or too many loads are queued; a retry may succeed
    ├── NonFiniteLogits    the base model produced NaN or infinity for this request; the others go on
    ├── ModelRefused       the model cannot be served exactly by this engine; raised while it is loaded
    └── EngineStopped      the engine is closed, draining or has failed

Plain classes with positional arguments, so that they survive pickling between processes. No message holds prompt or
completion text.
"""

from typing import TypeVar

Remembered = TypeVar("Remembered", bound=Exception)


class EngineError(Exception):
    """Base of all errors an engine raises or delivers."""


class RequestRefused(EngineError):
    """This request cannot run on this engine; `field` is the request field at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return self.message


class QueueFull(EngineError):
    """The waiting queue is full; `limit` requests wait already."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit

    def __str__(self) -> str:
        return f"The engine's queue is full: {self.limit} requests are waiting."


class AdapterError(EngineError):
    """Base of the errors about one adapter."""


class AdapterRefused(AdapterError):
    """The adapter's files cannot be served; the message names the file, field or tensor. Also raised when its values
    are so large that the model computes NaN or infinity for this request.
    """


class AdapterChanged(AdapterError):
    """The adapter directory no longer holds the content with this digest."""


class AdapterUnavailable(AdapterError):
    """The adapter could not be loaded now; a retry may succeed."""


class NonFiniteLogits(EngineError):
    """The base model produced NaN or infinity for this request."""


class ModelRefused(EngineError):
    """The engine cannot compute this model exactly."""


class EngineStopped(EngineError):
    """The engine no longer takes or finishes requests."""


def afresh(error: Remembered) -> Remembered:
    """The same error as a new instance that was never raised. Errors that are kept are stored and raised as such
    copies. An instance that is raised repeatedly collects the frames of every request that it passed through, with
    their bodies.
    """
    return type(error)(*error.args)
