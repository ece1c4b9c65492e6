"""Stop strings over pieces."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers.base import RenderError
from renderers.deltas import Piece
from renderers.replies.stop import MAX_STOP_CHARACTERS, StopMatcher

SMALL_TEXT = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4)


def run(matcher, *chunks):
    texts = [piece.text for chunk in chunks for piece in matcher.feed([Piece(chunk)])]
    return "".join(texts + [piece.text for piece in matcher.flush()])


def cut_by_definition(text, stops):
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None)
@given(SMALL_TEXT, STOPS, st.integers(1, 9))
def test_the_text_is_cut_before_the_first_stop_string_that_is_complete_in_any_chunks(text, stops, size):
    matcher = StopMatcher(stops)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert (run(matcher, *chunks), matcher.matched) == cut_by_definition(text, stops)


@settings(max_examples=200, deadline=None)
@given(SMALL_TEXT, STOPS)
def test_exactly_what_may_yet_become_a_stop_string_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    sent = "".join(piece.text for piece in matcher.feed([Piece(text)]))
    if matcher.matched is None:
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held_len = max(
            (length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings), default=0
        )
        assert sent == text[: len(text) - held_len]


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["STOP"])
    assert matcher.feed([Piece("a ST"), Piece("OP b"), Piece("c"), Piece("<x>", 7)]) == [Piece("a ")]
    assert (matcher.feed([Piece("d")]), matcher.flush(), matcher.matched) == ([], [], "STOP")


def test_a_marker_breaks_a_match_and_comes_after_what_was_held_back():
    matcher = StopMatcher(["ab"])
    assert matcher.feed([Piece("xa"), Piece("<think>", 7), Piece("b")]) == [
        Piece("x"),
        Piece("a"),
        Piece("<think>", 7),
        Piece("b"),
    ]
    assert matcher.matched is None


def test_a_marker_is_never_part_of_a_stop_string():
    matcher = StopMatcher(["<think>"])
    assert matcher.feed([Piece("<think>", 7)]) == [Piece("<think>", 7)]
    assert matcher.matched is None


def test_text_that_only_looked_like_a_stop_string_is_given_at_the_end():
    matcher = StopMatcher(["END."])
    assert matcher.feed([Piece("the END")]) == [Piece("the ")]
    assert matcher.flush() == [Piece("END")]


def test_characters_with_a_meaning_in_patterns_are_ordinary():
    assert run(StopMatcher(["^a", "]b", "-c"]), "x^-]", "a-", "c") == "x^-]a"


def test_without_stop_strings_all_text_passes():
    assert StopMatcher([]).feed([Piece("a\n"), Piece("b")]) == [Piece("a\n"), Piece("b")]


def test_hostile_stop_strings_take_time_linear_in_the_text():
    half = MAX_STOP_CHARACTERS // 2 - 1
    matcher = StopMatcher(["a" * half + "b", "a" * half + "c"])
    start = time.thread_time()
    text = run(matcher, *["a" * 100] * 5000)
    assert len(text) == 500_000
    assert time.thread_time() - start < 10  # by comparing every position with every stop string: hours


def test_too_many_characters_of_stop_strings_are_refused_with_the_limit():
    with pytest.raises(
        RenderError, match=f"at most {MAX_STOP_CHARACTERS} characters, got {MAX_STOP_CHARACTERS + 2}"
    ) as error:
        StopMatcher(["ab"] * (MAX_STOP_CHARACTERS // 2 + 1))
    assert error.value.param == "stop"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RenderError, match="must not be empty"):
        StopMatcher(["a", ""])
