"""Inkling: prompts written without a template, replies in messages, efforts as words and numbers."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import registry
from renderers.base import RenderedPrompt, RenderError, ReplyEnd, TemplateRefused
from renderers.deltas import Piece, ReasoningDelta, TextDelta, ToolCallDelta
from renderers.messages import Conversation, ImagePart, Message, Role, TextPart, Tool, ToolCall
from tests.support.renderer_kit import (
    assistant,
    parse,
    pieces_of,
    qwen_tokenizer,
    result,
    system,
    tool,
    user,
)
from tests.support.special_tokens import INKLING, inkling_tokenizer

WHY = "<|message_model|><|content_thinking|>why<|end_message|>"
HI = "<|message_model|><|content_text|>hi<|end_message|>"
CALL = '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":1}}<|end_message|>'
UNKNOWN = CALL.replace(">f<", ">g<").replace('"f"', '"g"')
END = "<|content_model_end_sampling|>"
F = ("f", '{"a": 1}')
EFFORT = "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"


@pytest.fixture(scope="module")
def inkling():
    return registry.build(None, inkling_tokenizer(), None)


def reply(renderer, text, end=ReplyEnd.END):
    return parse(renderer, [[piece] for piece in pieces_of(inkling_tokenizer(), text)], end)


def rendered(renderer, *messages, tools=(), effort=None):
    return inkling_tokenizer().decode(renderer.render(Conversation(messages, tools, effort)).token_ids)


# --- prompts ---


def test_each_part_of_a_turn_is_a_message_and_the_effort_follows_the_leading_system_messages(inkling):
    call = ToolCall("call_1", "f", '{"b": [1, {"z": 0, "y": "ü"}], "a": null}')
    text = rendered(
        inkling,
        system("be brief"),
        system(""),
        Message(Role.USER, (TextPart("a"), TextPart("b"))),
        assistant("", call, reasoning="why"),
        result("call_1", "18"),
        assistant("so", reasoning=""),
        system("later"),
        user("q"),
        tools=(tool("f"),),
    )
    declared = (
        '[{"description":"Get the weather.","name":"f","parameters":{"properties":{"city":{"type":"string"}},'
        '"required":["city"],"type":"object"},"type":"function"}]'
    )
    assert text == (
        "<|message_system|><|content_text|>be brief<|end_message|>"
        "<|message_system|><|content_text|><|end_message|>"
        f"<|message_system|>tool_declare<|content_xml|>{declared}<|end_message|>"
        f"{EFFORT}"
        "<|message_user|><|content_text|>a<|end_message|><|message_user|><|content_text|>b<|end_message|>"
        "<|message_model|><|content_thinking|>why<|end_message|>"
        '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":null,"b":[1,{"z":0,"y":"ü"}]}}'
        f"<|end_message|>{END}"
        "<|message_tool|>f<|content_text|>18<|end_message|>"
        "<|message_model|><|content_thinking|><|end_message|><|message_model|><|content_text|>so<|end_message|>"
        f"{END}"
        "<|message_system|><|content_text|>later<|end_message|>"
        "<|message_user|><|content_text|>q<|end_message|>"
    )


def test_an_assistant_turn_without_calls_has_its_text_even_if_it_is_empty(inkling):
    text = rendered(inkling, user("q"), assistant(""), assistant(None))
    assert text.endswith(f"<|message_model|><|content_text|><|end_message|>{END}{END}")


def test_a_tool_needs_neither_description_nor_parameters(inkling):
    text = rendered(inkling, user("q"), tools=(Tool("f", {}, {"type": "function", "function": {"name": "f"}}),))
    assert '[{"description":"","name":"f","parameters":{},"type":"function"}]' in text


HOSTILE = st.lists(st.sampled_from([*INKLING, *(marker[:-2] for marker in INKLING), "|>", "a", "\n"])).map("".join)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_text_of_a_caller_becomes_a_marker_or_is_lost(inkling, data):
    def conversation(text):
        call = ToolCall("call_1", text() or "f", json.dumps({text(): {text(): [text()]}}))
        turn = assistant(f"a{text()}", call, reasoning=text())
        function = {"name": text(), "description": text(), "parameters": {text(): text()}}
        return Conversation(
            (system(text()), user(text()), turn, result("call_1", text()), user(text())),
            (Tool(text(), {text(): text()}, {"type": "function", "function": function}),),
        )

    hostile = inkling.render(conversation(lambda: data.draw(HOSTILE)))
    markers = [token_id for token_id in hostile.token_ids if token_id in inkling_tokenizer().added_tokens_decoder]
    twin = inkling.render(conversation(lambda: "word"))
    assert markers == [token_id for token_id in twin.token_ids if token_id in inkling_tokenizer().added_tokens_decoder]


@pytest.mark.parametrize("marker", INKLING)
def test_the_text_of_a_message_is_in_the_prompt_character_by_character(inkling, marker):
    text = f" {marker}a\n{marker} "
    assert rendered(inkling, user(text)).endswith(f"<|message_user|><|content_text|>{text}<|end_message|>")


@pytest.mark.parametrize(
    ("messages", "message", "param"),
    [
        ([Message(Role.USER, (ImagePart(0),))], "messages[0]: this model takes no images.", "messages"),
        (
            [user("q"), assistant(None, ToolCall("1", "f", "[]"))],
            "messages[1].tool_calls[0].function.arguments must be the text of a JSON object: it is an array.",
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([user("\ud800")], "messages: a text holds half of a surrogate pair, U+D800.", "messages"),
    ],
)
def test_what_cannot_be_rendered_is_refused(inkling, messages, message, param):
    with pytest.raises(RenderError) as error:
        inkling.render(Conversation(tuple(messages)))
    assert (str(error.value), error.value.param) == (message, param)


# --- efforts ---


@pytest.mark.parametrize(
    ("effort", "level"),
    [
        (None, "0.9"), ("none", "0"), ("minimal", "0.1"), ("low", "0.2"), ("medium", "0.7"), ("high", "0.9"),
        ("xhigh", "0.99"), ("max", "0.99"), (0, "0"), (0.0, "0"), (-0.0, "0"), (0.99, "0.99"), (0.5, "0.5"),
        (0.125, "0.12"), (0.005, "0"), (0.015, "0.02"), (0.345, "0.34"), (1e-9, "0"), (0.33333, "0.33"),
    ],
)  # fmt: skip
def test_the_effort_is_written_with_two_decimals_at_most(inkling, effort, level):
    inkling.check_effort(effort)
    text = rendered(inkling, user("q"), effort=effort)
    assert text.startswith(
        f"<|message_system|><|content_text|>Thinking effort level: {level}<|end_message|><|message_u"
    )


@pytest.mark.parametrize("effort", [True, False, 1, 0.991, -0.1, 5, float("nan"), "", "None", "0.5", "default"])
def test_another_effort_is_refused_with_the_list_of_those_accepted(inkling, effort):
    for refuse in (lambda: inkling.check_effort(effort), lambda: rendered(inkling, user("q"), effort=effort)):
        with pytest.raises(RenderError) as error:
            refuse()
        assert str(error.value) == (
            "reasoning_effort: this model takes none, minimal, low, medium, high, xhigh, max "
            f"or a number from 0.0 to 0.99, got {effort!r}."
        )
        assert error.value.param == "reasoning_effort"


# --- replies ---


def call_of(body):
    return f"<|message_model|>f<|content_invoke_tool_json|>{body}<|end_message|>"


# (the reply, reasoning, text, calls)
WELL_FORMED = [
    (f"{HI}{END}", "", "hi", []),
    (f"{WHY}{HI}{END}", "why", "hi", []),
    (f"{WHY}{HI}{WHY}{HI}{END}", "whywhy", "hihi", []),
    (f"{WHY}{END}", "why", "", []),
    (f"<|message_model|><|content_text|><|end_message|>{END}", "", "", []),
    (HI.replace("hi", " hi\n") + END, "", " hi\n", []),
    (HI.replace("hi", "a<|content_text|>b<|endoftext|>c") + END, "", "a<|content_text|>b<|endoftext|>c", []),
    (f"{WHY}{CALL}{END}", "why", "", [F]),
    (f"{CALL}{CALL}{HI}{END}", "", "hi", [F, F]),
    (call_of(' {"args": {"a":1}, "name": "f"}\n') + END, "", "", [F]),
    # a call of what was not declared is text, with its markers
    (f"{WHY}{UNKNOWN}{HI}{END}", "why", f"{UNKNOWN}hi", []),
    (UNKNOWN.replace("{", "[") + END, "", UNKNOWN.replace("{", "["), []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), WELL_FORMED)
def test_a_well_formed_reply_comes_back_in_its_parts(inkling, text, reasoning, content, calls):
    parsed = reply(inkling, text)
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == (reasoning, content, calls, False)


BAD = {
    "no message": "hi",
    "text between messages": "x",
    "no author": "<|content_text|>hi<|end_message|>",
    "another author": "<|message_user|><|content_text|>hi<|end_message|>",
    "an author twice": "<|message_model|><|message_model|><|content_text|>hi<|end_message|>",
    "an image": "<|message_model|><|content_image|>hi<|end_message|>",
    "tools": "<|message_model|><|content_xml|>hi<|end_message|>",
    "a call in text": "<|message_model|>f<|content_invoke_tool_text|>hi<|end_message|>",
    "an error of a tool": "<|message_model|><|content_tool_error|>hi<|end_message|>",
    "a text with a name": "<|message_model|>f<|content_text|>hi<|end_message|>",
    "reasoning with a name": "<|message_model|>f<|content_thinking|>hi<|end_message|>",
    "a call without a name": '<|message_model|><|content_invoke_tool_json|>{"name":"f","args":{}}<|end_message|>',
    "another name": call_of('{"name":"g","args":{}}'),
    "a name that is no string": call_of('{"name":1,"args":{}}'),
    "a field too many": call_of('{"name":"f","args":{},"id":1}'),
    "arguments": call_of('{"name":"f","arguments":{}}'),
    "args that are no object": call_of('{"name":"f","args":[]}'),
    "no args": call_of('{"name":"f"}'),
    "no object": call_of("[]"),
    "nothing in a call": call_of(""),
    "bad JSON": call_of('{"name":"f","args":{"a":NaN}}'),
    "two objects": call_of('{"name":"f","args":{}}{"name":"f","args":{}}'),
    "a message in a call": call_of('{"name":"f","args":{}}').removesuffix("<|end_message|>"),
    "a name of several words": "<|message_model|>f g<|content_invoke_tool_json|>{}<|end_message|>",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_malformed_reply_is_text_from_the_error_on_and_all_of_it_raw(inkling, bad):
    parsed = reply(inkling, f"{WHY}{HI}{bad}{HI}{END}")
    assert (parsed.reasoning, parsed.calls, parsed.malformed) == ("why", [], True)
    assert parsed.text == f"hi{parsed.raw_text.removeprefix(WHY + HI)}"
    assert bad in parsed.raw_text


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"<|message_model|><|content_thinking|>why{END}", "why", ""),
        (f"{WHY}<|message_model|><|content_text|>hi{END}", "why", "hi"),
        (f"{WHY}{HI}{END}x{END}", "why", f"hi{END}x"),
        (f"{WHY}<|message_model|>{END}", "why", "<|message_model|>"),
        (f"{WHY}{CALL.removesuffix('<|end_message|>')}{END}", "why", CALL.removesuffix("<|end_message|>")),
        (END, "", ""),
    ],
)
def test_a_reply_that_ends_inside_a_message_or_before_or_goes_on_after_is_malformed(inkling, text, reasoning, content):
    parsed = reply(inkling, text)
    assert (parsed.reasoning, parsed.text, parsed.malformed) == (reasoning, content, True)
    assert parsed.raw_text == text.removesuffix(END)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("", "", ""),
        ("<|message_model|>", "", ""),
        (f"{WHY}<|message_model|>", "why", ""),
        ("<|message_model|><|content_thinking|>wh", "wh", ""),
        (f"{WHY}<|message_model|><|content_text|>h", "why", "h"),
        (f"{WHY}<|message_model|>ge", "why", "<|message_model|>ge"),
        (f"{HI}{CALL.removesuffix('<|end_message|>')}", "", f"hi{CALL.removesuffix('<|end_message|>')}"),
        (HI, "", "hi"),
    ],
)
def test_a_cut_reply_is_no_error_and_keeps_the_kind_of_every_part_but_an_open_call(inkling, text, reasoning, content):
    parsed = reply(inkling, text, ReplyEnd.CUT)
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == (reasoning, content, [], False)
    assert parsed.raw_text == text


def test_markers_spelled_in_ordinary_text_are_text(inkling):
    quoted = f"write {CALL}{END} to call"
    head, tail = (pieces_of(inkling_tokenizer(), part) for part in HI.split("hi"))
    parsed = parse(inkling, [head, *([Piece(char)] for char in quoted), tail], ReplyEnd.END)
    assert (parsed.text, parsed.calls, parsed.malformed) == (quoted, [], False)


def test_text_is_sent_as_it_comes_and_a_call_only_when_it_is_whole(inkling):
    parser = inkling.parser(RenderedPrompt(()), (tool("f"),))
    assert parser.feed(pieces_of(inkling_tokenizer(), "<|message_model|><|content_thinking|>")) == []
    assert parser.feed([Piece("why")]) == [ReasoningDelta("why")]
    assert parser.feed(pieces_of(inkling_tokenizer(), "<|end_message|><|message_model|><|content_text|>h")) == [
        TextDelta("h")
    ]
    *call, close = pieces_of(inkling_tokenizer(), f"<|end_message|>{CALL}")
    assert parser.feed(call) == []
    [delta] = parser.feed([close])
    assert isinstance(delta, ToolCallDelta)
    assert parser.finish(ReplyEnd.END) == []


def test_a_reply_that_is_no_message_is_sent_at_once(inkling):
    parser = inkling.parser(RenderedPrompt(()), ())
    assert parser.feed([Piece("h")]) == [TextDelta("h")]
    later = inkling.parser(RenderedPrompt(()), ())
    assert later.feed([*pieces_of(inkling_tokenizer(), "<|message_model|>"), Piece("so")]) == []
    assert later.feed([Piece(" it")]) == [TextDelta("<|message_model|>so it")]


def test_a_reply_sent_back_is_rendered_as_it_was_sampled(inkling):
    sampled = f"{WHY}{HI}{CALL}{CALL}{END}"
    parsed = reply(inkling, sampled)
    calls = [ToolCall(call_id, *call) for call_id, call in zip(parsed.ids, parsed.calls, strict=True)]
    again = inkling.render(Conversation((user("q"), assistant(parsed.text, *calls, reasoning=parsed.reasoning))))
    ids = inkling_tokenizer().encode(sampled, add_special_tokens=False)
    assert again.token_ids == (*inkling.render(Conversation((user("q"),))).token_ids, *ids)


# --- which models ---


def test_the_family_is_found_from_the_vocabulary_alone(inkling):
    assert (inkling.name, inkling.supports_tools, inkling.stop_strings) == ("inkling", True, ())
    assert inkling.stop_token_ids == frozenset([200006])
    assert registry.build(None, qwen_tokenizer(), None) is None


def test_a_vocabulary_without_the_tokens_is_refused():
    with pytest.raises(TemplateRefused, match=re.escape("needs the special token '<|message_system|>'")):
        registry.build("inkling", qwen_tokenizer(), None)
