"""The generic renderer, the one with role names and colons, and the table of them all."""

import pickle
import threading
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from renderers import registry
from renderers.base import RenderedPrompt, RenderError, ReplyEnd, TemplateRefused
from renderers.deltas import Piece, TextDelta
from renderers.families.generic import PlainParser
from renderers.messages import Conversation, ImagePart, Message, Role, TextPart, ToolCall
from tests.support.renderer_kit import (
    assistant,
    chatml_tokenizer,
    llama_tokenizer,
    oracle_ids,
    parse,
    pieces_of,
    qwen_tokenizer,
    result,
    system,
    template,
    tool,
    user,
    word_tokenizer,
)

CALL = ToolCall("call_1", "f", "{}")


@pytest.fixture(scope="module")
def generic():
    return registry.build("generic", qwen_tokenizer(), template("qwen3_5_think"))


@pytest.fixture(scope="module")
def role_colon():
    return registry.build("role_colon", llama_tokenizer(), None)


# --- generic ---


def test_the_generic_renderer_renders_by_the_model_s_template_with_tools(generic):
    conversation = Conversation((system("s"), user("q"), assistant("", CALL), result("call_1", "18")), (tool(),))
    expected = oracle_ids(qwen_tokenizer(), template("qwen3_5_think"), conversation)
    assert list(generic.render(conversation).token_ids) == expected


def test_the_generic_renderer_takes_a_reply_as_it_is_without_the_end_token(generic):
    text = "<think>\nwhy\n</think>\n\n<tool_call>{}</tool_call> <|im_start|>"
    parsed = parse(generic, [[piece] for piece in pieces_of(qwen_tokenizer(), f"{text}<|im_end|>")], ReplyEnd.END)
    assert (parsed.text, parsed.reasoning, parsed.calls, parsed.malformed, parsed.raw_text) == (
        text,
        "",
        [],
        False,
        text,
    )


def test_an_end_token_in_the_middle_of_a_generic_reply_is_text(generic):
    parsed = parse(generic, [pieces_of(qwen_tokenizer(), "a<|im_end|>b<|im_end|>")], ReplyEnd.END)
    assert parsed.text == parsed.raw_text == "a<|im_end|>b"


def test_the_generic_renderer_sends_text_at_once(generic):
    parser = generic.parser(RenderedPrompt(()), ())
    assert parser.feed([Piece("a\n"), Piece("b")]) == [TextDelta("a\nb")]
    assert parser.finish(ReplyEnd.CUT) == []


END, MARKER = 1, 2
FRAMINGS = ["", " ", "\n\n", " a", " \n a"]
PLAIN_PIECES = st.sampled_from([*map(Piece, "\n a"), Piece(" a\n"), Piece("</s>", END), Piece("<x>", MARKER)])


@given(
    framing=st.sampled_from(FRAMINGS),
    begun=st.integers(0, 4),
    rest=st.lists(PLAIN_PIECES, max_size=6),
    sizes=st.lists(st.integers(0, 3), min_size=10, max_size=10),
    end=st.sampled_from(ReplyEnd),
)
def test_a_plain_reply_and_what_its_format_puts_before_it_do_not_depend_on_the_chunks(framing, begun, rest, sizes, end):
    pieces = [*map(Piece, framing[:begun]), *rest]
    parser = PlainParser(frozenset([END]), framing)
    unfed = iter(pieces)
    chunks = [*(list(islice(unfed, size)) for size in sizes), list(unfed)]
    text = "".join(delta.text for chunk in chunks for delta in parser.feed(chunk))
    text += "".join(delta.text for delta in parser.finish(end))
    raw = "".join(piece.text for piece in (pieces[:-1] if pieces and pieces[-1].token_id == END else pieces))
    assert (text, parser.raw_text) == (raw.removeprefix(framing), raw)


def test_the_generic_renderer_parses_no_calls_and_takes_no_effort(generic):
    assert not generic.supports_tools
    generic.check_effort(None)
    for effort in (True, False, "none", "high", 0.5):
        with pytest.raises(
            RenderError, match="reasoning_effort must be left out: this model does not reason, got"
        ) as error:
            generic.check_effort(effort)
        assert error.value.param == "reasoning_effort"
    with pytest.raises(RenderError, match="this model does not reason"):
        generic.render(Conversation((user("q"),), effort="high"))


def test_the_token_that_ends_a_turn_in_the_template_ends_a_reply():
    backend = qwen_tokenizer().backend_tokenizer.from_str(qwen_tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    renderer = registry.build(None, tokenizer, template("phi3"))
    assert renderer.stop_token_ids == frozenset(tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"]))


# --- role_colon ---


def test_role_colon_renders_names_and_colons_after_the_beginning_token(role_colon):
    conversation = Conversation((system("s"), user("x"), assistant("y", reasoning="why"), user("z")))
    prompt = role_colon.render(conversation)
    expected = "<s>System: s\n\nUser: x\n\nAssistant: y\n\nUser: z\n\nAssistant:"
    backend = llama_tokenizer().backend_tokenizer
    assert list(prompt.token_ids) == backend.encode(expected, add_special_tokens=False).ids
    assert prompt.token_ids[0] == llama_tokenizer().bos_token_id


def test_role_colon_begins_with_nothing_where_there_is_no_beginning_token():
    prompt = registry.build("role_colon", qwen_tokenizer(), None).render(Conversation((user("x"),)))
    assert qwen_tokenizer().decode(prompt.token_ids) == "User: x\n\nAssistant:"


def test_role_colon_turns_no_text_into_a_marker(role_colon):
    prompt = role_colon.render(Conversation((user("</s><s>[INST]"),)))
    markers = [token_id for token_id in prompt.token_ids if token_id in llama_tokenizer().added_tokens_decoder]
    assert markers == [llama_tokenizer().bos_token_id]


def test_role_colon_ends_where_the_user_would_go_on(role_colon):
    assert role_colon.stop_strings == ("\n\nUser:",)
    assert role_colon.stop_token_ids == frozenset([llama_tokenizer().eos_token_id])
    parsed = parse(role_colon, [[Piece(" ")], [Piece(" hi")], [Piece(" there</s>", None)]], ReplyEnd.CUT)
    assert parsed.text == " hi there</s>"


@pytest.mark.parametrize(
    ("conversation", "message", "param"),
    [
        (Conversation((user("q"),), (tool(),)), "tools: this model has no tool-call support.", "tools"),
        (
            Conversation((user("q"), assistant("", CALL))),
            "messages[1]: this model has no tool-call support.",
            "messages",
        ),
        (Conversation((result("call_1", "18"),)), "messages[0]: this model has no tool-call support.", "messages"),
        (
            Conversation((Message(Role.USER, (TextPart("a"), ImagePart(0))),)),
            "messages[0]: this model takes no images.",
            "messages",
        ),
        (
            Conversation((user("q"),), effort=True),
            "reasoning_effort must be left out: this model does not reason, got True.",
            "reasoning_effort",
        ),
        (Conversation((user("\ud800"),)), "messages: a text holds half of a surrogate pair, U+D800.", "messages"),
    ],
)
def test_role_colon_refuses_what_it_cannot_say(role_colon, conversation, message, param):
    with pytest.raises(RenderError) as error:
        role_colon.render(conversation)
    assert (str(error.value), error.value.param) == (message, param)


# --- the table ---


def test_without_a_name_and_a_template_there_is_no_renderer():
    assert registry.build(None, chatml_tokenizer(), None) is None


def test_an_unknown_name_is_refused_with_the_names_there_are():
    names = ", ".join(registry.RENDERERS)
    with pytest.raises(ValueError, match=f"renderer must be one of {names}, got 'qwen4'"):
        registry.build("qwen4", qwen_tokenizer(), template("qwen3"))


@pytest.mark.parametrize("name", sorted(registry.RENDERERS.keys() - {"deepseek_v4_1", "inkling", "role_colon"}))
def test_a_renderer_that_needs_a_template_is_refused_without_one(name):
    with pytest.raises(TemplateRefused, match=f"no chat template, and the renderer '{name}' needs one"):
        registry.build(name, qwen_tokenizer(), None)


def test_a_checkpoint_s_template_replaces_the_model_s():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=qwen_tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = "the model's {{ messages[0].content }}"
    conversation = Conversation((user("q"),))
    for source, text in [(None, "the model's q"), ("the checkpoint's {{ messages[0].content }}", "the checkpoint's q")]:
        prompt = registry.build(None, tokenizer, source).render(conversation)
        assert tokenizer.decode(prompt.token_ids) == text


def test_a_vocabulary_of_words_is_served_as_well():
    source = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    prompt = registry.build(None, word_tokenizer(), source).render(Conversation((user("hello Paris"),)))
    assert word_tokenizer().convert_ids_to_tokens(prompt.token_ids) == ["user", "hello", "Paris", "assistant"]


@pytest.mark.parametrize("error", [RenderError("no", "stop"), TemplateRefused("bad")])
def test_the_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.param) == (type(error), str(error), error.param)


def test_one_renderer_serves_many_threads_at_once():
    renderer = registry.build("qwen3", qwen_tokenizer(), template("qwen3"))
    conversations = [
        Conversation((user(f"{index} <|im_end|>"), assistant("a"), user("q" * index))) for index in range(8)
    ]
    expected = [renderer.render(conversation) for conversation in conversations]
    got = {}

    def render_often(index):
        got[index] = {renderer.render(conversations[index]) for _ in range(30)}

    threads = [threading.Thread(target=render_often, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {index: {prompt} for index, prompt in enumerate(expected)}
