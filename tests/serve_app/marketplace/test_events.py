"""Server-sent events are the same however their bytes are cut and their lines end."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.marketplace.events import Event, Events, EventTooLong

LINE = st.binary(max_size=20).map(lambda line: line.replace(b"\r", b"").replace(b"\n", b""))
DATA = st.lists(LINE, min_size=1, max_size=3).map(b"\n".join).filter(lambda data: not (data.isspace() or not data))
EVENTS = st.lists(st.builds(Event, DATA, st.sampled_from([b"", b"error"])), max_size=5)
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
BESIDE = st.sampled_from([b"", b": ping", b":", b"id: 1", b"retry: 100", b"unknown: x", b"nonsense"])


def written(events: list[Event], line_end: bytes, beside: bytes, space: bytes) -> bytes:
    lines = []
    for event in events:
        lines += [beside] if beside else []
        lines += [b"event:" + space + event.name] if event.name else []
        lines += [b"data:" + (b" " if line.startswith(b" ") else space) + line for line in event.data.split(b"\n")]
        lines += [b""]
    return b"".join(line + line_end for line in lines)


def read(content: bytes, cuts: list[int]) -> list[Event]:
    reader, places = Events(), [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    pieces = [content[start:end] for start, end in pairwise(places)]
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


CUTS = st.lists(st.integers(0, 1000), max_size=8)


@given(EVENTS, LINE_ENDS, BESIDE, st.sampled_from([b"", b" "]), st.sampled_from([b"", b"\xef\xbb\xbf"]), CUTS)
def test_what_is_written_is_read_however_it_is_cut(events, line_end, beside, space, mark, cuts) -> None:
    assert read(mark + written(events, line_end, beside, space), cuts) == events


@given(st.lists(st.sampled_from([b"data", b":", b" ", b"\n", b"\r", b"x", b"event"])).map(b"".join), CUTS)
def test_where_bytes_are_cut_changes_nothing(content: bytes, cuts: list[int]) -> None:
    assert read(content, cuts) == read(content, [])


@given(EVENTS, LINE_ENDS)
def test_an_event_is_there_with_the_last_byte_of_its_blank_line(events: list[Event], line_end: bytes) -> None:
    reader = Events()
    for event in events:
        content = written([event], line_end, b"", b" ").removesuffix(b"\n" if line_end == b"\r\n" else b"")
        assert reader.feed(content[:-1]) == []
        assert reader.feed(content[-1:]) == [event]
        reader.feed(b"\n" if line_end == b"\r\n" else b"")


def test_a_last_event_without_its_blank_line_counts() -> None:
    assert read(b"data: 1\n\ndata: [DONE]", []) == [Event(b"1"), Event(b"[DONE]")]


@pytest.mark.parametrize(
    "content", [b"\n\n\n", b": a\n\n: b\n\n", b"data\n\n", b"data:\n\n", b"data: \n\n", b"id: 1\n\n"]
)
def test_what_has_no_data_is_no_event(content: bytes) -> None:
    assert read(content, []) == []


@pytest.mark.parametrize("size", [1, 7, 1000, 2000])
def test_an_event_may_be_as_long_as_the_limit_and_no_longer(size: int) -> None:
    def feed(content: bytes) -> list[Event]:
        reader = Events(max_bytes=1000)
        return [event for at in range(0, len(content), size) for event in reader.feed(content[at : at + size])]

    longest = b"data:" + b"a" * 994
    assert feed(longest + b"\n\n") == [Event(b"a" * 994)]
    for content in (
        b"data:" + b"a" * 1000 + b"\n\n",
        b"data:\n" * 1001,
        b"x" * 1001 if size < 1001 else b"data:" * 999,
    ):
        with pytest.raises(EventTooLong, match="an event has more than 1000 bytes"):
            feed(content)


def test_a_comment_without_an_end_takes_no_memory() -> None:
    reader = Events(max_bytes=1000)
    assert [reader.feed(piece) for piece in (b":", *[b"a" * 500] * 100)] == [[]] * 101
    assert reader.feed(b"\ndata: 1\n\n") == [Event(b"1")]
