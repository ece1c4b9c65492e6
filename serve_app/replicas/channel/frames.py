"""Frames of the side channel: encodes and decodes the outputs of an engine step.

A frame is a 4-byte little-endian length and that many bytes of msgpack. A replica sends lists of entries, one per
stream that the step touched, with trailing defaults left out:

    [stream]                                                           the replica has taken the request
    [stream, [token id…], finish, cached, [logprob…], [prompt logprob…], timing]   a `TokenDelta`
    [stream, "QueueFull", [argument…]]                                 an `EngineError`, by the name of its class
    [0, app, replica id, ready, good for, [load…], adapters]           a `Status` of the replica itself

An ingress sends `[stream…]`: streams that are no longer read.
"""

import asyncio
import struct
from collections.abc import Sequence

import msgpack

from engines.interface import errors
from engines.interface.protocol import FinishReason, Timing, TokenDelta, TokenLogprob
from serve_app.replicas.status import Load, Status

MAX_FRAME_BYTES = 64 << 20
MAX_HELLO_BYTES = 1024

Event = TokenDelta | errors.EngineError | None
"""An event of a stream; None: the replica has accepted the request."""

NO_STREAM = 0
"""The stream id of a status, which no stream has."""

_LENGTH = struct.Struct("<I")
_STREAM_AND_TOKENS = 2  # the fields of a delta's entry that are always there

# Errors are sent by name, and only these names are allowed: a frame cannot choose any other class.
_ERRORS: dict[str, type[errors.EngineError]] = {
    error.__name__: error
    for error in (
        errors.EngineError,
        errors.RequestRefused,
        errors.QueueFull,
        errors.AdapterError,
        errors.AdapterRefused,
        errors.AdapterChanged,
        errors.AdapterUnavailable,
        errors.NonFiniteLogits,
        errors.ModelRefused,
        errors.EngineStopped,
    )
}


class FrameError(ValueError):
    """The bytes are not a frame of this protocol, or the frame is over the limit."""


def encode_event(stream_id: int, event: Event) -> bytes:
    """One entry of a frame."""
    packed: bytes
    if event is None:
        packed = msgpack.packb([stream_id])
    elif isinstance(event, errors.EngineError):
        packed = msgpack.packb([stream_id, *_error_fields(event)])
    else:
        packed = msgpack.packb([stream_id, event.token_ids, *_rare_fields(event)])
    return packed


def encode_frame(entries: Sequence[bytes]) -> bytes:
    """A frame of entries. They must be within `MAX_FRAME_BYTES` together."""
    body = b"".join((msgpack.Packer().pack_array_header(len(entries)), *entries))
    return _LENGTH.pack(len(body)) + body


def encode_status(status: Status) -> bytes:
    """One entry of a frame."""
    load = status.load
    numbers = (load.running, load.waiting, load.queued_tokens, load.free_blocks, load.total_blocks, load.others)
    name = (NO_STREAM, status.app, status.replica_id)
    packed: bytes = msgpack.packb((*name, status.is_ready, status.good_for_s, numbers, status.adapters))
    return packed


def decode_events(body: bytes) -> list[tuple[int, Event | Status]]:
    """The events of a frame's body, by stream. Raises `FrameError`."""
    try:
        return [(entry[0], _status(entry) if entry[0] == NO_STREAM else _event(entry)) for entry in _unpack(body)]
    except (TypeError, ValueError, IndexError, KeyError) as exc:
        raise FrameError(f"not a frame of events: {type(exc).__name__}") from exc


def encode_stream_ids(stream_ids: Sequence[int]) -> bytes:
    return encode_frame([msgpack.packb(stream_id) for stream_id in stream_ids])


def decode_stream_ids(body: bytes) -> list[int]:
    """Raises `FrameError`."""
    stream_ids = _unpack(body)
    if not all(type(stream_id) is int for stream_id in stream_ids):
        raise FrameError("not a frame of stream ids")
    return stream_ids


def encode_hello(token: bytes) -> bytes:
    return _LENGTH.pack(len(token)) + token


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """The body of the next frame. Raises `FrameError`, `asyncio.IncompleteReadError` or `ConnectionError`."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > max_bytes:
        raise FrameError(f"a frame of {size} bytes is over the limit of {max_bytes}")
    return await reader.readexactly(size)


def _unpack(body: bytes) -> list:  # type: ignore[type-arg]  # whatever msgpack holds: the callers check it
    try:
        unpacked = msgpack.unpackb(body, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as exc:
        raise FrameError("not msgpack") from exc
    if not isinstance(unpacked, list):
        raise FrameError("not a list")
    return unpacked


def _error_fields(error: errors.EngineError) -> tuple[str, list[str | int]]:
    known = next(kind for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    if known is not type(error) or not all(isinstance(argument, str | int) for argument in error.args):
        return known.__name__, [str(error)]
    return known.__name__, list(error.args)


def _rare_fields(delta: TokenDelta) -> list[object]:
    if not (delta.finish_reason or delta.cached_tokens or delta.logprobs or delta.prompt_logprobs or delta.timing):
        return []
    return [
        delta.finish_reason,
        delta.cached_tokens,
        [_logprob_fields(logprob) for logprob in delta.logprobs],
        [None if logprob is None else _logprob_fields(logprob) for logprob in delta.prompt_logprobs],
        None if delta.timing is None else (delta.timing.queued_s, delta.timing.prefill_s),
    ]


def _logprob_fields(logprob: TokenLogprob) -> tuple[int, float, tuple[tuple[int, float], ...]]:
    return logprob.token_id, logprob.logprob, logprob.top


def _event(entry: list) -> Event:  # type: ignore[type-arg]
    if len(entry) == 1:
        return None
    if isinstance(entry[1], str):
        return _ERRORS[entry[1]](*entry[2])
    if len(entry) == _STREAM_AND_TOKENS:
        return TokenDelta(tuple(entry[1]))
    _, token_ids, finish_reason, cached_tokens, logprobs, prompt_logprobs, timing = entry
    return TokenDelta(
        tuple(token_ids),
        tuple(_logprob(fields) for fields in logprobs),
        None if finish_reason is None else FinishReason(finish_reason),
        cached_tokens,
        tuple(None if fields is None else _logprob(fields) for fields in prompt_logprobs),
        None if timing is None else Timing(*timing),
    )


def _status(entry: list) -> Status:  # type: ignore[type-arg]
    _, app, replica_id, is_ready, good_for_s, load, adapters = entry
    return Status(app, replica_id, is_ready, good_for_s, Load(*load), adapters)


def _logprob(fields: list) -> TokenLogprob:  # type: ignore[type-arg]
    token_id, logprob, top = fields
    return TokenLogprob(token_id, logprob, tuple((token, value) for token, value in top))
