"""The OpenAI SDK against the real service, over both transports."""

import openai
import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import MODEL, PLAIN_PREFIX

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(params=["", PLAIN_PREFIX], ids=["channel", "serve"])
def sdk(service: Service, request: pytest.FixtureRequest) -> openai.OpenAI:
    return service.sdk(request.param, max_retries=0)


def test_a_chat_is_answered(sdk):
    reply = sdk.chat.completions.create(model=MODEL, messages=QUESTION, seed=1, max_tokens=30)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 30


def test_a_stream_is_the_same_reply(sdk):
    whole = sdk.completions.create(model=MODEL, prompt="The capital", max_tokens=30, seed=7)
    chunks = list(sdk.completions.create(model=MODEL, prompt="The capital", max_tokens=30, seed=7, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_tokens_come_one_step_at_a_time(sdk):
    stream = sdk.completions.create(
        model=MODEL, prompt="x", max_tokens=30, stream=True, extra_body={"return_token_ids": True}
    )
    sizes = [len(chunk.choices[0].token_ids) for chunk in stream]
    assert sum(sizes) == 30
    assert len(sizes) > 5


def test_both_transports_give_the_same_log_probabilities(service):
    ask = {"model": MODEL, "prompt": "The capital", "max_tokens": 5, "seed": 3, "logprobs": 4, "echo": True}
    replies = [service.sdk(prefix).completions.create(**ask) for prefix in ("", PLAIN_PREFIX)]
    assert replies[0].choices[0].model_dump() == replies[1].choices[0].model_dump()
    assert len(replies[0].choices[0].logprobs.token_logprobs) > 5


def test_what_the_engine_refuses_is_the_callers_error(sdk):
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model=MODEL, prompt="x", max_tokens=10**6)
    assert refused.value.body["param"]


def test_an_unknown_model_is_not_found(sdk):
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="no/such", prompt="x")


def test_the_models_are_listed(sdk):
    assert MODEL in [model.id for model in sdk.models.list()]


def test_every_response_has_one_request_id(service):
    raw = service.sdk().completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=1)
    assert len(raw.headers.get_list("x-request-id")) == 1
    raw = service.sdk().completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers.get_list("x-request-id") == ["mine"]
