"""Strings that remember which characters are trusted.

The oracle: trusted characters are drawn from one alphabet and untrusted ones from another, so each character of a
result tells by itself whether it may be trusted.
"""

import functools
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup, escape

from renderers.templates.provenance import TracedText, escape_html, mask_of, safe

TRUSTED, UNTRUSTED = "AB <\n", "ab\t>\r"
CHARS = st.text(TRUSTED + UNTRUSTED, max_size=12)
PARTS = st.text(TRUSTED + UNTRUSTED, min_size=1, max_size=3)
COUNTS = st.integers(-1, 4)


def text(chars):
    return TracedText(chars, bytes(char in TRUSTED for char in chars))


def literal(chars):
    """As an operation meets it: a template's literal or a caller's string."""
    return text(chars) if set(chars) & set(TRUSTED) else chars


def check(result, expected):
    assert result == expected
    if isinstance(result, list):
        for part in result:
            check(part, str(part))
    else:
        assert len(mask_of(result)) == len(result)
        for char, trusted in zip(result, mask_of(result), strict=True):
            assert trusted == (char in TRUSTED)


@settings(max_examples=100, deadline=None)
@given(CHARS, CHARS)
def test_adding_keeps_the_trust_of_both_sides(left, right):
    check(text(left) + literal(right), left + right)
    check(literal(left) + text(right), left + right)


@settings(max_examples=100, deadline=None)
@given(CHARS, st.none() | PARTS)
def test_stripping_keeps_the_trust_of_what_remains(chars, stripped):
    check(text(chars).strip(stripped), chars.strip(stripped))
    check(text(chars).lstrip(stripped), chars.lstrip(stripped))
    check(text(chars).rstrip(stripped), chars.rstrip(stripped))


@settings(max_examples=200, deadline=None)
@given(CHARS, st.none() | PARTS, COUNTS)
def test_splitting_keeps_the_trust_of_the_parts(chars, separator, count):
    check(text(chars).split(separator, count), chars.split(separator, count))
    check(text(chars).rsplit(separator, count), chars.rsplit(separator, count))


@settings(max_examples=200, deadline=None)
@given(CHARS, CHARS, CHARS, COUNTS)
def test_replacing_keeps_the_trust_of_the_text_and_of_what_is_put_in(chars, old, new, count):
    result = text(chars).replace(old, literal(new), count)
    assert result == chars.replace(old, new, count)
    if old:
        check(result, chars.replace(old, new, count))
    else:
        assert not any(mask_of(result))


@settings(max_examples=100, deadline=None)
@given(CHARS, st.lists(CHARS, max_size=4))
def test_joining_keeps_the_trust_of_separator_and_parts(separator, parts):
    check(text(separator).join(map(literal, parts)), separator.join(parts))


@settings(max_examples=100, deadline=None)
@given(CHARS, st.slices(12), st.integers(0, 3))
def test_slicing_and_repeating_keep_the_trust(chars, part, count):
    check(text(chars)[part], chars[part])
    check(text(chars) * count, chars * count)
    check(count * text(chars), count * chars)


@given(CHARS.filter(bool), st.data())
def test_one_character_keeps_its_trust(chars, data):
    index = data.draw(st.integers(-len(chars), len(chars) - 1))
    check(text(chars)[index], chars[index])


@settings(max_examples=60, deadline=None)
@given(CHARS, PARTS)
def test_removing_a_prefix_or_suffix_keeps_the_trust(chars, part):
    check(text(chars).removeprefix(part), chars.removeprefix(part))
    check(text(chars).removesuffix(part), chars.removesuffix(part))


@given(CHARS)
def test_what_is_not_handled_is_trusted_nowhere(chars):
    for result in (text(chars).upper(), text(chars).title(), text(chars).expandtabs()):
        assert not any(mask_of(result))


def test_a_text_equals_and_hashes_like_its_characters():
    assert {TracedText.trusted("key"): 1}["key"] == 1
    assert str(TracedText.trusted("A")).mask == b"\x01"


def test_a_number_cannot_be_added():
    with pytest.raises(TypeError):
        TracedText.trusted("a") + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(CHARS, st.booleans()), min_size=2, max_size=4))
def test_what_is_added_to_a_safe_text_is_escaped_as_markupsafe_does_and_keeps_its_trust(parts):
    operands = [safe(literal(chars)) if is_safe else literal(chars) for chars, is_safe in parts]
    result = functools.reduce(operator.add, operands)
    expected = functools.reduce(operator.add, [Markup(chars) if is_safe else chars for chars, is_safe in parts])
    assert (str(result), isinstance(result, Markup)) == (str(expected), isinstance(expected, Markup))
    any_safe = any(is_safe for _, is_safe in parts)
    trust = [
        (char in TRUSTED)
        for chars, is_safe in parts
        for char in chars
        for _ in (char if is_safe or not any_safe else str(escape(char)))
    ]
    assert list(mask_of(result)) == trust


def test_an_entity_is_trusted_as_the_character_was_that_it_stands_for():
    result = text("A<a>") + safe("b")
    assert result == "A&lt;a&gt;b"
    assert result.mask == b"\1" + b"\1" * 4 + b"\0" + b"\0" * 4 + b"\0"
    assert escape_html(result) is result


@settings(max_examples=60, deadline=None)
@given(CHARS)
def test_the_trusted_runs_are_the_trusted_characters(chars):
    covered = {index for start, end in text(chars).trusted_runs() for index in range(start, end)}
    assert covered == {index for index, char in enumerate(chars) if char in TRUSTED}
