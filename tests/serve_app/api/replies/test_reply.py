"""One reply's state, fed by hand: nothing depends on how the engine's tokens are cut into deltas."""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.interface.protocol import FinishReason, TokenDelta, TokenLogprob
from renderers import registry
from renderers.messages import Conversation, Message, Role, TextPart
from renderers.replies.detokenize import token_table
from serve_app.api.replies.reply import Reply, TextReader, UnformattedParser, WholeReply
from tests.support.files.tiny_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
TABLE = token_table(TOKENIZER)
RENDERER = registry.build("qwen3", TOKENIZER, None)
PROMPT = RENDERER.render(Conversation((Message(Role.USER, (TextPart("x"),)),)))
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def chat_reply(stop: Sequence[str] = ()) -> Reply:
    reader = TextReader(TABLE.detokenizer(PROMPT.token_ids), stop)
    return Reply(reader, RENDERER.parser(PROMPT, ()), num_prompt_tokens=5, end_token_ids=frozenset({END}))


def text_reply(stop: Sequence[str] = ()) -> Reply:
    reader = TextReader(TABLE.detokenizer((1,)), stop, hidden_ids=TABLE.added.special_ids)
    return Reply(reader, UnformattedParser(), num_prompt_tokens=5, end_token_ids=frozenset({END}))


def deltas(token_ids: Sequence[int], cuts: Sequence[int], finish: FinishReason) -> list[TokenDelta]:
    """The tokens, cut at these places, as the engine would send them."""
    places = sorted({cut % (len(token_ids) + 1) for cut in cuts} | {0, len(token_ids)})
    pieces = [tuple(token_ids[start:end]) for start, end in itertools.pairwise(places)] or [()]
    return [
        TokenDelta(piece, tuple(TokenLogprob(token, -1.0) for token in piece), finish if last else None)
        for piece, last in zip(pieces, [False] * (len(pieces) - 1) + [True], strict=True)
    ]


def run(reply: Reply, fed: Sequence[TokenDelta]) -> WholeReply:
    whole = WholeReply()
    for delta in fed:
        whole.add(reply.feed(delta))
        if whole.finish_reason is not None:
            break
    reply.correct(whole)
    for call in whole.tool_calls:
        assert call.id
    return whole


def facts(whole: WholeReply) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments) for call in whole.tool_calls]
    return whole.text, whole.reasoning, calls, whole.token_ids, whole.scored, whole.finish_reason


FRAGMENTS = st.sampled_from(["<think>", "</think>", "\n\n", CALL, "<tool_call>", "日本", "😀", "STOP", "ST", "a"])
TOKENS = st.lists(FRAGMENTS, max_size=8).map(
    lambda parts: TOKENIZER.encode("".join(parts), add_special_tokens=False)
) | st.lists(st.integers(0, 406).filter(lambda token: token != END), max_size=20)
CUTS = st.lists(st.integers(0, 100), max_size=6)
STOPS = st.sampled_from([(), ("STOP",), ("a", "本"), ("\ufffd",)])


@settings(max_examples=300, deadline=None)
@given(tokens=TOKENS, cuts=CUTS, stop=STOPS, is_chat=st.booleans(), ends=st.booleans())
def test_a_reply_does_not_depend_on_how_it_is_cut(
    tokens: list[int], cuts: list[int], stop: Sequence[str], is_chat: bool, ends: bool
) -> None:
    make = chat_reply if is_chat else text_reply
    finish = FinishReason.STOP if ends else FinishReason.LENGTH
    tokens = [*tokens, END] if ends else tokens
    one, many, single = make(stop), make(stop), make(stop)
    whole = run(one, deltas(tokens, [], finish))
    assert facts(run(many, deltas(tokens, cuts, finish))) == facts(whole)
    assert facts(run(single, deltas(tokens, range(len(tokens)), finish))) == facts(whole)
    assert one.usage == many.usage == single.usage
    assert len(whole.token_ids) == len(whole.scored) == one.usage.completion_tokens


def test_a_delta_that_goes_on_after_a_stop_string_is_cut_in_the_middle() -> None:
    reply = text_reply(["ST"])
    tokens = TOKENIZER.encode("aSTbc", add_special_tokens=False)
    part = reply.feed(TokenDelta(tuple(tokens)))
    assert (part.text, part.finish_reason, part.token_ids) == ("a", "stop", tuple(tokens[:3]))


def test_a_stop_string_may_be_complete_only_at_the_end() -> None:
    reply = text_reply(["\ufffd"])
    (first, *_) = TOKENIZER.encode("😀", add_special_tokens=False)
    part = reply.feed(TokenDelta((first,), finish_reason=FinishReason.LENGTH))
    assert (part.text, part.finish_reason) == ("", "stop")


def test_reasoning_tokens_are_those_of_the_reasoning() -> None:
    reply = chat_reply()
    thinking = TOKENIZER.encode("<think>\nHmm", add_special_tokens=False)
    rest = TOKENIZER.encode("\n</think>\n\nHello there", add_special_tokens=False)
    reply.feed(TokenDelta((*thinking, *rest, END), finish_reason=FinishReason.STOP))
    assert reply.usage.reasoning_tokens == len(thinking)


def test_a_reply_of_no_tokens_at_all_is_empty() -> None:
    part = text_reply().feed(TokenDelta((), finish_reason=FinishReason.LENGTH))
    assert (part.text, part.token_ids, part.finish_reason) == ("", (), "length")
