"""What every family keeps to, in both directions. Each gives its cases (see `case.py`)."""

import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import registry
from renderers.base import RenderError, ReplyEnd
from renderers.deltas import Piece, ReasoningDelta, TextDelta, ToolCallDelta
from renderers.messages import Conversation, Message, TextPart, ToolCall
from tests.renderers.families.case import EFFORTS, TOOLS, Reply, conversations, history, replies
from tests.renderers.families.cases import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    inkling,
    kimi,
    llama,
    mistral,
    nemotron3,
    phi,
    plain,
    qwen,
    qwen3_5,
    smollm,
)
from tests.support.renderer_kit import characters, joined, user

_FAMILIES = (deepseek, gemma, glm, gpt_oss, inkling, kimi, llama, mistral, nemotron3, phi, plain, qwen, qwen3_5, smollm)
CASES = [case for family in _FAMILIES for case in family.CASES]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_mode = pytest.mark.parametrize(
    ("case", "mode"),
    [pytest.param(case, mode, id=f"{case.name}-{mode.effort}") for case in CASES for mode in case.modes],
)
with_template = pytest.mark.parametrize("case", [case for case in CASES if case.template], ids=lambda case: case.name)
with_tools = pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, id=f"{case.name}-{mode.effort}")
        for case in CASES
        for mode in case.modes
        if case.takes_tools
    ],
)
few = settings(max_examples=15, deadline=None)


def test_every_name_of_the_table_has_a_case():
    assert {case.family for case in CASES} == set(registry.RENDERERS)
    assert all(case.renderer.name == case.family for case in CASES)


# --- messages to tokens ---


@with_template
@few
@given(data=st.data())
def test_the_prompt_is_that_of_the_model_s_own_template(case, data):
    conversation = data.draw(conversations(case))
    effort = data.draw(st.sampled_from([None, *case.efforts]))
    asked = Conversation(conversation.messages, conversation.tools, effort)
    expected = case.oracle(
        case.tokenizer(),
        case.source,
        conversation,
        arguments_as_text=case.arguments_as_text,
        **case.efforts.get(effort, {}),
    )
    assert list(case.renderer.render(asked).token_ids) == expected


@every_case
@few
@given(data=st.data())
def test_no_text_becomes_a_marker(case, data):
    conversation = data.draw(conversations(case, hostile_text(case)))
    markers = case.tokenizer().added_tokens_decoder
    with_words = Conversation(tuple(map(_with_words, conversation.messages)), conversation.tools)
    found, expected = (
        [token_id for token_id in case.renderer.render(which).token_ids if token_id in markers]
        for which in (conversation, with_words)
    )
    assert found == expected


def hostile_text(case):
    """Markers and parts of them, which may join with what stands around them."""
    markers = [token.content for token in case.tokenizer().added_tokens_decoder.values()]
    cut = [marker[start:end] for marker in markers for start in range(3) for end in (-1, -2, len(marker))]
    text = st.lists(st.sampled_from([*markers, *cut, "\n", " ", "a", "<", ">", "|"]), max_size=5).map("".join)
    return text.filter(lambda text: not any(read in text for read in case.reads)).map(lambda text: f"a{text}a")


def _with_words(message):
    return Message(
        role=message.role,
        # Equal texts stay equal, since templates compare them; empty ones stay empty.
        content=(TextPart(message.text and f"word{zlib.crc32(message.text.encode())}"),),
        reasoning=message.reasoning and "word",
        tool_calls=tuple(ToolCall(call.id, call.name, _same_keys(call.arguments)) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _same_keys(arguments):
    """As many arguments, with words for keys and texts."""
    values = json.loads(arguments).values()
    return json.dumps({f"w{index}": "word" if isinstance(value, str) else value for index, value in enumerate(values)})


@every_case
def test_exactly_the_efforts_of_the_family_are_accepted(case):
    accepted = [(type(effort), effort) for effort in case.efforts]
    case.renderer.check_effort(None)
    for effort in EFFORTS:
        if (type(effort), effort) in accepted:
            case.renderer.check_effort(effort)
            continue
        with pytest.raises(RenderError) as error:
            case.renderer.check_effort(effort)
        assert error.value.param == "reasoning_effort"
        assert str(error.value).endswith(f"got {effort!r}.")
        words = [str(effort).lower() for effort in case.efforts if isinstance(effort, str | bool)]
        assert all(word in str(error.value) for word in words)


@with_template
def test_the_family_is_found_from_vocabulary_and_template(case):
    found = registry.build(None, case.tokenizer(), case.source).name
    assert (found == case.family) is case.recognised


# --- tokens to a reply ---


@every_mode
@few
@given(data=st.data())
def test_a_reply_comes_back_in_its_parts_and_again_as_history(case, mode, data):
    reply = data.draw(replies(case, mode))
    written = mode.write(reply)
    parsed = case.parse(mode, [case.pieces(written)])
    assert (parsed.fields[:3], parsed.malformed) == (reply.fields, False)
    assert parsed.raw_text == written.removesuffix(case.end)
    is_kept = bool(reply.reasoning) or not mode.reasons or mode.keeps_empty_reasoning
    if reply.calls and mode.keeps_calls and is_kept:
        tokenizer = case.tokenizer()
        prompt, again = case.prompt(mode), case.prompt(mode, user("q"), *history(reply, parsed.ids))
        begun, rendered = tokenizer.decode(prompt.token_ids), tokenizer.decode(again.token_ids)
        assert rendered.startswith(begun + written)


@every_mode
@few
@given(data=st.data())
def test_how_a_reply_is_cut_into_chunks_changes_nothing(case, mode, data):
    parts = st.lists(st.sampled_from([*case.parts, case.end]) | replies(case, mode).map(mode.write), max_size=8)
    pieces = case.pieces("".join(data.draw(parts)))
    end = data.draw(st.sampled_from(ReplyEnd))
    size = data.draw(st.integers(1, 5))
    whole = case.parse(mode, [joined(pieces)], end)
    chunked = case.parse(mode, [pieces[start : start + size] for start in range(0, len(pieces), size)], end)
    by_character = case.parse(mode, [[part] for piece in pieces for part in characters(piece)], end)
    assert whole.fields == chunked.fields == by_character.fields
    text = "".join(piece.text for piece in pieces)
    ended = bool(pieces) and pieces[-1].token_id in case.renderer.stop_token_ids
    assert whole.raw_text == (text.removesuffix(pieces[-1].text) if ended else text)


@every_mode
def test_every_word_is_sent_when_it_is_there(case, mode):
    reply = Reply("umber ochre sienna" if mode.reasons else "", "sphinx quartz")
    parser = case.renderer.parser(case.prompt(mode), TOOLS)
    fed = sent = ""
    for piece in case.pieces(mode.write(reply)):
        sent += "".join(delta.text for delta in parser.feed([piece]))
        fed += piece.text
        for word in f"{reply.reasoning} {reply.text}".split():
            assert word in sent or word not in fed


@with_tools
def test_a_call_is_sent_when_it_is_whole_and_each_has_an_id_of_its_own(case, mode):
    reply = Reply(text="hi", calls=(("forecast", {"days": 1}), ("now", {}), ("now", {})))
    parser = case.renderer.parser(case.prompt(mode), TOOLS)
    deltas = parser.feed(case.pieces(mode.write(reply)))
    calls = [delta.call for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert [call.name for call in calls] == ["forecast", "now", "now"]
    assert len({call.id for call in calls}) == 3


@with_tools
@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_a_call_of_a_function_that_was_not_declared_is_text(case, mode, tools):
    name = "elsewhere" if tools else "now"
    written = mode.write(Reply(text="hi", calls=((name, {}),)))
    parser = case.renderer.parser(case.prompt(mode), tools)
    deltas = [*parser.feed(case.pieces(written)), *parser.finish(ReplyEnd.END)]
    assert all(isinstance(delta, TextDelta | ReasoningDelta) for delta in deltas)
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert text.removeprefix("hi") in _inserted(mode.write(Reply(text="hi")), written)
    assert not parser.malformed


def _inserted(shorter, longer):
    """What has to be put into the one text, somewhere, to make the other."""
    added_len = len(longer) - len(shorter)
    splits = [at for at in range(len(shorter) + 1) if longer.startswith(shorter[:at]) and longer.endswith(shorter[at:])]
    return {longer[at : at + added_len] for at in splits}


@every_mode
def test_markers_that_are_only_spelled_are_text(case, mode):
    if not case.markers_are_tokens:
        pytest.skip("its markers are text")
    written = mode.write(Reply("why" if mode.reasons else "", "hi", (("now", {}),) if case.takes_tools else ()))
    parsed = case.parse(mode, [[Piece(written)]], ReplyEnd.CUT)
    assert (parsed.calls, parsed.malformed) == ([], case.needs_markers)
    assert (parsed.reasoning + parsed.text).strip() == written.strip()


@pytest.mark.parametrize(
    ("case", "written", "expected"),
    [
        pytest.param(case, written, expected, id=f"{case.name}-{kind}")
        for case in CASES
        for kind, (written, *expected) in case.malformed.items()
    ],
)
def test_a_malformed_reply_is_text_from_the_error_on_and_all_of_it_raw(case, written, expected):
    parsed = case.parse(case.modes[0], [case.pieces(written)])
    assert [parsed.reasoning, parsed.text, parsed.calls, parsed.malformed] == [*expected, True]
    assert parsed.raw_text == written.removesuffix(case.end)


@every_mode
@few
@given(data=st.data())
def test_a_reply_that_is_cut_anywhere_is_no_error_and_keeps_the_kind_of_what_is_closed(case, mode, data):
    reply = data.draw(replies(case, mode))
    pieces = case.pieces(mode.write(reply))
    cut = data.draw(st.integers(0, len(pieces) - 1))
    parsed = case.parse(mode, [pieces[:cut]], ReplyEnd.CUT)
    reasoning, text, calls = reply.fields
    assert not parsed.malformed
    assert parsed.raw_text == "".join(piece.text for piece in pieces[:cut])
    assert calls[: len(parsed.calls)] == parsed.calls
    for whole, part in [(reasoning, parsed.reasoning), (text, parsed.text)]:
        begun_tag = parsed.raw_text.endswith(part)
        assert whole.startswith(part.rstrip("\n")) or part.startswith(whole) or begun_tag
