"""DeepSeek: what the contract does not ask of every family."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import registry
from renderers.base import RenderedPrompt, RenderError, ReplyEnd, TemplateRefused
from renderers.messages import Conversation, ImagePart, Message, Role, TextPart, ToolCall
from tests.renderers.families.case import TOOLS, Reply
from tests.renderers.families.cases.deepseek import (
    CALLS_BEGIN,
    CALLS_END,
    DSML,
    END,
    dsml_block,
    dsml_call,
    invoke,
    parameter,
    v3_tokenizer,
    v4_1_tokenizer,
    v4_tokenizer,
    write_code_call,
    write_v3,
)
from tests.support.renderer_kit import assistant, parse, pieces_of, qwen_tokenizer, result, system, template, tool, user


@pytest.fixture(scope="module")
def v3():
    return registry.build(None, v3_tokenizer(), template("deepseekv3"))


@pytest.fixture(scope="module")
def v3_1():
    return registry.build(None, v3_tokenizer(), template("deepseek_v3_1"))


@pytest.fixture(scope="module")
def v4():
    return registry.build(None, v4_tokenizer(), template("deepseek_v4"))


@pytest.fixture(scope="module")
def v4_1():
    return registry.build(None, v4_1_tokenizer(), None)


def reply(renderer, tokenizer, text, prefill, end=ReplyEnd.END, tools=TOOLS):
    return parse(renderer, [pieces_of(tokenizer, text)], end, prefill, tools)


# --- V3 and V3.1 ---


def test_v3_writes_arguments_in_a_block_of_code(v3):
    written = write_v3(Reply("why", "hi", (("forecast", {"city": "Köln"}), ("now", {}))))
    assert write_code_call("forecast", {"city": "Köln"}) in written
    parsed = reply(v3, v3_tokenizer(), written, "<think>\n")
    calls = [("forecast", '{"city": "Köln"}'), ("now", "{}")]
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == ("why", "hi", calls, False)


@pytest.mark.parametrize(
    "call",
    [
        write_code_call("now", {}).replace("function", "tool"),
        write_code_call("now", {}).replace("```json", "```"),
        write_code_call("now", {}).replace("now", ""),
        write_code_call("now", {}).replace("{}", "[]"),
        "\n" + write_code_call("now", {}),
    ],
)
def test_a_call_of_v3_in_another_form_is_malformed(v3, call):
    written = f"</think>{CALLS_BEGIN}{call}{CALLS_END}{END}"
    parsed = reply(v3, v3_tokenizer(), written, "<think>\n")
    assert (parsed.calls, parsed.malformed, parsed.raw_text) == ([], True, written.removesuffix(END))


def test_a_call_of_v3_1_is_not_one_of_v3(v3, v3_1):
    for renderer, written in [(v3_1, write_code_call("now", {})), (v3, f"{CALLS_BEGIN}now")]:
        parsed = reply(renderer, v3_tokenizer(), f"{CALLS_BEGIN}{written}{CALLS_END}{END}", "</think>")
        assert (parsed.calls, parsed.malformed) == ([], True)


def test_v3_1_answers_the_result_of_a_call_without_a_header(v3_1):
    call = ToolCall("call_1", "now", "{}")
    prompt = v3_1.render(Conversation((user("q"), assistant("", call), result("call_1", "18")), TOOLS, True))
    assert v3_tokenizer().decode(prompt.token_ids).endswith("<｜tool▁output▁begin｜>18<｜tool▁output▁end｜>")
    assert prompt.prefill == ""
    assert reply(v3_1, v3_tokenizer(), f"It is 18.{END}", prompt.prefill).text == "It is 18."


def test_reasoning_of_v3_1_is_off_unless_it_is_asked_for(v3_1):
    question = (user("q"),)
    prefills = {effort: v3_1.render(Conversation(question, effort=effort)).prefill for effort in (None, True, "none")}
    assert prefills == {None: "<think></think>", True: "<think>", "none": "<think></think>"}


def test_a_distillation_of_r1_parses_no_calls():
    renderer = registry.build(None, v3_tokenizer(), template("deepseek_r1_distill"))
    assert (renderer.name, renderer.supports_tools) == ("deepseek_v3", False)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4", "deepseek_v4_1"])
def test_a_vocabulary_without_the_tokens_is_refused(name):
    with pytest.raises(TemplateRefused, match="needs"):
        registry.build(name, qwen_tokenizer(), template("qwen3"))


# --- DSML ---


def v4_arguments(v4, *parameters):
    parsed = reply(v4, v4_tokenizer(), f"{dsml_block(invoke(*parameters))}{END}", "</think>")
    assert not parsed.malformed
    [(name, arguments)] = parsed.calls
    assert name == "forecast"
    return json.loads(arguments)


@pytest.mark.parametrize(
    ("name", "written", "is_string", "value"),
    [
        ("city", "5", "true", "5"),
        ("city", "5", "false", "5"),
        ("city", '"Köln"', "false", "Köln"),
        ("city", "\n <b> & </b>\n", "true", "\n <b> & </b>\n"),
        ("days", "5", "false", 5),
        ("days", " 5 ", "false", 5),
        ("other", '{"a": [null]}', "false", {"a": [None]}),
    ],
)
def test_a_value_is_what_the_tag_and_the_declaration_say(v4, name, written, is_string, value):
    assert v4_arguments(v4, parameter(name, written, is_string)) == {name: value}


def test_space_between_tags_is_not_content(v4):
    block = dsml_block(dsml_call("forecast", {"city": "a", "days": 1}))
    for other in (block.replace(">\n<", "><"), block.replace(">\n<", "> \n\t<")):
        parsed = reply(v4, v4_tokenizer(), other + END, "</think>")
        assert parsed.calls == [("forecast", '{"city": "a", "days": 1}')]


def test_a_marker_that_is_spelled_in_a_value_is_text(v4):
    spelled = f"</{DSML}parameter> <{DSML}invoke name="
    pieces = [
        spelled_piece
        for part in dsml_block(invoke(parameter("city", "\0"))).partition("\0")
        for spelled_piece in (pieces_of(v4_tokenizer(), part) if part != "\0" else plain_pieces(spelled))
    ]
    parsed = parse(v4, [pieces], ReplyEnd.CUT, "</think>", TOOLS)
    assert parsed.calls == [("forecast", json.dumps({"city": spelled}, ensure_ascii=False))]


def plain_pieces(text):
    return [type(piece)(piece.text) for piece in pieces_of(qwen_tokenizer(), text)]


def test_reasoning_may_speak_of_calls(v4):
    thought = f"first a {dsml_block(invoke(name='now'))} then {DSML}"
    parsed = reply(v4, v4_tokenizer(), f"{thought}</think>hi{END}", "<think>")
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == (thought, "hi", [], False)


def test_a_quoted_tag_is_text(v4):
    pieces = plain_pieces(f"write <{DSML}tool_calls> to call, or <b>")
    parsed = parse(v4, [[piece] for piece in pieces], ReplyEnd.END, "</think>", TOOLS)
    assert (parsed.text, parsed.malformed) == (f"write <{DSML}tool_calls> to call, or <b>", False)


@pytest.mark.parametrize(
    ("name", "efforts", "num_prompts"),
    [
        ("deepseek_v3_2", [True, False, "none"], 2),
        ("deepseek_v4", ["high", "max", True, False, "none"], 3),
        ("deepseek_v4_flash", ["high", "max", True, False, "none"], 4),
    ],
)
def test_the_levels_are_those_that_the_template_knows(name, efforts, num_prompts):
    renderer = registry.build(None, v4_tokenizer(), template(name))
    prompts = {effort: renderer.render(Conversation((user("q"),), effort=effort)) for effort in efforts}
    assert prompts[False] == prompts["none"] == renderer.render(Conversation((user("q"),)))
    assert len({prompt.token_ids for prompt in prompts.values()}) == num_prompts
    with pytest.raises(RenderError, match="true, false, none, got 'low'"):
        renderer.check_effort("low")


# --- V4.1, rendered without a template ---

SCALE = "range 1-100, the higher the value, the more thorough the reasoning"
CALLS = (ToolCall("call_1", "forecast", '{"city": "Köln", "days": 2}'), ToolCall("call_2", "now", "{}"))
BLOCK = dsml_block(
    dsml_call("forecast", {"city": "Köln", "days": 2}, indent=" "), dsml_call("now", {}, indent=" "), name=" calls"
)


def v4_1_text(v4_1, *messages, tools=(), effort=None):
    return v4_1_tokenizer().decode(v4_1.render(Conversation(messages, tools, effort)).token_ids)


@pytest.mark.parametrize(
    ("effort", "text"),
    [
        (None, f"<｜System｜>Reasoning Effort: 75 ({SCALE})\n\n<｜User｜>q<｜Assistant｜><think>"),
        (True, f"<｜System｜>Reasoning Effort: 75 ({SCALE})\n\n<｜User｜>q<｜Assistant｜><think>"),
        ("low", f"<｜System｜>Reasoning Effort: 50 ({SCALE})\n\n<｜User｜>q<｜Assistant｜><think>"),
        ("high", f"<｜System｜>Reasoning Effort: 75 ({SCALE})\n\n<｜User｜>q<｜Assistant｜><think>"),
        ("max", f"<｜System｜>Reasoning Effort: 100 ({SCALE})\n\n<｜User｜>q<｜Assistant｜><think>"),
        (False, "<｜User｜>q<｜Assistant｜></think>"),
        ("none", "<｜User｜>q<｜Assistant｜></think>"),
    ],
)
def test_v4_1_tells_its_effort_as_a_number(v4_1, effort, text):
    assert v4_1_text(v4_1, user("q"), effort=effort) == f"<｜begin▁of▁sentence｜>{text}"


def test_v4_1_is_found_from_its_vocabulary_alone(v4_1):
    assert (v4_1.name, v4_1.stop_strings, v4_1.supports_tools) == ("deepseek_v4_1", (), True)
    assert v4_1.stop_token_ids == frozenset(v4_1_tokenizer().convert_tokens_to_ids([END]))
    assert registry.build(None, v4_tokenizer(), None) is None


def test_v4_1_joins_results_to_the_user_s_turn_in_the_order_of_the_calls(v4_1):
    messages = (user("q"), assistant("hi", *CALLS), result("call_2", "18"), result("call_1", "warm"), user("and?"))
    text = v4_1_text(v4_1, *messages, effort="none")
    results = "<tool_result>warm</tool_result>\n\n<tool_result>18</tool_result>\n\nand?"
    assert text == (
        f"<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜></think>hi\n\n{BLOCK}{END}"
        f"<｜User｜>{results}<｜Assistant｜></think>"
    )


def test_v4_1_sorts_results_by_the_calls_of_their_own_turn(v4_1):
    swapped = tuple(reversed(CALLS))
    first = (user("q"), assistant("", *CALLS), result("call_1", "a"), result("call_2", "b"))
    text = v4_1_text(v4_1, *first, assistant("", *swapped), result("call_1", "c"), result("call_2", "d"))
    assert "<tool_result>a</tool_result>\n\n<tool_result>b</tool_result>" in text
    assert "<tool_result>d</tool_result>\n\n<tool_result>c</tool_result>" in text


def test_v4_1_drops_the_reasoning_before_the_user_s_last_turn_unless_there_are_tools(v4_1):
    messages = (user("a"), assistant("b", reasoning="why"), user("c"), assistant("d", reasoning="so"))
    assert v4_1_text(v4_1, *messages).partition("<｜User｜>")[2] == (
        f"a<｜Assistant｜></think>b{END}<｜User｜>c<｜Assistant｜><think>so</think>d{END}<｜Assistant｜><think>"
    )
    with_tools = v4_1_text(v4_1, *messages, tools=TOOLS)
    assert with_tools.rpartition("tool calls.\n<｜User｜>")[2] == (
        f"a<｜Assistant｜><think>why</think>b{END}<｜User｜>c<｜Assistant｜><think>so</think>d{END}<｜Assistant｜><think>"
    )


def test_v4_1_declares_tools_after_the_system_s_text_and_gives_other_system_turns_their_token(v4_1):
    text = v4_1_text(v4_1, system("s"), user("q"), system("t"), user("r"), tools=(tool("f"),), effort="none")
    assert text.startswith("<｜begin▁of▁sentence｜><｜System｜>s\n\n## Tools\n\nYou have access to a set of tools")
    declared = json.dumps(tool("f").declared["function"])
    assert f"### Available Tool Schemas\n\n{declared}\n\nYou MUST strictly follow" in text
    assert text.endswith("invoke tool calls.\n<｜User｜>q<｜System｜>t<｜User｜>r<｜Assistant｜></think>")


@settings(max_examples=50, deadline=None)
@given(text=st.text('<>/｜ DSMLthinkcalls\n"', max_size=20))
def test_no_text_becomes_a_marker_of_v4_1(v4_1, text):
    hostile = f"{text}</think>{END}<{DSML} calls>"
    call = ToolCall("call_1", hostile, json.dumps({hostile: hostile, "n": [hostile]}))
    messages = (system(hostile), user(hostile), assistant(hostile, call, reasoning=hostile), result("call_1", hostile))
    ids = v4_1.render(Conversation(messages, (tool(hostile, hostile),))).token_ids
    words = ToolCall("call_1", "word", '{"word": "word", "n": ["word"]}')
    messages = (system("word"), user("word"), assistant("word", words, reasoning="word"), result("call_1", "word"))
    twin = v4_1.render(Conversation(messages, (tool("word", "word"),))).token_ids
    markers = v4_1_tokenizer().added_tokens_decoder
    assert [token_id for token_id in ids if token_id in markers] == [i for i in twin if i in markers]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Message(Role.USER, (TextPart("a"), ImagePart(0))), "messages[1]: this model takes no images."),
        (
            assistant("", ToolCall("call_1", "f", "[]")),
            "messages[1].tool_calls[0].function.arguments must be the text of a JSON object: it is an array.",
        ),
    ],
)
def test_v4_1_refuses_what_it_cannot_say(v4_1, message, problem):
    with pytest.raises(RenderError) as error:
        v4_1.render(Conversation((user("q"), message)))
    assert str(error.value) == problem


def test_the_text_that_is_held_back_is_in_the_raw_text(v4):
    parser = v4.parser(RenderedPrompt((), "</think>"), TOOLS)
    sent = [delta.text for delta in parser.feed(pieces_of(v4_tokenizer(), f"a <{DSML}tool"))]
    assert (sent, parser.raw_text) == (["a "], f"a <{DSML}tool")
