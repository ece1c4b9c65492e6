"""Frames: everything that the engine's face can say survives the way, and nothing else is understood."""

import asyncio
import contextlib
import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.interface import errors
from engines.interface.protocol import FinishReason, Timing, TokenDelta, TokenLogprob
from serve_app.replicas.channel import frames
from serve_app.replicas.status import Load, Status
from serve_app.replicas.unread import merge

token_ids = st.integers(0, 2**31 - 1)
numbers = st.floats(allow_nan=False, max_value=0)
logprobs = st.builds(TokenLogprob, token_ids, numbers, st.lists(st.tuples(token_ids, numbers), max_size=3).map(tuple))
deltas = st.builds(
    TokenDelta,
    st.lists(token_ids, max_size=4).map(tuple),
    st.lists(logprobs, max_size=2).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    st.integers(0, 10**6),
    st.lists(st.none() | logprobs, max_size=3).map(tuple),
    st.none() | st.builds(Timing, st.floats(0, 1e6), st.floats(0, 1e6)),
)
text = st.text(max_size=20)
engine_errors = (
    st.builds(errors.RequestRefused, text, text)
    | st.builds(errors.QueueFull, st.integers(0, 10**6))
    | st.builds(
        lambda kind, message: kind(message),
        st.sampled_from(
            [errors.AdapterRefused, errors.AdapterChanged, errors.AdapterUnavailable, errors.EngineStopped]
        ),
        text,
    )
)


def same(ours, theirs) -> bool:
    if isinstance(ours, errors.EngineError):
        return type(ours) is type(theirs) and ours.args == theirs.args
    return ours == theirs and repr(ours) == repr(theirs)  # deltas are equal whatever their timing is


def bodies(frame: bytes) -> bytes:
    size = int.from_bytes(frame[:4], "little")
    assert len(frame) == 4 + size
    return frame[4:]


@given(st.lists(st.tuples(st.integers(1, 2**40), st.none() | deltas | engine_errors), max_size=20))
def test_events_are_the_same_on_the_other_side(events):
    frame = frames.encode_frame([frames.encode_event(stream_id, event) for stream_id, event in events])
    decoded = frames.decode_events(bodies(frame))
    assert [stream_id for stream_id, _ in decoded] == [stream_id for stream_id, _ in events]
    assert all(same(ours, theirs) for (_, ours), (_, theirs) in zip(events, decoded, strict=True))


loads = st.builds(Load, *[st.integers(0, 2**40)] * 6)
statuses = st.builds(Status, text, text, st.booleans(), st.floats(0, 1e9), loads, st.none() | st.binary(max_size=40))


@given(statuses)
def test_a_status_is_the_same_on_the_other_side(status):
    decoded = frames.decode_events(bodies(frames.encode_frame([frames.encode_status(status)])))
    assert decoded == [(frames.NO_STREAM, status)]


def test_no_field_of_a_load_is_forgotten():
    load = Load(1, 2, 3, 4, 5, 6)
    assert dataclasses.astuple(load) == (1, 2, 3, 4, 5, 6)  # a field that is added must be added to the frames too


@pytest.mark.parametrize(
    "entry", [[0], [0, "app"], [0, "app", "id", True, 7.0, [1] * 7, b""], [0, "a", "i", 1, 1, 1, b""]]
)
def test_a_status_of_another_shape_is_refused(entry):
    with pytest.raises(frames.FrameError):
        frames.decode_events(msgpack.packb([entry]))


def test_no_field_of_a_delta_is_forgotten():
    # A field that is added to TokenDelta must be added to the frames too.
    names = [field.name for field in dataclasses.fields(TokenDelta)]
    assert names == ["token_ids", "logprobs", "finish_reason", "cached_tokens", "prompt_logprobs", "timing"]
    assert [field.name for field in dataclasses.fields(Timing)] == ["queued_s", "prefill_s"]
    assert [field.name for field in dataclasses.fields(TokenLogprob)] == ["token_id", "logprob", "top"]


ARGUMENTS = {errors.RequestRefused: ("top_k", "no"), errors.QueueFull: (3,)}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EngineError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_error_crosses_as_itself(kind):
    error = kind(*ARGUMENTS.get(kind, ("why",)))
    ((_, decoded),) = frames.decode_events(bodies(frames.encode_frame([frames.encode_event(1, error)])))
    assert same(error, decoded)


def test_a_subclass_from_elsewhere_crosses_as_the_nearest_known_error():
    class OutOfMemory(errors.AdapterUnavailable):
        pass

    ((_, decoded),) = frames.decode_events(bodies(frames.encode_frame([frames.encode_event(1, OutOfMemory("full"))])))
    assert same(decoded, errors.AdapterUnavailable("full"))


@given(st.binary(max_size=64))
def test_random_bytes_are_refused_or_decoded_but_never_crash(body):
    for decode in (frames.decode_events, frames.decode_stream_ids):
        with contextlib.suppress(frames.FrameError):
            decode(body)


@pytest.mark.parametrize(
    "entry",
    [[1, "OSError", ["boom"]], [1, "__import__", ["os"]], [1, [1], "wrong", 0, [], []], [1, [1], None], [], 7, [1, 7]],
)
def test_entries_that_are_no_events_are_refused(entry):
    with pytest.raises(frames.FrameError):
        frames.decode_events(msgpack.packb([entry]))


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    async def read() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(frames.encode_hello(b"x" * 33))
        return await frames.read_frame(reader, 32)

    with pytest.raises(frames.FrameError, match="33 bytes is over the limit of 32"):
        asyncio.run(read())


@given(st.lists(deltas, min_size=1, max_size=5))
def test_merged_deltas_hold_all_tokens_in_order(parts):
    merged = merge(parts)
    assert merged.token_ids == tuple(token for part in parts for token in part.token_ids)
    assert merged.logprobs == tuple(logprob for part in parts for logprob in part.logprobs)
    assert merged.finish_reason == parts[-1].finish_reason
    assert (merged.cached_tokens, merged.prompt_logprobs) == (parts[0].cached_tokens, parts[0].prompt_logprobs)
