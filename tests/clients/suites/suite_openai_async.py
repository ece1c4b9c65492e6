"""openai-python: the asynchronous client."""

import asyncio

import openai
import pytest
from openai import AsyncOpenAI
from service import BASE, CODE_WORD, CODE_WORD_ANSWER, KEY, QUILL, TOOLS, URL, WEATHER


@pytest.fixture
async def client():
    async with AsyncOpenAI(base_url=URL, api_key=KEY) as client:
        yield client


async def test_a_chat_answers_whole_and_streamed_alike(client):
    options = {"model": QUILL, "messages": CODE_WORD, "temperature": 0}
    whole = await client.chat.completions.create(**options)
    text = ""
    async for chunk in await client.chat.completions.create(**options, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content == CODE_WORD_ANSWER


async def test_the_stream_helper_ends_with_the_whole_reply(client):
    async with client.chat.completions.stream(model=QUILL, messages=CODE_WORD, temperature=0) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == CODE_WORD_ANSWER


async def test_raw_responses_are_parsed(client):
    raw = await client.chat.completions.with_raw_response.create(model=QUILL, messages=CODE_WORD, temperature=0)
    assert raw.parse().choices[0].message.content == CODE_WORD_ANSWER


async def test_many_requests_at_once_keep_their_answers(client):
    cities = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Berlin", "Madrid"]

    async def call(city: str) -> str:
        question = [{"role": "user", "content": f"What's the weather in {city}?"}]
        reply = await client.chat.completions.create(model=TOOLS, messages=question, tools=[WEATHER], temperature=0)
        return reply.choices[0].message.tool_calls[0].function.arguments

    assert await asyncio.gather(*map(call, cities)) == [f'{{"city": "{city}"}}' for city in cities]


async def test_a_cancelled_request_leaves_the_client_usable(client):
    task = asyncio.create_task(client.completions.create(model=BASE, prompt="x y z", max_tokens=2000))
    await asyncio.wait({task}, timeout=0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    reply = await client.chat.completions.create(model=QUILL, messages=CODE_WORD, temperature=0)
    assert reply.choices[0].message.content == CODE_WORD_ANSWER


async def test_models_page_asynchronously(client):
    assert BASE in [model.id async for model in client.models.list()]


async def test_a_refusal_has_its_class(client):
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model="no/such", messages=CODE_WORD)
    assert refused.value.code == "model_not_found"
