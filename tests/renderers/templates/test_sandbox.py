"""Templates of strangers: what a template may do, and what is stopped before it hurts."""

import gc
import time
import tracemalloc
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import SandboxedEnvironment

from renderers.base import PromptTooLong, RenderError, TemplateRefused
from renderers.messages import Conversation
from renderers.templates.bounds import RenderBudget
from renderers.templates.chat_template import MAX_TEMPLATE_LEN, ChatTemplate
from tests.support.renderer_kit import ALL_TOKENIZERS, TEMPLATES, oracle_ids, qwen_tokenizer, user

chat = cache(partial(ChatTemplate, qwen_tokenizer()))

HELLO = Conversation((user("hello"),))

BOMBS = dict(line.split(" => ", 1) for line in (TEMPLATES / "hostile.txt").read_text(encoding="utf-8").splitlines())
BOMBS["many long variables"] = "".join(f"{{% set v{index} = 'x' * 3900000 %}}" for index in range(99))


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_template_that_would_use_up_the_machine_is_refused_in_no_time(source):
    start = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(RenderError):
            ChatTemplate(qwen_tokenizer(), source).render(HELLO)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.thread_time() - start < 5
    assert peak_bytes < 300e6


def test_a_namespace_does_not_print_what_it_holds():
    source = """
    {%- set ns = namespace(x='a') %}
    {%- for i in range(60) %}{% set m = namespace(a=ns.x, b=ns.x) %}{% set ns.x = [m, m] %}{% endfor %}
    {{- ns.x }}"""
    assert ChatTemplate(qwen_tokenizer(), source).render(HELLO).text == "[<Namespace>, <Namespace>]"


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ (messages | attr('__class__')).__subclasses__() }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ messages.append(1) }}",
    "{% set _ = messages.append(1) %}",
    "{% set ns = namespace(x=[]) %}{{ ns.x.append(1) }}",
    "{% set ns = namespace(x={}) %}{% set _ = ns.x.update(a=1) %}",
    "{% set _ = messages[0].x.append(1) %}",
    "{% set _ = raise_exception.x.append(1) %}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ 'a'.encode() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_into_python(source):
    with pytest.raises(RenderError):
        ChatTemplate(qwen_tokenizer(), source).render(HELLO)


BROKEN = [
    "{% if %}",
    "{{ 'a",
    "{{ x | nosuchfilter }}",
    "{% for x in y %}",
    "{{ 1" + "+1" * 3000 + " }}",
    "{{ " + "(" * 9999,
]


@pytest.mark.parametrize("source", BROKEN, ids=range(len(BROKEN)))
def test_a_template_that_does_not_compile_is_refused(source):
    with pytest.raises(TemplateRefused, match="does not compile") as error:
        ChatTemplate(qwen_tokenizer(), source)
    assert error.value.param == "model"


def test_a_template_that_is_too_long_is_refused_with_the_limit():
    with pytest.raises(TemplateRefused, match=f"{MAX_TEMPLATE_LEN + 1} characters; the limit is {MAX_TEMPLATE_LEN}"):
        ChatTemplate(qwen_tokenizer(), "x" * (MAX_TEMPLATE_LEN + 1))


FAULTS = {
    "{{ raise_exception('Roles must alternate.') }}": "Roles must alternate.",
    "{{ messages[0].nothing.more }}": "has no attribute 'nothing'",
    "{{ messages + 1 }}": "can only concatenate list",
    "{{ 1 / 0 }}": "division by zero",
    "{{ messages[0] | tojson(indent='x', nonsense=1) }}": "nonsense",
    "{{ nothing() }}": "'nothing' is undefined",
    "{{ 1e999 + 1 }}": "'inf' is not defined",
}


@pytest.mark.parametrize(("source", "message"), FAULTS.items())
def test_what_a_template_refuses_or_gets_wrong_is_told_to_the_caller(source, message):
    with pytest.raises(RenderError, match=message) as error:
        ChatTemplate(qwen_tokenizer(), source).render(HELLO)
    assert error.value.param == "messages"


def test_a_refusal_is_the_template_s_own_message_and_nothing_else():
    with pytest.raises(RenderError) as error:
        ChatTemplate(qwen_tokenizer(), "{{ raise_exception('No.') }}").render(HELLO)
    assert str(error.value) == "No."


HARMLESS = (TEMPLATES / "harmless.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("source", HARMLESS, ids=range(len(HARMLESS)))
@settings(max_examples=15, deadline=None)
@given(content=st.text("hello wörld\n日👍<|>/ ", max_size=20))
def test_what_templates_do_gives_the_same_ids_as_transformers(source, content):
    conversation = Conversation((user(content), user("two"), user("three"), user("four"), user("five")))
    expected = oracle_ids(qwen_tokenizer(), source, conversation)
    assert list(chat(source).render(conversation).token_ids) == expected


QUEUES = [
    "{% set _ = ns.x.append(1) %}{% set _ = ns.x.append('b') %}{% set a = ns.x.pop(0) %}{{ a }}{{ ns.x }}{{ _ }}",
    "{% for i in range(3) %}{% set _ = ns.x.append(i) %}{% if i > 1 %}{% set a = ns.x.pop(0) %}{{ a }}{% endif %}"
    "{% endfor %}{{ ns.x }}",
    "{% macro m(i) %}{% set _ = ns.x.append(i) %}{{ ns.x | length }}{% endmacro %}{{ m(5) }}{{ m(6) }}{{ ns.x }}",
    "{% set x = 'a' %}{% set x = ns.x.append(x) %}{{ ns.x }}{{ x }}",
]


@pytest.mark.parametrize("source", QUEUES)
def test_a_queue_in_a_namespace_does_what_it_does_where_lists_may_change(source):
    source = "{% set ns = namespace(x=[]) %}" + source
    expected = SandboxedEnvironment().from_string(source).render()
    assert ChatTemplate(qwen_tokenizer(), source).render(HELLO).text == expected


def test_a_list_that_the_caller_sent_is_not_changed_through_a_namespace():
    source = (
        "{% set ns = namespace(x=messages) %}{% set _ = ns.x.append(1) %}{{ ns.x | length }}{{ messages | length }}"
    )
    assert ChatTemplate(qwen_tokenizer(), source).render(HELLO).text == "21"


def test_a_long_conversation_is_within_all_bounds():
    source = """
    {%- set ns = namespace(out='') %}
    {%- for m in messages %}{% set ns.out = ns.out + m.content %}{% endfor %}
    {{- ns.out }}"""
    conversation = Conversation(tuple(user("x" * 500) for _ in range(400)))
    assert len(ChatTemplate(qwen_tokenizer(), source).render(conversation).text) == 200_000


def test_a_message_of_a_megabyte_is_within_all_bounds():
    source = "{% for m in messages %}{{ '<|im_start|>' + m.content | trim + '<|im_end|>' }}{% endfor %}"
    content = "a long text. " * 80_000
    rendered = ChatTemplate(qwen_tokenizer(), source).render(Conversation((user(content),)))
    assert rendered.text == f"<|im_start|>{content.strip()}<|im_end|>"


def test_a_template_that_writes_a_novel_about_a_word_is_refused_when_it_is_loaded():
    with pytest.raises(TemplateRefused) as refused:
        ChatTemplate(qwen_tokenizer(), "{{ 'a ' * 1000000 }}")
    words = "The chat template writes 2000000 characters for a conversation of a few words; the limit is 131072."
    assert str(refused.value) == words


def test_what_a_template_writes_beyond_the_context_is_not_tokenised_to_its_end():
    source = "{% for m in messages %}{{ m.content * (500000 if 'long' in m.content else 1) }}{% endfor %}"
    template = ChatTemplate(qwen_tokenizer(), source, max_tokens=1000)
    assert len(template.render(Conversation((user("short"),))).token_ids) == len("short")
    with pytest.raises(PromptTooLong) as refused:
        template.render(Conversation((user("a long "),)))
    # One slice more at most.
    assert 1000 < refused.value.num_tokens < 1000 + (1 << 11)
    assert str(refused.value) == f"messages must have fewer tokens than 1000, got at least {refused.value.num_tokens}."
    whole = ChatTemplate(qwen_tokenizer(), source.replace("500000", "900"))
    assert len(whole.render(Conversation((user("a long "),))).token_ids) > 1000


def test_a_template_that_hides_its_markers_is_refused_when_it_is_loaded():
    with pytest.raises(TemplateRefused, match="cannot be distinguished from a caller's text"):
        ChatTemplate(qwen_tokenizer(), "{{ '<|IM_START|>' | lower }}{{ messages[0].content }}")


@pytest.mark.parametrize("make", ALL_TOKENIZERS)
def test_an_empty_template_renders_nothing(make):
    assert ChatTemplate(make(), "").render(HELLO).token_ids == ()


def test_garbage_collections_are_not_the_templates_time():
    budget = RenderBudget({})
    heap = [[number] for number in range(500_000)]
    started_s = time.thread_time()
    while time.thread_time() - started_s < 0.7:  # more than a rendering may take
        gc.collect()
    budget.step()
    assert len(heap) == 500_000
