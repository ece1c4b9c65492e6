"""Token ids to text, step by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from renderers.deltas import Piece
from renderers.replies.detokenize import DecoderUnknown, token_table, visible_text
from tests.support.renderer_kit import (
    ALL_TOKENIZERS,
    chatml_tokenizer,
    llama_tokenizer,
    pieces_of,
    qwen_tokenizer,
    unigram_tokenizer,
)

TEXTS = [
    "日本の首都は東京です。",
    "👩‍👩‍👧‍👦 and 👍🏽 and 🇫🇮!",
    "naïve café\n\n  two  spaces",
    "한국의 수도는 서울",
    "\0\x7f\u2028",
]
BYTE_TOKENIZERS = [qwen_tokenizer, chatml_tokenizer, llama_tokenizer]


def decode(tokenizer, token_ids, chunk=1, prompt=()):
    detokenizer = token_table(tokenizer).detokenizer(prompt)
    chunks = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
    return [piece for ids in chunks for piece in detokenizer.feed(ids)] + detokenizer.flush()


def joined(pieces):
    return "".join(piece.text for piece in pieces)


def encode(tokenizer, text):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("make", ALL_TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_pieces_of_any_ids_in_any_chunks_join_to_what_the_tokenizer_decodes(make, data):
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=30))
    pieces = decode(tokenizer, ids, data.draw(st.integers(1, 7)))
    assert joined(pieces) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=12))
def test_any_bytes_from_byte_fallback_join_to_what_the_tokenizer_decodes(data):
    tokenizer = llama_tokenizer()
    ids = [3 + byte for byte in data]
    assert joined(decode(tokenizer, ids)) == tokenizer.backend_tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*"aé日👍".encode(), 0xC0, 0xE0, 0xED, 0xA0, 0xF0, 0xF4, 0x90, 0x80, 0xFF]), max_size=12)
)
def test_any_bytes_of_a_byte_level_vocabulary_join_to_what_the_tokenizer_decodes(data):
    tokenizer = qwen_tokenizer()
    byte_ids = {token_table(tokenizer).token_bytes(token_id): token_id for token_id in range(256)}
    ids = [byte_ids[bytes([byte])] for byte in data]
    assert joined(decode(tokenizer, ids)) == tokenizer.backend_tokenizer.decode(ids)


@pytest.mark.parametrize("make", BYTE_TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_character_is_ever_split(make, text):
    ids = encode(make(), text)
    detokenizer = token_table(make()).detokenizer([0])
    texts = [piece.text for token_id in ids for piece in detokenizer.feed([token_id])]
    texts += [piece.text for piece in detokenizer.flush()]
    assert "".join(texts).lstrip(" ") == text.lstrip(" ")
    assert "\ufffd" not in "".join(texts)


@pytest.mark.parametrize("make", [qwen_tokenizer, chatml_tokenizer])
def test_the_bytes_of_an_unfinished_character_are_held_back_and_flushed_as_one_replacement(make):
    ids = encode(make(), "a👍")
    detokenizer = token_table(make()).detokenizer([0])
    assert detokenizer.feed(ids[:-1]) == [Piece("a")]
    assert detokenizer.flush() == [Piece("\ufffd")]


def test_a_run_of_byte_tokens_is_certain_only_when_it_has_ended():
    detokenizer = token_table(llama_tokenizer()).detokenizer([1])
    assert detokenizer.feed([3 + byte for byte in "日".encode()]) == []
    assert detokenizer.feed(llama_tokenizer().convert_tokens_to_ids(["a"])) == [Piece("日a")]


@pytest.mark.parametrize("make", [llama_tokenizer, unigram_tokenizer])
def test_a_reply_keeps_the_space_that_its_first_token_begins_with(make):
    paris = make().convert_tokens_to_ids("▁Paris")
    assert decode(make(), [paris], prompt=[1]) == [Piece(" Paris")]
    assert decode(make(), [paris], prompt=[]) == [Piece("Paris")]


@pytest.mark.parametrize("make", BYTE_TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_reply_is_the_same_text_whatever_prompt_precedes_it(make, data):
    ids = st.lists(st.integers(0, len(make()) - 1), min_size=1, max_size=8)
    reply = data.draw(ids)
    expected = joined(decode(make(), reply, prompt=[0]))
    assert joined(decode(make(), reply, prompt=data.draw(ids))) == expected


@pytest.mark.parametrize("make", BYTE_TOKENIZERS)
def test_a_character_begun_by_the_prompt_does_not_leak_into_the_reply(make):
    ids = encode(make(), "日")
    prompt, reply = ids[:-1], ids[-1:]
    assert joined(decode(make(), reply, prompt=prompt)) == "\ufffd"


def test_markers_are_pieces_of_their_own_and_break_an_unfinished_character():
    tokenizer = qwen_tokenizer()
    think = tokenizer.convert_tokens_to_ids("<think>")
    thumb = encode(tokenizer, "👍")
    pieces = decode(tokenizer, [*thumb[:-1], think, *encode(tokenizer, "ok")], chunk=99)
    assert pieces == [Piece("\ufffd"), Piece("<think>", think), Piece("ok")]


def test_a_marker_spelled_out_in_ordinary_tokens_is_ordinary_text():
    tokenizer = qwen_tokenizer()
    ids = [token_id for half in ("<thi", "nk>") for token_id in encode(tokenizer, half)]
    assert decode(tokenizer, ids, chunk=99) == [Piece("<think>")]


@pytest.mark.parametrize("make", [qwen_tokenizer, llama_tokenizer])
def test_visible_text_is_what_decoding_without_special_tokens_gives(make):
    text = "<s>Paris<think>is<|im_end|></s> the</think>"
    tokenizer = make()
    ids = [encode(tokenizer, "a")[-1], *encode(tokenizer, text)]
    pieces = visible_text(decode(tokenizer, ids), token_table(tokenizer).added.special_ids)
    assert joined(pieces) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert all(piece.token_id is None for piece in pieces)


@pytest.mark.parametrize("make", BYTE_TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_join_to_the_bytes_of_the_text(make, text):
    table = token_table(make())
    assert b"".join(map(table.token_bytes, encode(make(), text))).decode().strip(" ") == text.strip(" ")


def test_a_token_by_itself_is_its_text_or_a_replacement_or_its_spelling():
    tokenizer = qwen_tokenizer()
    table = token_table(tokenizer)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert table.token_text(encode(tokenizer, " is")[0]) == " is"
    assert table.token_text(encode(tokenizer, "👍")[0]) == "\ufffd"
    assert (table.token_text(start), table.token_bytes(start)) == ("<|im_start|>", b"<|im_start|>")


def test_a_byte_token_by_itself_is_its_byte():
    table = token_table(llama_tokenizer())
    assert (table.token_bytes(3 + 0xE6), table.token_text(3 + 0xE6)) == (b"\xe6", "\ufffd")
    assert (table.token_bytes(3 + 0x41), table.token_text(3 + 0x41)) == (b"A", "A")


@pytest.mark.parametrize("make", ALL_TOKENIZERS)
def test_an_id_that_the_tokenizer_does_not_have_is_no_text(make):
    table = token_table(make())
    assert (table.token_bytes(10**6), table.token_text(10**6)) == (b"", "")
    assert decode(make(), [10**6]) == []


def test_added_tokens_that_are_ordinary_text_are_not_markers():
    backend = qwen_tokenizer().backend_tokenizer.from_str(qwen_tokenizer().backend_tokenizer.to_str())
    backend.add_tokens(["\n\n\n", "ü", "Grüße"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    newlines = tokenizer.convert_tokens_to_ids("\n\n\n")
    assert decode(tokenizer, [newlines]) == [Piece("\n\n\n")]
    assert {token.content for token in token_table(tokenizer).added.plain.values()} == {"\n\n\n", "ü", "Grüße"}


def test_a_decoder_that_is_not_known_is_refused_by_name():
    backend = qwen_tokenizer().backend_tokenizer.from_str(qwen_tokenizer().backend_tokenizer.to_str())
    backend.decoder = decoders.CTC()
    with pytest.raises(DecoderUnknown, match="CTC"):
        token_table(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_pieces_of_a_reply_with_markers():
    kinds = [(piece.text, piece.token_id is not None) for piece in pieces_of(qwen_tokenizer(), "<think>a</think>")]
    assert kinds == [("<think>", True), ("a", False), ("</think>", True)]
