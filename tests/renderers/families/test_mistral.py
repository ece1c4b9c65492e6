"""Mistral: ids of calls, and how a model's form of calls is found."""

import json

import pytest

from renderers import registry
from renderers.base import RenderedPrompt, ReplyEnd
from renderers.deltas import ToolCallDelta
from renderers.messages import Conversation, ToolCall
from tests.renderers.families.case import NOW, TOOLS
from tests.renderers.families.cases.mistral import array_tokenizer, call_id, named_tokenizer
from tests.support.renderer_kit import assistant, parse, pieces_of, result, template, user

NAMED = (named_tokenizer, "mistral_small_3_2", "now[CALL_ID]{}[ARGS]{{}}")
ARRAY = (array_tokenizer, "mistral_nemo_2407", '[{{"name": "now", "arguments": {{}}, "id": "{}"}}]')


def build(tokenizer, name):
    return registry.build(None, tokenizer(), template(name))


def parsed(tokenizer, name, text):
    return parse(build(tokenizer, name), [pieces_of(tokenizer(), text)], ReplyEnd.END, tools=TOOLS)


@pytest.mark.parametrize(("tokenizer", "name", "body"), [NAMED, ARRAY])
def test_a_call_keeps_the_model_s_own_id_and_is_sent_back_as_it_was_sampled(tokenizer, name, body):
    renderer, written = build(tokenizer, name), f"[TOOL_CALLS]{body.format(call_id(7))}</s>"
    reply = parsed(tokenizer, name, written)
    assert reply.ids == [call_id(7)]
    turn = assistant("", ToolCall(reply.ids[0], *reply.calls[0]))
    first = renderer.render(Conversation((user("q"),), (NOW,)))
    again = renderer.render(Conversation((user("q"), turn, result(reply.ids[0], "18")), (NOW,)))
    sampled = tokenizer().backend_tokenizer.encode(written, add_special_tokens=False).ids
    assert list(again.token_ids[: len(first.token_ids) + len(sampled)]) == [*first.token_ids, *sampled]


@pytest.mark.parametrize(("tokenizer", "name", "body"), [NAMED, ARRAY])
@pytest.mark.parametrize("given", ["", "short", "a1B2c3D4-", "a1B2c3D4e5", "ä1B2c3D4e"])
def test_an_id_that_is_none_is_replaced(tokenizer, name, body, given):
    [new] = parsed(tokenizer, name, f"[TOOL_CALLS]{body.format(given)}</s>").ids
    assert new.startswith("call_")


@pytest.mark.parametrize(("tokenizer", "name", "body"), [NAMED, ARRAY])
def test_an_id_that_the_model_writes_twice_is_replaced_once(tokenizer, name, body):
    call = f"[TOOL_CALLS]{body.format(call_id(7))}"
    first, second = parsed(tokenizer, name, f"{call}{call}</s>").ids
    assert first == call_id(7)
    assert second.startswith("call_")


def test_calls_of_an_array_need_no_id():
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]</s>'
    ids = parsed(array_tokenizer, "mistral_nemo_2407", text).ids
    assert len(set(ids)) == 2


@pytest.mark.parametrize(("tokenizer", "name"), [NAMED[:2], ARRAY[:2]])
def test_ids_of_any_form_are_rendered_as_nine_letters_and_digits(tokenizer, name):
    call = ToolCall("call_0123456789abcdef01234567", "now", "{}")
    other = ToolCall("call_\ud800", "now", "{}")
    results = [result(call.id, "18"), result(other.id, "19")]
    prompt = build(tokenizer, name).render(Conversation((user("q"), assistant("", call, other), *results), (NOW,)))
    text = tokenizer().decode(prompt.token_ids)
    ids = {text[start : start + 9] for start in range(len(text)) if text[start : start + 9].isalnum()}
    twice = {short for short in ids if text.count(short) == 2 and any(char.isdigit() for char in short)}
    assert len(twice) == 2


def test_an_answer_s_last_call_is_sent_when_its_end_token_is_there():
    renderer = build(*NAMED[:2])
    parser = renderer.parser(RenderedPrompt(()), TOOLS)
    written = "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"
    assert len(parser.feed(pieces_of(named_tokenizer(), written))) == 1
    [delta] = parser.feed(pieces_of(named_tokenizer(), "</s>"))
    assert isinstance(delta, ToolCallDelta)
    assert parser.finish(ReplyEnd.END) == []


def test_a_reply_that_ends_without_its_end_token_has_its_last_call():
    parser = build(*NAMED[:2]).parser(RenderedPrompt(()), TOOLS)
    assert parser.feed(pieces_of(named_tokenizer(), "[TOOL_CALLS]now[ARGS]{}")) == []
    [delta] = parser.finish(ReplyEnd.END)
    assert isinstance(delta, ToolCallDelta)


SPACED = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% endif %}
{%- endfor %}"""


def test_a_template_may_write_spaces_behind_its_markers():
    renderer = registry.build(None, array_tokenizer(), SPACED)
    assert (renderer.name, renderer.supports_tools) == ("mistral", True)
    reply = ' so[TOOL_CALLS] [{"name": "now", "arguments": {}}]</s>'
    found = parse(renderer, [pieces_of(array_tokenizer(), reply)], ReplyEnd.END, tools=TOOLS)
    assert (found.text, found.calls) == ("so", [("now", "{}")])


def test_without_a_form_of_calls_in_the_template_they_are_text():
    renderer = build(array_tokenizer, "mixtral_8x22b")
    assert not renderer.supports_tools
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    found = parse(renderer, [pieces_of(array_tokenizer(), f"{text}</s>")], ReplyEnd.END, tools=TOOLS)
    assert (found.text, found.calls, found.malformed) == (text, [], False)


def test_arguments_are_written_anew_in_one_style():
    reply = parsed(*NAMED[:2], '[TOOL_CALLS]forecast[ARGS]{"days":1,"city":"K\\u00f6ln","days":2}</s>')
    assert reply.calls == [("forecast", json.dumps({"days": 2, "city": "Köln"}, ensure_ascii=False))]


def test_the_end_token_ends_a_reply():
    for tokenizer, name, _ in (NAMED, ARRAY):
        assert build(tokenizer, name).stop_token_ids == frozenset([tokenizer().eos_token_id])
