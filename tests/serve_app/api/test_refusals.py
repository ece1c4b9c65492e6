"""Sections 2 and 3 of the contract: models, sampling, stops, context and prompts that are refused, exactly."""

from typing import Any

import pytest

from serve_app.base.errors import CheckpointIncomplete, CheckpointRefused, CheckpointUnavailable
from tests.support.harness import BASE, CHAT, OTHER_KEY, RunningEdge, StoredCheckpoint
from tests.support.wire import error, named, refused

pytest_plugins = ("tests.support.edge_fixtures",)

PATH = "tinker://run:train:0/sampler_weights/000080"


# --- model ---

NAME_THE_BASE = (
    'Write the id of the served model as "base_model" into its checkpoint.json, '
    "or its name for the base into also_known_as of that model in config.yaml."
)


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("nobody/nothing", ""),
        (f"{CHAT}:peft:129", f" Did you mean '{CHAT}:peft:128'?"),
        (f"{CHAT}:peft", f" Did you mean '{CHAT}:peft:128' or '{CHAT}'?"),
        (f"{CHAT}:", f" Did you mean '{CHAT}' or '{CHAT}:peft:128'?"),
        (CHAT.upper(), f" Did you mean '{CHAT}'?"),
        ("x" * 1024, ""),
    ],
)
def test_an_unknown_model_or_variant_is_404_that_says_what_is_written_alike(
    edge: RunningEdge, model: str, hint: str
) -> None:
    response = edge.complete(model=model)
    message = f"The model {model!r} does not exist, or this key may not use it.{hint}"
    assert (response.status_code, response.json()) == (404, error(message, param="model", code="model_not_found"))


@pytest.mark.parametrize("model", [CHAT, f"{CHAT}:peft:128", "tiny/Chap"])
def test_a_model_that_the_key_may_not_use_looks_like_an_unknown_one(edge: RunningEdge, model: str) -> None:
    response = edge.post("/completions", key=OTHER_KEY, model=model, prompt="x")
    message = f"The model {model!r} does not exist, or this key may not use it."
    assert (response.status_code, response.json()) == (404, error(message, param="model", code="model_not_found"))


def test_a_malformed_checkpoint_path_is_400_that_says_which_part(edge: RunningEdge) -> None:
    assert refused(edge.complete(model="tinker://a/weights/b")) == (
        "model holds a malformed checkpoint path 'tinker://a/weights/b': "
        "only checkpoints of the type 'sampler_weights' can be sampled, got 'weights'.",
        "model",
    )


def test_an_unknown_checkpoint_is_404(edge: RunningEdge) -> None:
    response = edge.complete(model=PATH)
    message = f"The model {PATH!r} does not exist, or this key may not use it."
    assert (response.status_code, response.json()) == (404, error(message, param="model", code="model_not_found"))


def test_somebody_elses_private_checkpoint_is_404_like_an_unknown_model(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", owner="bob")
    response = edge.complete(model=PATH)
    message = f"The model {PATH!r} does not exist, or this key may not use it."
    assert (response.status_code, response.json()) == (404, error(message, param="model", code="model_not_found"))


@pytest.mark.parametrize(("owner", "public"), [("alice", False), (None, False), ("bob", True)])
def test_ones_own_and_public_checkpoints_are_served(edge: RunningEdge, owner: str | None, public: bool) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", owner=owner, public=public)
    response = edge.complete(model=PATH, max_tokens=1)
    assert response.json()["model"] == PATH
    assert edge.script.requests[-1].adapter is not None
    assert edge.script.requests[-1].adapter.digest == "d1"


@pytest.mark.parametrize("form", ["{}", f"{BASE};{{}}"])
def test_a_checkpoint_on_a_base_that_the_key_may_not_use_is_404_like_an_unknown_one(
    edge: RunningEdge, form: str
) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1")
    there = edge.post("/completions", key=OTHER_KEY, model=form.format(PATH), prompt="x")
    unknown = edge.post("/completions", key=OTHER_KEY, model=form.format(PATH + "1"), prompt="x")
    message = f"The model {PATH!r} does not exist, or this key may not use it."
    assert (there.status_code, there.json()) == (404, error(message, param="model", code="model_not_found"))
    assert unknown.json()["error"] == there.json()["error"] | {"message": message.replace(PATH, PATH + "1")}


def test_a_checkpoint_on_a_base_that_is_not_served_is_404_that_says_which(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model="other/Base")
    response = edge.complete(model=PATH)
    message = f"The base 'other/Base' of the checkpoint {PATH} is not served. {NAME_THE_BASE}"
    assert (response.status_code, response.json()) == (404, error(message, param="model", code="model_not_found"))


def test_a_checkpoint_whose_base_is_unknown_cannot_be_asked_for_on_another(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model="other/Base")
    assert refused(edge.complete(model=f"{BASE};{PATH}")) == (
        f"The checkpoint {PATH} was trained on 'other/Base', not on {BASE!r}. {NAME_THE_BASE}",
        "model",
    )


def test_a_checkpoint_on_another_base_than_its_own_is_400(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1")
    assert refused(edge.complete(model=f"{BASE};{PATH}")) == (
        f"The checkpoint {PATH} was trained on {CHAT!r}, not on {BASE!r}.",
        "model",
    )


def test_a_checkpoint_that_does_not_tell_its_base_needs_one_named(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model=None)
    assert refused(edge.complete(model=PATH)) == (
        f"The checkpoint {PATH} does not name its base model: use '<base>;{PATH}'.",
        "model",
    )
    assert edge.complete(model=f"{BASE};{PATH}", max_tokens=1).status_code == 200


def test_a_checkpoint_with_another_context_length_of_its_base_has_that_length(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1")
    model = f"{CHAT}:peft:128;{PATH}"
    assert refused(edge.complete([1] * 100, model=model, max_tokens=29)) == (
        "Prompt length plus max_tokens exceeds the model's context window: 100 + 29 > 128",
        "max_tokens",
    )
    assert edge.complete([1] * 100, model=model, max_tokens=28).json()["model"] == model


@pytest.mark.parametrize(
    ("stored", "status", "code", "retry_after"),
    [
        (CheckpointIncomplete("It is being written."), 404, "checkpoint_incomplete", "1"),
        (CheckpointRefused("adapter_config.json: use_dora is not supported."), 422, "checkpoint_refused", None),
        (CheckpointUnavailable("secret store"), 503, "checkpoint_unavailable", "2"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_says_why(
    edge: RunningEdge, stored: Exception, status: int, code: str, retry_after: str | None
) -> None:
    edge.checkpoints.held[PATH] = stored
    response = edge.complete(model=PATH)
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (code, "model")
    assert "secret" not in response.text


# --- sampling ---


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", -0.1, "must be at least 0, got -0.1."),
        ("temperature", True, "must be a number, got true."),
        ("temperature", "1", 'must be a number, got "1".'),
        ("temperature", [], "must be a number, got a list of 0."),
        ("top_p", 0, "must be greater than 0, got 0."),
        ("top_p", 1.01, "must be at most 1, got 1.01."),
        ("top_p", False, "must be a number, got false."),
        ("top_k", -2, "must be at least -1, got -2."),
        ("top_k", 1.5, "must be an integer, got 1.5."),
        ("top_k", True, "must be an integer, got true."),
        ("min_p", 1.1, "must be at most 1, got 1.1."),
        ("min_p", True, "must be a number, got true."),
        ("presence_penalty", True, "must be a number, got true."),
        ("frequency_penalty", False, "must be a number, got false."),
        ("repetition_penalty", True, "must be a number, got true."),
        ("presence_penalty", 2.5, "must be at most 2, got 2.5."),
        ("frequency_penalty", -2.5, "must be at least -2, got -2.5."),
        ("repetition_penalty", 0, "must be at least 0.01, got 0."),
        ("seed", 1.0, "must be an integer, got 1.0."),
        ("seed", True, "must be an integer, got true."),
        ("seed", 2**64, "must be at most 18446744073709551615, got 18446744073709551616."),
        ("seed", -(2**63) - 1, "must be at least -9223372036854775808, got -9223372036854775809."),
        ("max_tokens", -1, "must be at least 0, got -1."),
        ("max_tokens", True, "must be an integer, got true."),
        ("logprobs", 21, "must be at most 20, got 21."),
        ("logprobs", -1, "must be at least 0, got -1."),
        ("logprobs", True, "must be an integer, got true."),
        ("stream", "yes", 'must be true or false, got "yes".'),
        ("echo", 1, "must be true or false, got 1."),
        ("return_token_ids", "x", 'must be true or false, got "x".'),
        ("prompt_cache_key", 5, "must be a string, got 5."),
        ("logit_bias", [], "must be an object from token ids to biases, got a list of 0."),
        ("logit_bias", {"x": 1}, 'must have token ids as keys, got "x".'),
        ("logit_bias", {"512": 1}, "must hold token ids below the vocabulary size 512, got 512."),
    ],
)
def test_a_value_out_of_range_names_field_limit_and_value(edge: RunningEdge, field: str, value: Any, says: str) -> None:
    assert refused(edge.complete(**{field: value})) == (f"{field} {says}", field)


@pytest.mark.parametrize(("bias", "shown"), [(101, "101"), (-100.5, "-100.5"), (True, "true"), ("1", '"1"')])
def test_a_bias_out_of_range_names_its_token(edge: RunningEdge, bias: Any, shown: str) -> None:
    message = f"logit_bias.7 must be a number from -100 to 100, got {shown}."
    assert refused(edge.complete(logit_bias={"7": bias})) == (message, "logit_bias.7")


@pytest.mark.parametrize("written", ["1e999", "-1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"]
)
def test_infinity_is_400_in_every_field_that_is_a_number(edge: RunningEdge, field: str, written: str) -> None:
    content = f'{{"model": "{BASE}", "prompt": "x", "{field}": {written}}}'
    with edge.http() as client:
        response = client.post("/completions", content=content, headers={"content-type": "application/json"})
    message, param = refused(response)
    assert param == field
    assert message.endswith(f"got {'-' * written.startswith('-')}Infinity.")


def test_no_tokens_at_all_need_echo(edge: RunningEdge) -> None:
    message = "max_tokens must be at least 1 (or 0 together with echo), got 0."
    assert refused(edge.complete(max_tokens=0)) == (message, "max_tokens")


def test_stream_options_need_a_stream(edge: RunningEdge) -> None:
    for fields in ({}, {"stream": False}, {"stream": None}):
        assert refused(edge.complete(stream_options={"include_usage": True}, **fields)) == (
            "stream_options needs stream to be true, got stream_options without it.",
            "stream_options",
        )


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ("", "stop must not hold an empty string, got a list of 1."),
        (["a", ""], "stop must not hold an empty string, got a list of 2."),
        (5, "stop must be a string, a list of strings or a list of token ids, got 5."),
        (["a", 1], "stop must be a string, a list of strings or a list of token ids, got a list of 2."),
        ([True], "stop must be a string, a list of strings or a list of token ids, got a list of 1."),
        ([None], "stop must be a string, a list of strings or a list of token ids, got a list of 1."),
        ({"a": 1}, "stop must be a string, a list of strings or a list of token ids, got an object."),
        ([512], "stop must hold token ids below the vocabulary size 512, got 512."),
        (["x" * 1025], "Each string of stop must have at most 1024 characters, got 1025."),
        ([f"{i}" for i in range(257)], "stop must have at most 256 items, got 257."),
        ([f"{i:1000}" for i in range(20)], "stop: all stop strings together have at most 16384 characters, got 20000."),
    ],
)
def test_a_stop_that_cannot_be_is_400(edge: RunningEdge, stop: Any, says: str) -> None:
    assert refused(edge.complete(stop=stop)) == (says, "stop")


def test_a_negative_stop_id_names_its_place(edge: RunningEdge) -> None:
    assert refused(edge.complete(stop=[3, -1])) == ("stop[1] must be a token id, got -1.", "stop[1]")


# --- context ---


def test_a_prompt_as_long_as_the_context_is_400(edge: RunningEdge) -> None:
    response = edge.complete([1] * 4096)
    message = "prompt must have fewer tokens than the model's context window of 4096, got 4096."
    assert response.json() == error(message, param="prompt", code="context_length_exceeded")


def test_prompt_and_max_tokens_over_the_context_is_400(edge: RunningEdge) -> None:
    response = edge.complete([1] * 4000, max_tokens=97)
    message = "Prompt length plus max_tokens exceeds the model's context window: 4000 + 97 > 4096"
    assert response.json() == error(message, param="max_tokens", code="context_length_exceeded")


def test_a_chat_longer_than_the_context_is_400(edge: RunningEdge) -> None:
    message, param = refused(edge.chat("x" * 5000))
    assert param == "messages"
    assert message.startswith("messages must have fewer tokens than the model's context window of 4096, got ")


# --- prompt ---


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "prompt must not be empty, got a string of 0 characters."),
        ([], "prompt must not be empty, got a list of 0."),
        ([""], "prompt[0] must not be empty, got a string of 0 characters."),
        ([[]], "prompt[0] must not be empty, got a list of 0."),
        (["a", "b"], "prompt must be one prompt, got a list of 2."),
        ([[1], [2]], "prompt must be one prompt, got a list of 2."),
        ([1, "a"], "prompt[1] must be a token id, got a string of 1 characters."),
        ([1, True], "prompt[1] must be a token id, got true."),
        ([[1, 2.5]], "prompt[0][1] must be a token id, got 2.5."),
        ([-1], "prompt[0] must be a token id, got -1."),
        ([512], "prompt must hold token ids below the vocabulary size 512, got 512."),
        (7, "prompt must be a string or a list of token ids, got 7."),
        ({"a": 1}, "prompt must be a string or a list of token ids, got an object."),
    ],
)
def test_a_prompt_that_cannot_be_is_400(edge: RunningEdge, prompt: Any, says: str) -> None:
    assert refused(edge.complete(prompt)) == (says, named(says))


def test_no_prompt_at_all_is_400(edge: RunningEdge) -> None:
    message = "Exactly one of prompt and prompt_chunks must be set, got neither."
    assert refused(edge.complete(None)) == (message, "prompt")


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ([], "prompt_chunks must not be empty, got a list of 0."),
        ("x", "prompt_chunks must be a list, got a string of 1 characters."),
        ([1], "prompt_chunks[0] must be an object, got 1."),
        ([{"type": "audio"}], 'prompt_chunks[0].type must be "tokens" or "image_url", got "audio".'),
        (
            [{"type": "tokens", "tokens": "x"}],
            "prompt_chunks[0].tokens must be a list of token ids, got a string of 1 characters.",
        ),
        ([{"type": "tokens", "tokens": []}], "prompt_chunks[0].tokens must not be empty, got a list of 0."),
        (
            [{"type": "tokens", "tokens": [600]}],
            "prompt_chunks must hold token ids below the vocabulary size 512, got 600.",
        ),
        ([{"type": "image_url"}], "prompt_chunks[0].image_url.url must be a URL, got null."),
    ],
)
def test_prompt_chunks_that_cannot_be_are_400(edge: RunningEdge, chunks: Any, says: str) -> None:
    assert refused(edge.complete(None, prompt_chunks=chunks)) == (says, named(says))


def test_a_prompt_and_prompt_chunks_together_are_400(edge: RunningEdge) -> None:
    chunks = [{"type": "tokens", "tokens": [1]}]
    message = "Exactly one of prompt and prompt_chunks must be set, got both."
    assert refused(edge.complete("x", prompt_chunks=chunks)) == (message, "prompt")


def test_images_in_a_prompt_need_a_vision_model(edge: RunningEdge) -> None:
    chunks = [{"type": "tokens", "tokens": [1]}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    message = f"prompt_chunks[1] is an image, and the model {BASE!r} takes no images."
    assert refused(edge.complete(None, prompt_chunks=chunks)) == (message, "prompt_chunks[1]")


def test_echo_cannot_repeat_prompt_chunks(edge: RunningEdge) -> None:
    chunks = [{"type": "tokens", "tokens": [1]}]
    message = "echo needs prompt; it cannot repeat prompt_chunks, got true."
    assert refused(edge.complete(None, prompt_chunks=chunks, echo=True)) == (message, "echo")
