"""Gemma 4: its notation of arguments, its tool loop, its efforts."""

import json
import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import registry
from renderers.base import ReplyEnd
from renderers.deltas import Piece
from renderers.messages import Conversation, ToolCall
from renderers.replies.detokenize import token_table
from tests.renderers.families.case import FORECAST, NOW, TOOLS
from tests.renderers.families.cases.gemma import END, QUOTE, gemma4_tokenizer, write_call
from tests.support.renderer_kit import assistant, parse, pieces_of, result, template, user


@cache
def build(name="gemma4_v5"):
    return registry.build(None, gemma4_tokenizer(), template(name))


def calls_of(body):
    """`@` stands for the marker around strings."""
    text = f"<|tool_call>{body}<tool_call|>{END}".replace("@", QUOTE)
    return parse(build(), [pieces_of(gemma4_tokenizer(), text)], ReplyEnd.END, tools=TOOLS).calls


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{city:@Köln@,days:3}", '{"city": "Köln", "days": 3}'),
        ("{share:-1.5e-05,exact:true,note:null}", '{"share": -1.5e-05, "exact": true, "note": null}'),
        ("{note:None}", '{"note": null}'),
        ("{place:{lat:1,ö:[{x:@y@},[],{}]}}", '{"place": {"lat": 1, "ö": [{"x": "y"}, [], {}]}}'),
        ("{tags:[@a@,@@]}", '{"tags": ["a", ""]}'),
        ('{city:@a, b: {c} [d] "e" null@}', '{"city": "a, b: {c} [d] \\"e\\" null"}'),
        ("{city:@a\\b\nc@}", '{"city": "a\\\\b\\nc"}'),
        ("{@city@:@a@}", '{"city": "a"}'),
        ("{ city: @a@, days: 3 }", '{"city": "a", "days": 3}'),
        ("{days:1,days:2}", '{"days": 2}'),
        ("{days:@5@}", '{"days": "5"}'),
        ("{my key-1.x:@a@}", '{"my key-1.x": "a"}'),
        ("{}", "{}"),
    ],
)
def test_arguments_are_read_from_the_model_s_notation(written, arguments):
    assert calls_of(f"call:forecast{written}") == [("forecast", arguments)]


TEXTS = st.text(st.sampled_from("ab Z9.,:{}[]\"'\n\\éü日👍🏽<|>"), max_size=12)
KEYS = st.text(st.sampled_from("ab_Z9-é日"), min_size=1, max_size=6)
LEAVES = TEXTS | st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, width=32)
VALUES = st.recursive(
    LEAVES.filter(lambda leaf: leaf not in (math.inf, -math.inf)),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(KEYS, values, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4))
@pytest.mark.parametrize("name", ["gemma4_31b", "gemma4_v2", "gemma4_v5"])
def test_what_the_template_writes_of_any_arguments_is_read_as_them(name, arguments):
    call = ToolCall("call_1", "forecast", json.dumps(arguments))
    prompt = build(name).render(Conversation((user("q"), assistant(None, call), result("call_1", "18")), (FORECAST,)))
    ids, id_of = list(prompt.token_ids), gemma4_tokenizer().convert_tokens_to_ids
    sampled = ids[ids.index(id_of("<|tool_call>")) : ids.index(id_of("<tool_call|>")) + 1]
    pieces = token_table(gemma4_tokenizer()).detokenizer([0]).feed([*sampled, id_of(END)])
    [(_, read)] = parse(build(name), [pieces], ReplyEnd.END, tools=TOOLS).calls
    assert json.loads(read) == arguments


DEEP = "{place:" + "[" * 3000 + "]" * 3000 + "}"
NOT_IN_THE_NOTATION = [
    "{days:1e999}", "{days:NaN}", "{days:+3}", "{exact:True}", "{days:1}}", "{{days:1}", "{,}", "{days}", "{a:b:c}",
    "{city:@a@@b@}", "{city:@a@b}", DEEP,
]  # fmt: skip


@pytest.mark.parametrize("written", NOT_IN_THE_NOTATION)
def test_what_is_not_in_the_notation_is_text(written):
    assert calls_of(f"call:forecast{written}") == []


def test_a_quote_that_is_only_spelled_quotes_nothing():
    ids = gemma4_tokenizer().convert_tokens_to_ids
    marker = {spelling: Piece(spelling, ids(spelling)) for spelling in ("<|tool_call>", "<tool_call|>", QUOTE)}
    written = [
        marker["<|tool_call>"],
        Piece("call:forecast{city:"),
        marker[QUOTE],
        Piece(f"say {QUOTE}"),
        marker[QUOTE],
    ]
    found = parse(build(), [[*written, Piece("}"), marker["<tool_call|>"]]], ReplyEnd.END, tools=TOOLS)
    assert found.calls == [("forecast", '{"city": "say <|\\"|>"}')]


def test_a_reply_ends_with_its_turn_its_text_or_where_a_result_begins():
    ids = gemma4_tokenizer().convert_tokens_to_ids
    assert build().stop_token_ids == frozenset(map(ids, (END, "<|tool_response>", "<eos>")))
    text = f"{write_call('now', {})}<|tool_response>"
    found = parse(build(), [pieces_of(gemma4_tokenizer(), text)], ReplyEnd.END, tools=TOOLS)
    assert (found.text, found.calls, found.malformed) == ("", [("now", "{}")], False)


@pytest.mark.parametrize("name", ["gemma4_31b", "gemma4_v5"])
def test_calls_with_their_reasoning_are_sent_back_as_they_were_sampled(name):
    written = f"<|channel>thought\nwhy\n<channel|>{write_call('forecast', {'city': 'Köln', 'days': 3})}"
    renderer, tokenizer = build(name), gemma4_tokenizer()
    first = renderer.render(Conversation((user("q"),), (FORECAST,), effort=True))
    reply = parse(renderer, [pieces_of(tokenizer, f"{written}<|tool_response>")], ReplyEnd.END, first.prefill, TOOLS)
    turn = assistant(None, ToolCall(reply.ids[0], *reply.calls[0]), reasoning=reply.reasoning)
    again = renderer.render(Conversation((user("q"), turn, result(reply.ids[0], "18")), (FORECAST,), effort=True))
    begun = tokenizer.decode(first.token_ids)
    assert tokenizer.decode(again.token_ids).startswith(f"{begun}{written}<|tool_response>response:forecast{{")


def test_after_results_a_reply_goes_on_in_the_reasoning_that_the_prompt_opens():
    call = ToolCall("call_1", "now", "{}")
    messages = (user("q"), assistant(None, call), result("call_1", "18"))
    prompt = build().render(Conversation(messages, (NOW,), effort=True))
    assert prompt.prefill == "<|channel>thought\n"
    found = parse(build(), [pieces_of(gemma4_tokenizer(), f"why\n<channel|>hi{END}")], ReplyEnd.END, prompt.prefill)
    assert (found.reasoning, found.text, found.malformed) == ("why", "hi", False)


def test_where_the_prompt_closes_reasoning_its_markers_are_errors():
    prompt = build("gemma4_31b").render(Conversation((user("q"),)))
    assert prompt.prefill == "<|channel>thought\n<channel|>"
    text = "<|channel>thought\nwhy\n<channel|>hi"
    found = parse(build("gemma4_31b"), [pieces_of(gemma4_tokenizer(), f"{text}{END}")], ReplyEnd.END, prompt.prefill)
    assert (found.reasoning, found.text, found.malformed) == ("", text, True)


def test_a_result_that_spells_the_prompt_s_beginning_begins_nothing():
    call = ToolCall("call_1", "now", "{}")
    messages = (user("q"), assistant(None, call), result("call_1", "<tool_response|><|channel>thought\n"))
    assert build().render(Conversation(messages, (NOW,))).prefill == ""


@pytest.mark.parametrize("label", ["thought", "thought\n", "thou"])
def test_a_cut_in_the_name_of_the_channel_is_no_error(label):
    found = parse(build(), [pieces_of(gemma4_tokenizer(), f"<|channel>{label}")], ReplyEnd.CUT)
    assert (found.reasoning, found.text, found.malformed) == ("", "", False)
