"""Section 4 of the contract: what /completions replies."""

import math
from typing import Any

import pytest

from engines.interface.protocol import SamplingParams
from tests.support.harness import BASE, CHAT, RunningEdge

pytest_plugins = ("tests.support.edge_fixtures",)


def choice(edge: RunningEdge, prompt: Any = "hi", **fields: Any) -> Any:
    response = edge.complete(prompt, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def sent(edge: RunningEdge, prompt: Any = "hi", **fields: Any) -> SamplingParams:
    """The sampling that reached the engine."""
    assert edge.complete(prompt, max_tokens=1, **fields).status_code == 200
    return edge.script.requests[-1].sampling


def test_a_reply_has_the_documented_shape(edge: RunningEdge) -> None:
    edge.script.says(" Paris.")
    body = edge.complete("The capital of France is", temperature=0).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    num_prompt, num_reply = len(edge.script.encode("The capital of France is")), len(edge.script.encode(" Paris.")) + 1
    assert body == {
        "object": "text_completion",
        "model": BASE,
        "choices": [{"index": 0, "text": " Paris.", "finish_reason": "stop", "logprobs": None}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_reply,
            "total_tokens": num_prompt + num_reply,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_the_sdk_reads_a_reply(edge: RunningEdge) -> None:
    edge.script.says("x")
    reply = edge.sdk().completions.create(model=BASE, prompt="hi", extra_body={"return_token_ids": True})
    found = reply.choices[0].model_dump()
    assert found["token_ids"] == [*edge.script.encode("x"), edge.script.end]
    assert found["prompt_token_ids"] == edge.script.encode("hi")


@pytest.mark.parametrize("wrap", [lambda prompt: prompt, lambda prompt: [prompt]])
def test_one_prompt_comes_as_text_or_ids_alone_or_in_a_list(edge: RunningEdge, wrap: Any) -> None:
    ids = edge.script.encode("The capital")
    assert choice(edge, wrap("The capital"), max_tokens=1, return_token_ids=True)["prompt_token_ids"] == ids
    assert choice(edge, wrap(ids), max_tokens=1, return_token_ids=True)["prompt_token_ids"] == ids


def test_special_tokens_are_recognised_in_the_text_of_a_prompt(edge: RunningEdge) -> None:
    found = choice(edge, "<|im_start|>user", max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    assert found == edge.script.tokenizer("<|im_start|>user")["input_ids"]
    assert found[0] == edge.script.tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_ids_that_the_model_has_and_the_tokenizer_has_not_are_let_through(edge: RunningEdge) -> None:
    edge.script.says(450, "x")
    assert choice(edge, [500, 511])["text"] == "x"


def test_prompt_chunks_of_tokens_are_one_prompt_without_prompt_token_ids(edge: RunningEdge) -> None:
    chunks = [{"type": "tokens", "tokens": [1, 2]}, {"type": "tokens", "tokens": [3]}]
    found = choice(edge, None, prompt_chunks=chunks, max_tokens=1, return_token_ids=True)
    assert edge.script.requests[-1].prompt_token_ids == (1, 2, 3)
    assert "prompt_token_ids" not in found
    assert len(found["token_ids"]) == 1


# --- sampling ---


def test_unset_and_null_fields_have_the_documented_defaults(edge: RunningEdge) -> None:
    fields = ("temperature", "top_p", "top_k", "seed", "stop", "logprobs", "stream", "logit_bias", "min_p", "echo")
    for found in (sent(edge), sent(edge, **dict.fromkeys(fields)), sent(edge, stop=[])):
        assert (found.temperature, found.top_p, found.top_k, found.min_p) == (1.0, 1.0, 0, 0.0)
        assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (0.0, 0.0, 1.0)
        assert (found.logprobs, found.prompt_logprobs, found.logit_bias) == (None, None, ())


def test_sampling_fields_reach_the_engine_as_they_are(edge: RunningEdge) -> None:
    found = sent(
        edge,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "8": 2.5},
        seed=12,
        logprobs=3,
    )
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.7, 0.9, 40, 0.05)
    assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (found.logit_bias, found.seed, found.logprobs) == (((7, -100.0), (8, 2.5)), 12, 3)


@pytest.mark.parametrize("top_k", [-1, 0, 512, 2**63, 10**100])
def test_top_k_of_minus_one_zero_and_the_vocabulary_or_more_keep_all_tokens(edge: RunningEdge, top_k: int) -> None:
    assert sent(edge, top_k=top_k).top_k == 0


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_seeds_of_64_bits_are_taken(edge: RunningEdge, seed: int) -> None:
    assert sent(edge, seed=seed).seed == seed % 2**64


def test_without_a_seed_every_request_has_another(edge: RunningEdge) -> None:
    assert len({sent(edge).seed for _ in range(4)}) == 4


def test_a_temperature_goes_to_the_engine_as_it_came(edge: RunningEdge) -> None:
    assert sent(edge, temperature=1e-300).temperature == 1e-300
    assert sent(edge, temperature=0).temperature == 0.0


def test_the_same_seed_gives_the_same_reply(edge: RunningEdge) -> None:
    first, second, other = (choice(edge, seed=seed, max_tokens=20)["text"] for seed in (5, 5, 6))
    assert first == second
    assert first != other


def test_without_max_tokens_a_reply_may_run_to_the_end_of_the_context(edge: RunningEdge) -> None:
    body = edge.complete([1] * 4000).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (96, "length")


def test_cached_tokens_of_the_prompt_are_counted(edge: RunningEdge) -> None:
    prompt = [7] * 64 + [9] * 64
    edge.complete(prompt, max_tokens=1)
    usage = edge.complete(prompt, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 112}


# --- stops ---


def test_the_models_end_tokens_always_stop_and_do_not_show(edge: RunningEdge) -> None:
    for end in ("<|im_end|>", "<|endoftext|>"):
        edge.script.says("a b", end, "never")
        found = choice(edge, stop=["zzz"], return_token_ids=True)
        assert (found["text"], found["finish_reason"]) == ("a b", "stop")
        assert found["token_ids"] == [*edge.script.encode("a b"), *edge.script.encode(end)]


def test_a_stop_string_cuts_the_text_before_it(edge: RunningEdge) -> None:
    edge.script.says("one two three")
    assert choice(edge, stop=" tw") == {"index": 0, "text": "one", "finish_reason": "stop", "logprobs": None}


def test_of_several_stop_strings_the_first_to_be_complete_cuts(edge: RunningEdge) -> None:
    edge.script.says("abcdef")
    assert choice(edge, stop=["f", "de", "cdefg"])["text"] == "abc"


def test_there_may_be_more_than_four_stop_strings(edge: RunningEdge) -> None:
    edge.script.says("abcdef")
    assert choice(edge, stop=["1", "2", "3", "4", "5", "e"])["text"] == "abcd"


def test_with_a_stop_string_ids_and_logprobs_keep_all_sampled_tokens(edge: RunningEdge) -> None:
    edge.script.says("x", "yz", "STOP", "never")
    found = choice(edge, stop="zST", return_token_ids=True, logprobs=0)
    sampled = edge.script.encode("x") + edge.script.encode("yz") + edge.script.encode("ST")
    assert (found["text"], found["token_ids"]) == ("xy", sampled)
    assert len(found["logprobs"]["token_logprobs"]) == len(sampled)


def test_text_that_only_looks_like_a_stop_string_comes_out_in_the_end(edge: RunningEdge) -> None:
    edge.script.says("a STO")
    assert choice(edge, stop="STOP")["text"] == "a STO"


def test_a_stop_string_ends_the_generation(edge: RunningEdge) -> None:
    aborted = edge.engine.stats().counters.aborted
    edge.script.says("a stop", *["x"] * 500)
    choice(edge, stop="stop")
    assert edge.engine.stats().counters.aborted == aborted + 1


def test_stop_ids_end_generation_and_their_text_does_not_show(edge: RunningEdge) -> None:
    (stop,) = edge.script.encode("b")
    edge.script.says("ab", "c")
    found = choice(edge, stop=[stop], return_token_ids=True)
    assert (found["text"], found["finish_reason"]) == ("a", "stop")
    assert found["token_ids"] == edge.script.encode("ab")


def test_a_stop_string_may_be_the_text_of_a_marker(edge: RunningEdge) -> None:
    edge.script.says("<think>a</think>b")
    assert choice(edge, stop="</think>")["text"] == "<think>a"


# --- text ---


def test_special_tokens_do_not_show_and_other_markers_do(edge: RunningEdge) -> None:
    edge.script.says("a<|im_start|>b<think>c</think>")
    assert choice(edge)["text"] == "ab<think>c</think>"


@pytest.mark.parametrize("text", ["日本語", "😀👍🏽", "e\u0301", "Ünïcödé", "\u2028\u0085 x", "a\tb\r\n"])
def test_characters_split_over_tokens_come_out_whole(edge: RunningEdge, text: str) -> None:
    edge.script.says(text)
    assert choice(edge)["text"] == text


def test_an_unfinished_character_at_the_end_is_one_replacement_character(edge: RunningEdge) -> None:
    edge.script.says(*edge.script.encode("a😀")[:-1])
    assert choice(edge)["text"] == "a\ufffd"
    assert choice(edge, max_tokens=2)["text"] == "a\ufffd"


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_reply(edge: RunningEdge) -> None:
    *begun, last = edge.script.encode("😀")
    edge.script.says(last, "x")
    assert choice(edge, begun)["text"] == "\ufffdx"


# --- log-probabilities ---


def test_logprobs_are_parallel_lists_with_the_sampled_token_among_the_best(edge: RunningEdge) -> None:
    edge.script.says("ab")
    found = choice(edge, logprobs=2, temperature=0)["logprobs"]
    assert found["tokens"] == ["a", "b", "<|im_end|>"]
    assert found["text_offset"] == [0, 1, 2]
    pairs = list(zip(found["tokens"], found["token_logprobs"], strict=True))
    assert [next(iter(top.items())) for top in found["top_logprobs"]] == pairs


def test_logprobs_of_zero_give_the_sampled_token_only(edge: RunningEdge) -> None:
    edge.script.says("ab")
    found = choice(edge, logprobs=0)["logprobs"]
    assert [list(top) for top in found["top_logprobs"]] == [["a"], ["b"], ["<|im_end|>"]]


def test_the_best_come_with_the_sampled_one_when_it_is_not_among_them(edge: RunningEdge) -> None:
    likeliest, second = 72, 73  # as the fake engine ranks them
    edge.script.says(likeliest, second)
    tops = choice(edge, logprobs=1, temperature=1, max_tokens=2)["logprobs"]["top_logprobs"]
    assert [len(top) for top in tops] == [1, 2]


def test_tokens_inside_a_character_are_told_apart_by_their_bytes(edge: RunningEdge) -> None:
    edge.script.says("a日b")
    found = choice(edge, logprobs=0)["logprobs"]
    assert found["tokens"] == ["a", "bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", "b", "<|im_end|>"]
    assert found["text_offset"] == [0, 1, 1, 1, 2, 3]


def test_as_many_logprobs_as_ids_as_completion_tokens(edge: RunningEdge) -> None:
    for fields in ({"max_tokens": 5}, {"stop": "e"}, {}):
        edge.script.says("abcdefgh")
        body = edge.complete(logprobs=1, return_token_ids=True, **fields).json()
        count = body["usage"]["completion_tokens"]
        assert len(body["choices"][0]["token_ids"]) == count
        assert {len(column) for column in body["choices"][0]["logprobs"].values()} == {count}


# --- echo ---


def test_echo_repeats_the_prompt_as_it_was_given(edge: RunningEdge) -> None:
    edge.script.says(" end")
    assert choice(edge, "<|im_start|>  日本 ", echo=True)["text"] == "<|im_start|>  日本  end"


def test_echo_of_ids_repeats_their_text(edge: RunningEdge) -> None:
    edge.script.says(" end")
    assert choice(edge, edge.script.encode("The 日本"), echo=True)["text"] == "The 日本 end"


def test_echo_of_ids_has_the_special_tokens_that_echo_of_the_text_has(edge: RunningEdge) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"
    edge.script.says("end")
    of_text, of_ids = (
        choice(edge, prompt, echo=True, logprobs=0, max_tokens=1) for prompt in (text, edge.script.encode(text))
    )
    assert of_ids["text"].startswith(text)
    assert of_ids["logprobs"]["text_offset"][0] == 0
    assert of_ids["logprobs"]["text_offset"][1] == len("<|im_start|>")
    assert (of_ids["text"], of_ids["logprobs"]) == (of_text["text"], of_text["logprobs"])


def test_echo_scores_the_prompt_without_generating(edge: RunningEdge) -> None:
    body = edge.complete("The capital", echo=True, logprobs=1, max_tokens=0).json()
    found = body["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("The capital", "length")
    assert found["logprobs"]["tokens"] == ["The", " capital"]
    assert found["logprobs"]["text_offset"] == [0, 3]
    assert found["logprobs"]["token_logprobs"][0] is None
    assert found["logprobs"]["top_logprobs"][0] is None
    assert found["logprobs"]["token_logprobs"][1] < 0
    assert body["usage"]["completion_tokens"] == 0


def test_offsets_with_echo_count_from_the_start_of_the_prompt(edge: RunningEdge) -> None:
    edge.script.says(" is", "😀", "!")
    for prompt in ("The 日 capital", edge.script.encode("The 日 capital")):
        found = choice(edge, prompt, echo=True, logprobs=0)
        offsets, tokens, text = found["logprobs"]["text_offset"], found["logprobs"]["tokens"], found["text"]
        whole = [(o, t) for o, t in zip(offsets, tokens, strict=True) if not t.startswith("bytes:")][:-1]
        assert all(text[offset : offset + len(token)] == token for offset, token in whole)
        assert offsets == sorted(offsets)


def test_an_evaluation_harness_can_score_a_continuation(edge: RunningEdge) -> None:
    """As lm-evaluation-harness does: context and continuation as ids, one token more, sums of the logprobs between."""
    context, continuation = edge.script.encode("The capital of France is"), edge.script.encode(" Paris.")
    body = edge.complete([context + continuation], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234).json()
    found = body["choices"][0]["logprobs"]
    scores = found["token_logprobs"][len(context) : -1]
    assert len(scores) == len(continuation)
    assert all(math.isfinite(score) and score <= 0 for score in scores)
    for token, top in zip(found["tokens"][len(context) : -1], found["top_logprobs"][len(context) : -1], strict=True):
        assert top[token] == max(top.values())  # temperature 0: the fake engine finds every token likeliest


def test_scoring_may_use_the_whole_context(edge: RunningEdge) -> None:
    assert len(choice(edge, [5] * 4096, echo=True, logprobs=0, max_tokens=0)["logprobs"]["tokens"]) == 4096


# --- checkpoints and models ---


def test_the_requested_model_comes_back(edge: RunningEdge) -> None:
    model = f"{CHAT}:peft:128"
    assert edge.complete(model=model, max_tokens=1).json()["model"] == model
    assert edge.events(edge.complete(model=model, max_tokens=1, stream=True))[0]["model"] == model
