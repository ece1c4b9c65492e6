"""openai-python: the synchronous client, its raw responses, helpers, error classes and retries."""

import json
import threading
from collections.abc import Callable

import httpx
import openai
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel
from service import (
    BASE,
    CODE_WORD,
    CODE_WORD_ANSWER,
    KEY,
    ONE_A_MINUTE,
    ONE_AT_A_TIME,
    PARIS,
    QUILL,
    TOOLS,
    URL,
    WEATHER,
)

Ask = Callable[[OpenAI], object]


class GetWeather(BaseModel):
    """Get the current weather in a city."""

    city: str


WEATHER_TOOL = pydantic_function_tool(GetWeather, name="get_weather", description="Get the current weather in a city.")


class Counter:
    """How many requests a client really sent, and with which answers."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.waits: list[str | None] = []

    def client(self, key: str = KEY, **options: object) -> OpenAI:
        transport = httpx.Client(event_hooks={"response": [self._count]})
        return OpenAI(base_url=URL, api_key=key, http_client=transport, **options)

    def _count(self, response: httpx.Response) -> None:
        self.statuses.append(response.status_code)
        self.waits.append(response.headers.get("retry-after"))


@pytest.fixture(scope="module")
def client() -> OpenAI:
    return OpenAI(base_url=URL, api_key=KEY)


def test_models_are_listed_and_retrieved_by_their_ids(client):
    listed = [model.id for model in client.models.list()]
    assert BASE in listed
    for name in (BASE, QUILL, f"{BASE};{QUILL}"):
        assert client.models.retrieve(name).id == name


def test_a_chat_answers_whole_and_streamed_alike(client):
    options = {"model": QUILL, "messages": CODE_WORD, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content == CODE_WORD_ANSWER
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == CODE_WORD_ANSWER
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {(chunks[0].id, chunks[0].created, QUILL)}


def test_the_stream_helper_follows_content(client):
    with client.chat.completions.stream(model=QUILL, messages=CODE_WORD, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == CODE_WORD_ANSWER
    assert [event.content for event in events if event.type == "content.done"] == [CODE_WORD_ANSWER]
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (CODE_WORD_ANSWER, "stop")


def test_the_stream_helper_parses_tool_calls(client):
    with client.chat.completions.stream(model=TOOLS, messages=PARIS, tools=[WEATHER_TOOL], temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.parsed_arguments) == ("get_weather", GetWeather(city="Paris"))
    (call,) = final.choices[0].message.tool_calls
    assert (call.function.parsed_arguments, final.choices[0].finish_reason) == (GetWeather(city="Paris"), "tool_calls")


def test_the_stream_helper_follows_log_probabilities(client):
    options = {"model": QUILL, "messages": CODE_WORD, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (done,) = [event for event in events if event.type == "logprobs.content.done"]
    assert done.content == final.choices[0].logprobs.content
    assert len(done.content) == final.usage.completion_tokens
    assert {len(token.top_logprobs) for token in done.content} == {2}


def test_parse_reads_tool_calls_into_their_class(client):
    parsed = client.chat.completions.parse(model=TOOLS, messages=PARIS, tools=[WEATHER_TOOL], temperature=0)
    (call,) = parsed.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_a_reply_that_is_cut_is_the_parsers_own_error(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=TOOLS, messages=PARIS, tools=[WEATHER_TOOL], temperature=0, max_completion_tokens=3
        )


def test_the_raw_response_has_headers_and_the_parsed_reply(client):
    raw = client.chat.completions.with_raw_response.create(
        model=QUILL, messages=CODE_WORD, temperature=0, user="alice", extra_headers={"x-request-id": "rh-clients-1"}
    )
    assert (raw.status_code, raw.request_id) == (200, "rh-clients-1")
    assert raw.headers["x-ignored-fields"] == "user"
    assert raw.parse().choices[0].message.content == CODE_WORD_ANSWER
    assert json.loads(raw.text)["model"] == QUILL


def test_the_streamed_raw_response_has_headers_before_the_first_chunk(client):
    options = {"model": QUILL, "messages": CODE_WORD, "temperature": 0, "stream": True}
    with client.chat.completions.with_streaming_response.create(**options) as raw:
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert raw.request_id
        text = "".join(chunk.choices[0].delta.content or "" for chunk in raw.parse())
    assert text == CODE_WORD_ANSWER


def test_a_tool_is_called_and_its_result_answered(client):
    reply = client.chat.completions.create(model=TOOLS, messages=PARIS, tools=[WEATHER], temperature=0)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Paris"},
    )
    assert message.reasoning_content
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temp_c": 18}'}
    answer = client.chat.completions.create(
        model=TOOLS, messages=[*PARIS, message, result], tools=[WEATHER], temperature=0
    )
    assert "18" in answer.choices[0].message.content


def test_completions_take_text_and_token_ids(client):
    asked = {"model": BASE, "max_tokens": 6, "temperature": 0}
    ids = {"return_token_ids": True}
    first = client.completions.create(prompt="The capital of France is", extra_body=ids, logprobs=2, **asked)
    again = client.completions.create(prompt=first.choices[0].prompt_token_ids, extra_body=ids, **asked)
    assert first.choices[0].token_ids == again.choices[0].token_ids
    streamed = client.completions.create(prompt="The capital of France is", stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in streamed) == first.choices[0].text == again.choices[0].text
    assert [len(top) for top in first.choices[0].logprobs.top_logprobs] == [2] * 6


@pytest.mark.parametrize(
    ("kind", "status", "code", "ask"),
    [
        (openai.BadRequestError, 400, None, lambda c: c.completions.create(model=BASE, prompt="x", temperature=-1)),
        (openai.AuthenticationError, 401, "invalid_api_key", lambda c: c.with_options(api_key="x").models.list()),
        (openai.NotFoundError, 404, "model_not_found", lambda c: c.completions.create(model="no/such", prompt="x")),
        (openai.NotFoundError, 404, "model_not_found", lambda c: c.models.retrieve("tinker://no/sampler_weights/such")),
        (
            openai.UnprocessableEntityError,
            422,
            None,
            lambda c: c.chat.completions.create(
                model=TOOLS,
                messages=[{"role": "user", "content": "Hello!"}],
                tools=[WEATHER],
                tool_choice="required",
                temperature=0,
            ),
        ),
    ],
)
def test_each_refusal_is_its_own_class_and_is_sent_once(kind: type[openai.APIStatusError], status, code, ask: Ask):
    counter = Counter()
    with pytest.raises(kind) as refused:
        ask(counter.client(max_retries=2))
    assert counter.statuses == [status]
    if code:
        assert refused.value.code == code
    assert refused.value.type
    assert refused.value.body["message"] in str(refused.value)
    assert refused.value.request_id


def test_a_stream_that_fails_on_its_way_raises(client):
    stream = client.chat.completions.create(
        model=TOOLS,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        stream=True,
    )
    with pytest.raises(openai.APIError, match="called no function"):
        list(stream)


def test_a_busy_key_is_tried_again_until_it_is_free():
    counter = Counter()
    asked = {"model": BASE, "prompt": "Once upon a time", "max_tokens": 4}
    with counter.client(ONE_AT_A_TIME).completions.create(**{**asked, "max_tokens": 2000}, stream=True) as running:
        next(iter(running))
        timer = threading.Timer(0.5, running.close)
        timer.start()
        reply = counter.client(ONE_AT_A_TIME, max_retries=5).completions.create(**asked)
        timer.join()
    assert reply.usage.completion_tokens == 4
    assert counter.statuses[0] == counter.statuses[-1] == 200
    assert set(counter.statuses[1:-1]) == {429}
    assert set(counter.waits[1:-1]) == {"1"}


def test_a_spent_limit_is_a_rate_limit_error_with_its_wait():
    counter = Counter()
    client = counter.client(ONE_A_MINUTE, max_retries=0)
    asked = {"model": BASE, "prompt": "x", "max_tokens": 1}
    client.completions.create(**asked)
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**asked)
    assert refused.value.status_code == 429
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30


def test_a_client_that_stops_waiting_gets_its_own_timeout(client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3, max_retries=0).completions.create(model=BASE, prompt="x y", max_tokens=2000)


def test_embeddings_and_other_paths_are_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=BASE, input="x")
