"""GLM: the format of calls, typed arguments, white space, efforts, which models."""

import pytest

from renderers import registry
from renderers.base import RenderedPrompt, RenderError, ReplyEnd, TemplateRefused
from renderers.deltas import Piece, ReasoningDelta, TextDelta
from renderers.messages import Conversation, Tool, ToolCall
from tests.renderers.families.cases.glm import glm_tokenizer
from tests.support.renderer_kit import assistant, parse, pieces_of, qwen_tokenizer, result, template, user

NAMES = ["glm4_5", "glm4_6", "glm4_7", "glm5_3"]
PROPERTIES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "o": {"type": "object"},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "any": {},
}
F = Tool("f", {"type": "object", "properties": PROPERTIES}, {"type": "function", "function": {"name": "f"}})


@pytest.fixture(scope="module", params=NAMES)
def glm(request):
    return registry.build(None, glm_tokenizer(), template(request.param))


def reply(renderer, text, end=ReplyEnd.END, prefill="<think>", tools=(F,)):
    return parse(renderer, [[piece] for piece in pieces_of(glm_tokenizer(), text)], end, prefill, tools)


def test_white_space_around_reasoning_text_and_calls_is_no_content(glm):
    parsed = reply(glm, " why \n</think>\n\n hi  there \n\n <tool_call> f </tool_call>\n \n<|observation|>")
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == ("why", "hi  there", [("f", "{}")], False)


def test_white_space_is_held_back_until_it_is_known_to_be_inside(glm):
    parser = glm.parser(RenderedPrompt((), "<think>"), ())
    assert parser.feed([Piece("\n why \n")]) == [ReasoningDelta("why")]
    assert parser.feed([Piece(" not")]) == [ReasoningDelta(" \n not")]
    assert parser.feed(pieces_of(glm_tokenizer(), "</think>\n")) == []
    assert parser.feed([Piece("hi ")]) == [TextDelta("hi")]
    assert parser.finish(ReplyEnd.CUT) == [TextDelta(" ")]


@pytest.mark.parametrize("end", ["<|user|>", "<|observation|>", "<|endoftext|>"])
def test_the_next_role_ends_a_reply(glm, end):
    assert glm_tokenizer().convert_tokens_to_ids(end) in glm.stop_token_ids
    parsed = reply(glm, f"why</think>hi{end}")
    assert (parsed.reasoning, parsed.text, parsed.malformed, parsed.raw_text) == ("why", "hi", False, "why</think>hi")


def test_reasoning_that_is_not_closed_is_all_reasoning(glm):
    parsed = reply(glm, "why<|user|>")
    assert (parsed.reasoning, parsed.text, parsed.malformed) == ("why", "", False)


# (the parameter, as it is written, its value)
VALUES = [
    ("s", "5", '"5"'),
    ("s", '{"a": 1}', '"{\\"a\\": 1}"'),
    ("s", " two\nlines ", '" two\\nlines "'),
    ("s", "null", '"null"'),
    ("s", "", '""'),
    ("n", "5", "5"),
    ("n", " 5\n", "5"),
    ("n", "five", '"five"'),
    ("b", "true", "true"),
    ("l", '[1, "x"]', '[1, "x"]'),
    ("l", "[1,", '"[1,"'),
    ("o", '{"b":1,"a":{"b":2}}', '{"b": 1, "a": {"b": 2}}'),
    ("o", '{"a": NaN}', '"{\\"a\\": NaN}"'),
    ("maybe", "null", "null"),
    ("maybe", "5", '"5"'),
    ("either", "5", "5"),
    ("either", "true", '"true"'),
    ("any", "5", "5"),
    ("any", "5, 6", '"5, 6"'),
    ("any", '"5"', '"5"'),
    ("undeclared", "[]", "[]"),
    ("undeclared", "x", '"x"'),
]


@pytest.mark.parametrize(("parameter", "written", "value"), VALUES)
def test_the_declaration_decides_what_an_argument_is(glm, parameter, written, value):
    call = f"<tool_call>f<arg_key>{parameter}</arg_key><arg_value>{written}</arg_value></tool_call>"
    parsed = reply(glm, f"</think>{call}<|observation|>")
    assert parsed.calls == [("f", f'{{"{parameter}": {value}}}')]


def test_of_a_repeated_argument_the_last_counts(glm):
    argument = "<arg_key>n</arg_key><arg_value>{}</arg_value>"
    parsed = reply(glm, f"</think><tool_call>f{argument.format(1)}{argument.format(2)}</tool_call><|observation|>")
    assert parsed.calls == [("f", '{"n": 2}')]


def test_markers_spelled_in_an_argument_are_text(glm):
    quoted = "</arg_value></tool_call><think>"
    head, tail = (
        pieces_of(glm_tokenizer(), text)
        for text in ("</think><tool_call>f<arg_key>s</arg_key><arg_value>", "</arg_value></tool_call>")
    )
    parsed = parse(glm, [head, [Piece(quoted)], tail], ReplyEnd.END, "<think>", (F,))
    assert parsed.calls == [("f", f'{{"s": "{quoted}"}}')]


@pytest.mark.parametrize(
    ("name", "sampled"),
    [
        (
            "glm4_5",
            "\n<think>why</think>\nhi\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
        ),
        ("glm4_7", "why</think>hi<tool_call>f<arg_key>s</arg_key><arg_value>5</arg_value></tool_call>"),
        ("glm5_3", "why</think>hi<tool_call>f<arg_key>s</arg_key><arg_value>5</arg_value></tool_call>"),
    ],
)
def test_a_reply_sent_back_is_rendered_as_it_was_sampled(name, sampled):
    renderer = registry.build(None, glm_tokenizer(), template(name))
    first = renderer.render(Conversation((user("q"),)))
    parsed = reply(renderer, f"{sampled}<|observation|>", prefill=first.prefill)
    turn = assistant(parsed.text, ToolCall(parsed.ids[0], *parsed.calls[0]), reasoning=parsed.reasoning)
    again = renderer.render(Conversation((user("q"), turn, result(parsed.ids[0], "18"))))
    ids = glm_tokenizer().encode(f"{sampled}<|observation|>", add_special_tokens=False)
    assert again.token_ids[: len(first.token_ids) + len(ids)] == (*first.token_ids, *ids)


def test_results_are_rendered_in_the_order_of_their_calls_where_their_ids_are_known(glm):
    calls = [ToolCall(call_id, "f", "{}") for call_id in ("b", "a", "c")]
    results = {call_id: result(call_id, f"result {call_id}") for call_id in "abcx"}

    def rendered(*ids):
        return glm.render(Conversation((user("q"), assistant("", *calls), *(results[call_id] for call_id in ids))))

    assert rendered("c", "a", "b") == rendered("a", "c", "b") == rendered("b", "a", "c")
    assert rendered("c", "x", "a") != rendered("a", "x", "c")


def test_the_family_is_found_and_begins_a_reply_as_its_template_does(glm):
    assert (glm.name, glm.supports_tools, glm.stop_strings) == ("glm", True, ())
    assert glm.stop_token_ids == frozenset([154820, 154827, 154829])


@pytest.mark.parametrize(
    ("name", "switched_on", "switched_off"),
    [("glm4_5", "", "\n<think></think>"), ("glm4_6", "", "\n<think></think>"), ("glm4_7", "<think>", "</think>")],
)
def test_reasoning_can_be_switched_off_before_glm_5(name, switched_on, switched_off):
    renderer = registry.build(None, glm_tokenizer(), template(name))
    question = (user("q"),)
    prefills = [
        renderer.render(Conversation(question, effort=effort)).prefill for effort in (None, True, False, "none")
    ]
    assert prefills == [switched_on, switched_on, switched_off, switched_off]
    parsed = reply(renderer, "why</think>hi<|user|>", prefill=switched_off)
    assert (parsed.reasoning, parsed.text, parsed.malformed) == ("", "why</think>hi", True)


@pytest.mark.parametrize("effort", [None, "low", "high", "max"])
def test_glm_5_writes_its_effort_first_and_always_reasons(effort):
    renderer = registry.build(None, glm_tokenizer(), template("glm5_3"))
    prompt = renderer.render(Conversation((user("q"),), effort=effort))
    text = f"[gMASK]<sop><|system|>Reasoning Effort: {(effort or 'max').capitalize()}<|user|>q<|assistant|><think>"
    assert glm_tokenizer().decode(prompt.token_ids) == text
    for refused in (True, False, "none", "medium"):
        with pytest.raises(RenderError, match="this model takes low, high, max, got"):
            renderer.check_effort(refused)


def test_a_level_that_the_template_does_not_know_is_not_accepted():
    source = template("glm5_3").replace("['low', 'high', 'max']", "['high', 'max']")
    renderer = registry.build(None, glm_tokenizer(), source)
    with pytest.raises(RenderError, match="this model takes high, max, got 'low'"):
        renderer.check_effort("low")


def test_a_vocabulary_without_the_tokens_is_not_of_the_family():
    assert registry.build(None, qwen_tokenizer(), template("glm4_7")).name == "generic"
    with pytest.raises(TemplateRefused, match="needs the special token '<arg_key>'"):
        registry.build("glm", qwen_tokenizer(), template("glm4_7"))
