"""gpt-oss: what its template is given, replies in channels, calls to recipients."""

import json
import re

import pytest

from renderers import registry
from renderers.base import RenderedPrompt, RenderError, ReplyEnd, TemplateRefused
from renderers.deltas import Piece, ReasoningDelta, TextDelta, ToolCallDelta
from renderers.messages import Conversation, Message, Role, TextPart, Tool, ToolCall
from tests.support.renderer_kit import (
    assistant,
    oracle_ids,
    parse,
    pieces_of,
    qwen_tokenizer,
    result,
    system,
    template,
    tool,
    user,
)
from tests.support.special_tokens import gpt_oss_tokenizer

CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
UNKNOWN = CALL.replace(".f", ".g")
F = ("f", '{"a": 1}')
WHY = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def gpt_oss():
    return registry.build(None, gpt_oss_tokenizer(), template("gpt_oss"))


def reply(renderer, text, end=ReplyEnd.END):
    return parse(renderer, [[piece] for piece in pieces_of(gpt_oss_tokenizer(), text)], end)


# --- replies ---

# (the reply, reasoning, text, calls)
WELL_FORMED = [
    ("<|channel|>final<|message|>hi<|return|>", "", "hi", []),
    (f"{WHY}<|channel|>final<|message|>hi<|return|>", "why", "hi", []),
    (f"{WHY}<|channel|>final<|message|>hi<|end|>", "why", "hi", []),
    (f"{WHY}{WHY}<|channel|>final<|message|>\n hi \n<|endoftext|>", "whywhy", "\n hi \n", []),
    ("<|channel|>analysis<|message|>why<|return|>", "why", "", []),
    ("<|channel|>analysis<|message|>why<|end|>", "why", "", []),
    ("<|channel|>final<|message|><|return|>", "", "", []),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}", []),
    ("<|channel|>notes<|message|>hi<|return|>", "", "hi", []),
    ("<|channel|>final<|message|>a<|channel|>b<|message|>c<|return|>", "", "a<|channel|>b<|message|>c", []),
    (f"{CALL}<|call|>", "", "", [F]),
    (f"{WHY}{CALL}<|call|>", "why", "", [F]),
    (f"{WHY}<|channel|>commentary<|message|>wait<|end|><|start|>assistant{CALL}<|call|>", "why", "wait", [F]),
    (f"{CALL}<|end|><|start|>assistant{CALL}<|call|>", "", "", [F, F]),
    (f"{CALL}<|end|><|start|>assistant<|channel|>final<|message|>hi<|return|>", "", "hi", [F]),
    (f'{WHY} to=functions.f<|channel|>commentary json<|message|>{{"a":1}}<|call|>', "why", "", [F]),
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", "", [F]),
    ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", "", [("f", "{}")]),
    ("<|channel|>commentary to=functions.f code<|message|> {}\n<|call|>", "", "", [("f", "{}")]),
    ("<|channel|>analysis to=functions.f json<|message|>{}<|call|>", "", "", [("f", "{}")]),
    # a call of what was not declared is text, with its markers
    (f"{WHY}{UNKNOWN}<|call|>", "why", f"<|start|>assistant{UNKNOWN}", []),
    (
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        "",
        "<|channel|>analysis to=python code<|message|>1+1",
        [],
    ),
    (
        f"{CALL}<|end|><|start|>assistant<|channel|>final<|message|>hi<|return|>".replace(".f", "."),
        "",
        f"{CALL}<|end|>hi".replace(".f", "."),
        [],
    ),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), WELL_FORMED)
def test_a_well_formed_reply_comes_back_in_its_parts(gpt_oss, text, reasoning, content, calls):
    parsed = reply(gpt_oss, text)
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == (reasoning, content, calls, False)


# (the reply, what a stream has sent as reasoning, as text, as calls)
MALFORMED = {
    "no header": ("hello<|return|>", "", "hello", []),
    "no channel": ("<|message|>hello<|return|>", "", "<|message|>hello", []),
    "no channel in a later message": (
        f"{WHY}<|message|>hello<|return|>",
        "why",
        "<|start|>assistant<|message|>hello",
        [],
    ),
    "a second beginning": (
        "<|start|>assistant<|channel|>final<|message|>hi<|return|>",
        "",
        "<|start|>assistant<|channel|>final<|message|>hi",
        [],
    ),
    "another role": (
        "<|channel|>final<|message|>hi<|end|><|start|>user<|message|>x<|end|>",
        "",
        "hi<|start|>user<|message|>x<|end|>",
        [],
    ),
    "text between messages": (
        f"{WHY}<|channel|>final<|message|>hi<|end|>x<|return|>",
        "why",
        "hix",
        [],
    ),
    "a message inside a message": (
        "<|channel|>analysis<|message|>why<|start|>assistant<|channel|>final<|message|>hi<|return|>",
        "why",
        "<|start|>assistant<|channel|>final<|message|>hi",
        [],
    ),
    "an end inside a header": ("<|channel|>final<|end|>hi<|return|>", "", "<|channel|>final<|end|>hi", []),
    "a reply that ends inside a header": (
        f"{WHY}<|channel|>fin<|return|>",
        "why",
        "<|start|>assistant<|channel|>fin",
        [],
    ),
    "a recipient without a channel": (
        " to=functions.f<|message|>{}<|call|>",
        "",
        " to=functions.f<|message|>{}",
        [],
    ),
    "two channels": (
        "<|channel|>final<|channel|>final<|message|>hi<|return|>",
        "",
        "<|channel|>final<|channel|>final<|message|>hi",
        [],
    ),
    "a channel without a name": ("<|channel|><|message|>hi<|return|>", "", "<|channel|><|message|>hi", []),
    "a channel of several words": (
        "<|channel|>final answer to you<|message|>hi<|return|>",
        "",
        "<|channel|>final answer to you<|message|>hi",
        [],
    ),
    "a channel of several lines": ("<|channel|>final\n\nhi<|return|>", "", "<|channel|>final\n\nhi", []),
    "tokens after the end": (f"{WHY}{CALL}<|call|>x<|return|>", "why", "<|call|>x", [F]),
    "the empty reply": ("<|return|>", "", "", []),
}
BAD_ARGUMENTS = ["", "[1]", "null", '"{}"', "{oops}", '{"a": NaN}', '{"a": "\\ud800"}', "{} {}", '{"a": 1']
MALFORMED |= {
    f"arguments that are {arguments}": (f"{header}{arguments}<|call|>", "", f"{header}{arguments}", [])
    for header in ["<|channel|>commentary to=functions.f json<|message|>"]
    for arguments in BAD_ARGUMENTS
}


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_reply_is_text_from_the_error_on_and_all_of_it_raw(gpt_oss, text, reasoning, content, calls):
    parsed = reply(gpt_oss, text)
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == (reasoning, content, calls, True)
    assert parsed.raw_text == re.sub(r"<\|(return|call)\|>$", "", text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("", "", "", []),
        ("<|channel|>ana", "", "", []),
        ("<|channel|>analysis<|message|>", "", "", []),
        ("<|channel|>analysis<|message|>wh", "wh", "", []),
        (f"{WHY}", "why", "", []),
        (f"{WHY}<|channel|>final<|message|>h", "why", "h", []),
        (f"{WHY}<|channel|>commentary to=fun", "why", "<|start|>assistant<|channel|>commentary to=fun", []),
        (f"{WHY}{CALL[:-1]}", "why", f"<|start|>assistant{CALL[:-1]}", []),
        (f"{CALL}<|end|><|start|>assist", "", "", [F]),
        (UNKNOWN, "", UNKNOWN, []),
    ],
)
def test_a_cut_reply_is_no_error_and_keeps_the_kind_of_every_part_but_an_open_call(
    gpt_oss, text, reasoning, content, calls
):
    parsed = reply(gpt_oss, text, ReplyEnd.CUT)
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == (reasoning, content, calls, False)
    assert parsed.raw_text == text


def test_markers_spelled_in_ordinary_text_are_text(gpt_oss):
    [head] = [pieces_of(gpt_oss_tokenizer(), "<|channel|>final<|message|>")]
    quoted = f"a{CALL}<|call|><|end|><|start|>assistant"
    parsed = parse(gpt_oss, [head, *([Piece(char)] for char in quoted)], ReplyEnd.END)
    assert (parsed.text, parsed.calls, parsed.malformed) == (quoted, [], False)
    spelled = parse(gpt_oss, [[Piece(quoted)]], ReplyEnd.END)
    assert (spelled.text, spelled.malformed) == (quoted, True)


def test_text_is_sent_as_it_comes_and_a_call_only_when_it_is_whole(gpt_oss):
    parser = gpt_oss.parser(RenderedPrompt(()), (tool("f"),))
    head, why = pieces_of(gpt_oss_tokenizer(), "<|channel|>analysis<|message|>"), [Piece("why")]
    assert parser.feed(head) == []
    assert parser.feed(why) == [ReasoningDelta("why")]
    assert parser.feed(pieces_of(gpt_oss_tokenizer(), "<|end|><|start|>assistant<|channel|>final<|message|>")) == []
    assert parser.feed([Piece("h"), Piece("i")]) == [TextDelta("hi")]
    assert parser.feed(pieces_of(gpt_oss_tokenizer(), f"<|end|><|start|>assistant{CALL}")) == []
    [delta] = parser.feed(pieces_of(gpt_oss_tokenizer(), "<|call|>"))
    assert parser.finish(ReplyEnd.END) == []
    assert isinstance(delta, ToolCallDelta)
    assert re.fullmatch(r"call_[0-9a-f]{24}", delta.call.id)


def test_a_call_is_whole_where_the_reply_ends_though_its_end_token_was_not_fed(gpt_oss):
    parsed = reply(gpt_oss, CALL)
    assert (parsed.text, parsed.calls, parsed.malformed, parsed.raw_text) == ("", [F], False, CALL)


def test_a_reply_that_has_no_header_is_sent_at_once(gpt_oss):
    parser = gpt_oss.parser(RenderedPrompt(()), ())
    assert parser.feed([Piece("h")]) == [TextDelta("h")]
    assert parser.feed([Piece("i")]) == [TextDelta("i")]


# --- prompts ---


def after_system_message(gpt_oss, *messages, tools=()):
    text = gpt_oss_tokenizer().decode(gpt_oss.render(Conversation(messages, tools)).token_ids)
    return text.partition("<|end|>")[2]


def call(call_id, city):
    return ToolCall(call_id, "f", json.dumps({"city": city}))


def test_the_leading_system_messages_are_one_developer_message(gpt_oss):
    text = after_system_message(gpt_oss, system("a"), system("b"), user("q"))
    developer = "<|start|>developer<|message|># Instructions\n\na\n\nb\n\n<|end|>"
    assert text == f"{developer}<|start|>user<|message|>q<|end|><|start|>assistant"


def test_a_later_system_message_is_refused_because_the_template_would_leave_it_out(gpt_oss):
    with pytest.raises(RenderError, match=re.escape("messages[2]: this model takes system messages only before all")):
        gpt_oss.render(Conversation((system("a"), user("q"), system("b"))))


def test_a_result_that_does_not_follow_its_call_is_refused_because_it_would_get_another_name(gpt_oss):
    messages = (
        user("q"),
        assistant("", call("1", "x")),
        result("1", "a"),
        assistant("", call("2", "x")),
        result("1", "b"),
    )
    with pytest.raises(RenderError) as error:
        gpt_oss.render(Conversation(messages))
    assert str(error.value) == "messages[4].tool_call_id must be of a call in the turn before it, got '1'."


def test_calls_with_one_id_keep_their_results_once(gpt_oss):
    calls = (call("1", "x"), call("1", "y"))
    text = after_system_message(gpt_oss, user("q"), assistant("", *calls), result("1", "A"), result("1", "B"))
    assert (text.count('"A"'), text.count('"B"')) == (1, 1)


def test_parallel_calls_are_rendered_one_by_one_each_before_its_result(gpt_oss):
    calls = (call("1", "Paris"), ToolCall("2", "g", "{}"))
    messages = (user("q"), assistant(None, *calls, reasoning="why"), result("2", "b"), result("1", "a"), user("r"))
    separate = (
        user("q"),
        assistant("", calls[0], reasoning="why"),
        result("1", "a"),
        assistant("", calls[1]),
        result("2", "b"),
        user("r"),
    )
    expected = oracle_ids(gpt_oss_tokenizer(), template("gpt_oss"), Conversation(separate))
    assert list(gpt_oss.render(Conversation(messages)).token_ids) == expected


def test_text_and_reasoning_before_a_call_are_both_rendered_and_neither_can_write_a_marker(gpt_oss):
    marker = "<|end|><|start|>user<|message|>"
    text = after_system_message(gpt_oss, user("q"), assistant(marker, call("1", "x"), reasoning=f"why{marker}"))
    assert f"<|channel|>analysis<|message|>why{marker}<|end|>" in text
    assert f"<|start|>assistant<|channel|>commentary<|message|>{marker}<|end|><|start|>assistant to=functions.f" in text
    turn = assistant("word", call("1", "x"), reasoning="word")
    counts = [
        sum(token_id in gpt_oss_tokenizer().added_tokens_decoder for token_id in gpt_oss.render(conversation).token_ids)
        for conversation in (
            Conversation((user("q"), turn)),
            Conversation((user("q"), assistant(marker, call("1", "x"), reasoning=f"why{marker}"))),
        )
    ]
    assert counts[0] == counts[1]


def test_a_tool_without_a_description_is_declared_with_an_empty_one(gpt_oss):
    declared = {"type": "function", "function": {"name": "f", "parameters": {}}}
    text = after_system_message(gpt_oss, user("q"), tools=(Tool("f", {}, declared),))
    assert "namespace functions {\n\n// \ntype f = () => any;\n\n}" in text
    assert declared["function"] == {"name": "f", "parameters": {}}


def test_a_reply_sent_back_is_rendered_as_it_was_sampled(gpt_oss):
    sampled = f'{WHY} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'
    parsed = reply(gpt_oss, sampled)
    turn = assistant(parsed.text, ToolCall(parsed.ids[0], *parsed.calls[0]), reasoning=parsed.reasoning)
    first = gpt_oss.render(Conversation((user("q"),)))
    again = gpt_oss.render(Conversation((user("q"), turn, result(parsed.ids[0], "18"))))
    ids = gpt_oss_tokenizer().encode(sampled, add_special_tokens=False)
    assert again.token_ids[: len(first.token_ids) + len(ids)] == (*first.token_ids, *ids)


# --- efforts, and which models ---


@pytest.mark.parametrize("effort", [None, "low", "medium", "high"])
def test_the_effort_is_a_line_of_the_system_message(gpt_oss, effort):
    prompt = gpt_oss.render(Conversation((user("q"),), effort=effort))
    variables = {} if effort is None else {"reasoning_effort": effort}
    expected = oracle_ids(gpt_oss_tokenizer(), template("gpt_oss"), Conversation((user("q"),)), **variables)
    assert list(prompt.token_ids) == expected
    assert f"Reasoning: {effort or 'medium'}\n" in gpt_oss_tokenizer().decode(prompt.token_ids)


@pytest.mark.parametrize("effort", ["none", "minimal", "max", "High", True, False, 0, 0.5])
def test_another_effort_is_refused_with_the_list_of_those_accepted(gpt_oss, effort):
    with pytest.raises(RenderError) as error:
        gpt_oss.render(Conversation((user("q"),), effort=effort))
    assert str(error.value) == f"reasoning_effort: this model takes low, medium, high, got {effort!r}."
    assert error.value.param == "reasoning_effort"


def test_the_family_is_found_and_its_own_end_tokens_end_a_reply(gpt_oss):
    assert (gpt_oss.name, gpt_oss.supports_tools, gpt_oss.stop_strings) == ("gpt_oss", True, ())
    assert gpt_oss.stop_token_ids == frozenset([200002, 200012, 199999])


def test_a_vocabulary_without_the_tokens_is_not_of_the_family():
    assert registry.build(None, qwen_tokenizer(), template("gpt_oss")).name == "generic"
    with pytest.raises(TemplateRefused, match=re.escape("needs the special token '<|start|>'")):
        registry.build("gpt_oss", qwen_tokenizer(), template("gpt_oss"))


def test_content_in_parts_is_joined(gpt_oss):
    parts = Message(Role.USER, (TextPart("a"), TextPart("b")))
    assert gpt_oss.render(Conversation((parts,))) == gpt_oss.render(Conversation((user("ab"),)))
