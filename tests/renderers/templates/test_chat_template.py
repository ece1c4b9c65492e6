"""The model's own template: the ids of transformers for what is harmless, and never a marker out of a caller's text."""

import json
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from renderers.base import RenderError
from renderers.messages import Conversation, ImagePart, Message, Role, TextPart, Tool, ToolCall
from renderers.templates.chat_template import ChatTemplate
from tests.support.renderer_kit import (
    QWEN_MARKERS,
    QWEN_SPECIAL,
    assistant,
    chatml_tokenizer,
    llama_tokenizer,
    oracle_ids,
    qwen_tokenizer,
    result,
    system,
    template,
    tool,
    unigram_tokenizer,
    user,
)

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + ' ' + eos_token }}
    {%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

QWEN_TEMPLATES = ["qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen2_5"]

# Text as it comes: no marker in it, nor a beginning or an end of one that would join with the template's.
TEXT = st.text(st.sampled_from("ab Z09.,!?'\"{}[]:\n\t éüß日本한국👍🏽\u200d\0\\_-#*"), max_size=30)
NAMES = st.sampled_from(["get_weather", "f", "wetter-köln"])


@st.composite
def conversations(draw, text=TEXT):
    """A conversation with every field in which text travels."""
    messages = [system(draw(text))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        messages.append(user(draw(text)))
        if draw(st.booleans()):
            call = ToolCall(f"call_{turn}", draw(NAMES), json.dumps({draw(text): draw(text), "n": [1.5, None, True]}))
            messages.append(assistant(draw(text), call, reasoning=draw(st.none() | text)))
            messages.append(result(call.id, draw(text)))
        if draw(st.booleans()):
            messages.append(assistant(draw(text), reasoning=draw(st.none() | text)))
    messages.append(user(draw(text)))
    tools = (tool(draw(NAMES), draw(text)),) if draw(st.booleans()) else ()
    return Conversation(tuple(messages), tools)


@pytest.fixture(scope="module")
def qwen_templates():
    return {name: ChatTemplate(qwen_tokenizer(), template(name)) for name in QWEN_TEMPLATES}


@pytest.mark.parametrize("name", QWEN_TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(conversation=conversations())
def test_the_ids_of_a_harmless_conversation_are_those_of_transformers(name, qwen_templates, conversation):
    expected = oracle_ids(qwen_tokenizer(), template(name), conversation)
    assert list(qwen_templates[name].render(conversation).token_ids) == expected


@st.composite
def text_conversations(draw, text=TEXT):
    turns = draw(st.lists(text, min_size=1, max_size=4))
    return Conversation(tuple(assistant(turn) if index % 2 else user(turn) for index, turn in enumerate(turns)))


PLAIN_TEXT = st.text(st.sampled_from("Paris the.  \n\téü日👍:Ж"), max_size=20)
OTHER_FAMILIES = [(chatml_tokenizer, CHATML), (llama_tokenizer, LLAMA), (unigram_tokenizer, CHATML)]


@cache
def other_family(make):
    return ChatTemplate(make(), dict(OTHER_FAMILIES)[make])


@pytest.mark.parametrize(("make", "source"), OTHER_FAMILIES)
@settings(max_examples=40, deadline=None)
@given(conversation=text_conversations(PLAIN_TEXT))
def test_the_ids_are_those_of_transformers_for_other_kinds_of_vocabulary_too(make, source, conversation):
    rendered = other_family(make).render(conversation)
    assert list(rendered.token_ids) == oracle_ids(make(), source, conversation)


# --- no text becomes a marker ---


def fragments(tokenizer):
    """Markers, and their beginnings, middles and ends, which may join with what stands around them."""
    markers = [token.content for token in tokenizer.added_tokens_decoder.values()]
    cut = [marker[start:end] for marker in markers for start in range(3) for end in (-1, -2, len(marker))]
    return st.lists(st.sampled_from([*markers, *cut, "\n", " ", "a", "<", ">", "|"]), max_size=5).map("".join)


def markers_of(tokenizer, token_ids):
    return [token_id for token_id in token_ids if token_id in tokenizer.added_tokens_decoder]


def harmless_twin(conversation):
    """The same conversation with a word for every text."""
    messages = tuple(
        Message(
            role=message.role,
            content=message.content and (TextPart("word"),),
            reasoning=message.reasoning and "word",
            tool_calls=tuple(ToolCall(call.id, "f", '{"word": "word"}') for call in message.tool_calls),
            tool_call_id=message.tool_call_id,
        )
        for message in conversation.messages
    )
    return Conversation(messages, tuple(tool("f", "word") for _ in conversation.tools))


@pytest.mark.parametrize(("make", "source"), OTHER_FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_hostile_text_changes_no_marker_of_the_prompt(make, source, data):
    tokenizer = make()
    conversation = data.draw(text_conversations(fragments(tokenizer)))
    rendered = other_family(make).render(conversation)
    twin = other_family(make).render(harmless_twin(conversation))
    assert markers_of(tokenizer, rendered.token_ids) == markers_of(tokenizer, twin.token_ids)


@st.composite
def hostile_conversations(draw):
    """Hostile text in every field that Qwen's template only prints: it reads the content of user and assistant turns,
    and cuts the newlines off reasoning, but not whether it is there.
    """
    text = fragments(qwen_tokenizer()).filter(lambda text: "</think>" not in text and "<tool_response>" not in text)
    reasoning = text.map(lambda text: f"a{text}a")
    call = ToolCall("call_1", draw(text) or "f", json.dumps({draw(text): {draw(text): [draw(text)]}}))
    messages = (
        system(draw(text)),
        user(f"a{draw(text)}"),
        assistant(f"a{draw(text)}a", call, reasoning=draw(reasoning)),
        result("call_1", draw(text)),
        assistant(f"a{draw(text)}", reasoning=draw(reasoning)),
        user(f"a{draw(text)}"),
    )
    parameters = {draw(text): draw(text), "required": [draw(text)]}
    function = {"name": draw(text), "description": draw(text), "parameters": parameters}
    return Conversation(messages, (Tool("f", parameters, {"type": "function", "function": function}),))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "qwen2_5"])
@settings(max_examples=60, deadline=None)
@given(conversation=hostile_conversations())
def test_hostile_text_in_every_field_changes_no_marker_and_loses_no_character(name, qwen_templates, conversation):
    tokenizer = qwen_tokenizer()
    rendered = qwen_templates[name].render(conversation)
    twin = qwen_templates[name].render(harmless_twin(conversation))
    assert markers_of(tokenizer, rendered.token_ids) == markers_of(tokenizer, twin.token_ids)
    assert tokenizer.decode(rendered.token_ids) == rendered.text
    expected = oracle_ids(tokenizer, template(name), conversation, tokenize=False)
    assert rendered.text == expected


@pytest.mark.parametrize("marker", QWEN_SPECIAL + QWEN_MARKERS)
def test_no_marker_can_be_written_by_a_caller_in_any_field(marker, qwen_templates):
    tokenizer = qwen_tokenizer()
    call = ToolCall("call_1", marker, json.dumps({marker: marker}))
    function = {"name": marker, "description": marker, "parameters": {marker: {"enum": [marker]}}}
    conversation = Conversation(
        (
            system(marker),
            user(f"a {marker} b"),
            assistant(f"a {marker}", call, reasoning=f"a {marker} b"),
            result("call_1", marker),
            user(f"{marker} b"),
        ),
        (Tool("f", {}, {"type": "function", "function": function}),),
    )
    rendered = qwen_templates["qwen3"].render(conversation)
    assert rendered.text == oracle_ids(tokenizer, template("qwen3"), conversation, tokenize=False)
    counts = Counter(tokenizer.convert_ids_to_tokens(markers_of(tokenizer, rendered.token_ids)))
    in_template = {"<|im_start|>": 6, "<|im_end|>": 5, "<tool_call>": 3, "</tool_call>": 3}
    assert counts == {**in_template, "<tool_response>": 1, "</tool_response>": 1}


def test_a_marker_put_together_from_text_and_template_is_text(qwen_templates):
    source = "{{ '<|im_' + messages[0].content + '|>' }}<|im_end|>{{ messages[0].content }}end|>"
    rendered = ChatTemplate(qwen_tokenizer(), source).render(Conversation((user("start"),)))
    assert rendered.text == "<|im_start|><|im_end|>startend|>"
    assert markers_of(qwen_tokenizer(), rendered.token_ids) == [qwen_tokenizer().convert_tokens_to_ids("<|im_end|>")]


def test_a_marker_put_together_by_removing_text_is_text():
    source = """
    {%- set text = messages[0].content %}
    {{- text | replace('-', '') }}{{ text[::2] }}{{ text.split('-') | join }}"""
    rendered = ChatTemplate(qwen_tokenizer(), source).render(Conversation((user("<-|-i-m-_-e-n-d-|->"),)))
    assert rendered.text == "<|im_end|>" * 3
    assert markers_of(qwen_tokenizer(), rendered.token_ids) == []


def test_the_template_still_sees_what_is_in_a_text(qwen_templates):
    answer = "<think>\nwhy\n</think>\n\nbecause"
    rendered = qwen_templates["qwen3"].render(Conversation((user("q"), assistant(answer), user("q"))))
    assert rendered.text.endswith(
        "<|im_start|>assistant\nbecause<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_a_unigram_model_takes_for_its_marker_is_split_until_it_is_text():
    tokenizer = unigram_tokenizer()
    assert tokenizer.convert_tokens_to_ids("</s>") in tokenizer._encode_without_added_tokens("a</s>b")
    rendered = ChatTemplate(tokenizer, CHATML).render(Conversation((user("a</s></s>b<s>"),)))
    assert tokenizer.decode(rendered.token_ids) == rendered.text
    special = [tokenizer.convert_ids_to_tokens(token_id) for token_id in markers_of(tokenizer, rendered.token_ids)]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_added_tokens_that_are_ordinary_text_stay_what_transformers_makes_of_them():
    backend = qwen_tokenizer().backend_tokenizer.from_str(qwen_tokenizer().backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("\n\n\n", normalized=False), AddedToken("Grüße", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    conversation = Conversation((user("Grüße\n\n"), user("\n\n\n\nGrüße")))
    rendered = ChatTemplate(tokenizer, CHATML).render(conversation)
    assert list(rendered.token_ids) == oracle_ids(tokenizer, CHATML, conversation)
    assert {tokenizer.convert_tokens_to_ids(text) for text in ("\n\n\n", "Grüße")} <= set(rendered.token_ids)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_markers_that_take_in_the_space_around_them_do_so_here_too(flag):
    backend = qwen_tokenizer().backend_tokenizer.from_str(qwen_tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False, **{flag: True})])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    source = "{% for m in messages %}{{ m.content }}<|end|> \n{{ m.content }}{{ '<|end|>' }}{% endfor %}"
    for text in ("a", " a ", "\n", "_", "é"):
        conversation = Conversation((user(text), user("b")))
        rendered = ChatTemplate(tokenizer, source).render(conversation)
        assert list(rendered.token_ids) == oracle_ids(tokenizer, source, conversation)


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "<|im_end|>\udc00"])
def test_half_of_a_surrogate_pair_is_refused_by_its_number(text, qwen_templates):
    for message in (user(text), assistant("a", reasoning=text)):
        with pytest.raises(RenderError, match=f"half of a surrogate pair, U\\+{ord(text.strip('ab<|im_end>')):04X}"):
            qwen_templates["qwen3_vl" if message.reasoning is None else "qwen3"].render(
                Conversation((user("a"), message))
            )


# --- what templates take differently ---


@pytest.mark.parametrize("name", ["qwen3", "deepseekv3", "phi3"])
def test_an_assistant_turn_of_calls_only_needs_no_content(name):
    call = ToolCall("call_1", "get_weather", '{"city": "Paris"}')
    conversation = Conversation((user("q"), assistant(None, call), user("q")))
    assert ChatTemplate(qwen_tokenizer(), template(name)).render(conversation).text.count("q") >= 2


def test_a_template_that_joins_arguments_to_text_gets_them_as_text():
    call = ToolCall("call_1", "get_weather", '{"city":  "Paris"}')
    conversation = Conversation((user("q"), assistant("", call), result("call_1", "18")), (tool(),))
    text = ChatTemplate(qwen_tokenizer(), template("deepseekv3")).render(conversation).text
    assert 'get_weather\n```json\n{"city":  "Paris"}\n```' in text


def test_a_template_that_would_print_an_object_as_python_does_gets_arguments_as_text():
    source = """
    {%- for m in messages %}{{ m.content }}
        {%- for call in m.tool_calls or [] %}{{ call.function.name ~ call.function.arguments }}{% endfor %}
    {%- endfor %}"""
    conversation = Conversation((user("q"), assistant("", ToolCall("call_1", "f", '{"a": null}'))))
    assert ChatTemplate(qwen_tokenizer(), source).render(conversation).text == 'qf{"a": null}'


def test_a_template_that_wants_content_in_parts_gets_parts():
    text = ChatTemplate(qwen_tokenizer(), template("smolvlm")).render(Conversation((user("hello there"),))).text
    assert "hello there" in text


def test_a_tool_s_result_bears_the_name_of_the_function_that_was_called():
    source = "{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.tool_call_id }};{% endfor %}"
    call = ToolCall("call_1", "f", "{}")
    messages = (user("q"), assistant("", call), result("call_1", "18"), result("call_9", "19"))
    text = ChatTemplate(qwen_tokenizer(), source).render(Conversation(messages)).text
    assert text == "user::;assistant::;tool:f:call_1;tool::call_9;"


def test_reasoning_is_given_under_both_of_its_names():
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }};{% endfor %}"
    messages = (user("q"), assistant("a", reasoning="why"))
    assert ChatTemplate(qwen_tokenizer(), source).render(Conversation(messages)).text == "|;why|why;"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "Expecting value"),
        ("[1]", "it is an array"),
        ('"{}"', "it is a string"),
        ("null", "it is null"),
        ("{", "Expecting property name"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "the number 1e999 is too large"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
    ],
)
def test_arguments_that_are_no_json_object_are_refused_by_their_place(arguments, problem, qwen_templates):
    messages = (user("q"), assistant("", ToolCall("call_1", "f", "{}"), ToolCall("call_2", "f", arguments)))
    with pytest.raises(RenderError, match=problem) as error:
        qwen_templates["qwen3"].render(Conversation(messages))
    assert str(error.value).startswith("messages[1].tool_calls[1].function.arguments must be the text of a JSON object")
    assert error.value.param == "messages[1].tool_calls[1].function.arguments"


def test_the_template_for_tools_is_used_when_there_are_tools():
    sources = {"default": "plain", "tool_use": "with tools {{ tools | length }} {{ messages[0].content }}"}
    chat = ChatTemplate(qwen_tokenizer(), sources)
    assert chat.render(Conversation((user("q"),))).text == "plain"
    assert chat.render(Conversation((user("q"),), (tool(),))).text == "with tools 1 q"


# --- images ---

IMAGE = Message(Role.USER, (TextPart("What is "), ImagePart(0), TextPart(" or "), ImagePart(1)))


def test_images_are_written_where_they_stand_by_a_template_that_takes_them(qwen_templates):
    assert qwen_templates["qwen3_vl"].takes_images
    text = qwen_templates["qwen3_vl"].render(Conversation((IMAGE,))).text
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text.startswith(f"<|im_start|>user\nWhat is {image} or {image}<|im_end|>")


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "phi3"])
def test_images_are_refused_by_a_template_that_does_not_take_them(name):
    chat = ChatTemplate(qwen_tokenizer(), template(name))
    assert not chat.takes_images
    with pytest.raises(RenderError, match="takes no images"):
        chat.render(Conversation((IMAGE,)))


def test_a_template_that_prints_content_as_it_is_does_not_take_images():
    source = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    assert not ChatTemplate(qwen_tokenizer(), source).takes_images


TURNS = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}PARTS{% endif %}"


@pytest.mark.parametrize(
    ("parts", "rendered"),
    [
        ("{% for p in m.content %}[{{ p.thinking or p.text }}]{% endfor %}", "<user>q<assistant>[why][hi]"),
        ("{{ m.content | tojson }}", "<user>q<assistant>hi"),
        ("{{ m.content | string }}", "<user>q<assistant>hi"),
        ("{{ raise_exception('text only') }}", "<user>q<assistant>hi"),
    ],
)
def test_reasoning_is_a_part_of_the_content_where_only_that_shows_it(parts, rendered):
    template = ChatTemplate(qwen_tokenizer(), TURNS.replace("PARTS", parts) + "{% endfor %}")
    assert template.render(Conversation((user("q"), assistant("hi", reasoning="why")))).text == rendered
