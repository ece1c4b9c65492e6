"""LiteLLM, with the service as an `openai/` provider: whole and streamed replies, tools, its error classes."""

import json

import litellm
import pytest
from service import BASE, CODE_WORD, CODE_WORD_ANSWER, KEY, PARIS, QUILL, TOOLS, URL, WEATHER

SERVICE = {"api_base": URL, "api_key": KEY, "num_retries": 0}


def test_a_chat_answers():
    reply = litellm.completion(f"openai/{QUILL}", messages=CODE_WORD, temperature=0, **SERVICE)
    assert reply.choices[0].message.content == CODE_WORD_ANSWER
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_is_folded_into_the_same_reply():
    options = {"messages": CODE_WORD, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(f"openai/{QUILL}", **options, **SERVICE))
    reply = litellm.stream_chunk_builder(chunks, messages=CODE_WORD)
    whole = litellm.completion(f"openai/{QUILL}", messages=CODE_WORD, temperature=0, **SERVICE)
    assert reply.choices[0].message.content == whole.choices[0].message.content == CODE_WORD_ANSWER
    assert reply.usage.completion_tokens == whole.usage.completion_tokens
    assert reply.choices[0].finish_reason == "stop"


async def test_the_asynchronous_functions_answer():
    reply = await litellm.acompletion(f"openai/{QUILL}", messages=CODE_WORD, temperature=0, **SERVICE)
    assert reply.choices[0].message.content == CODE_WORD_ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_reasoning_is_kept(stream):
    options = {"messages": PARIS, "tools": [WEATHER], "temperature": 0, "stream": stream}
    reply = litellm.completion(f"openai/{TOOLS}", **options, **SERVICE)
    if stream:
        reply = litellm.stream_chunk_builder(list(reply), messages=PARIS)
    choice = reply.choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert choice.finish_reason == "tool_calls"
    assert "weather in Paris" in choice.message.reasoning_content


def test_the_turn_with_a_tools_result_is_answered():
    asked = {"tools": [WEATHER], "temperature": 0, **SERVICE}
    message = litellm.completion(f"openai/{TOOLS}", messages=PARIS, **asked).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"temp_c": 18}'}
    answer = litellm.completion(f"openai/{TOOLS}", messages=[*PARIS, message, result], **asked)
    assert "18" in answer.choices[0].message.content


def test_text_is_completed():
    options = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    whole = litellm.text_completion(model=f"text-completion-openai/{BASE}", **options, **SERVICE)
    streamed = litellm.text_completion(model=f"text-completion-openai/{BASE}", **options, stream=True, **SERVICE)
    assert whole.usage.completion_tokens == 4
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == whole.choices[0].text


def test_the_router_balances_over_the_services_models():
    deployments = [
        {"model_name": "office", "litellm_params": {"model": f"openai/{QUILL}", "api_base": URL, "api_key": KEY}}
    ]
    reply = litellm.Router(model_list=deployments).completion("office", messages=CODE_WORD, temperature=0)
    assert reply.choices[0].message.content == CODE_WORD_ANSWER


@pytest.mark.parametrize(
    ("kind", "model", "options"),
    [
        (litellm.NotFoundError, "openai/no/such", {}),
        (litellm.BadRequestError, f"openai/{QUILL}", {"temperature": -1}),
        (litellm.AuthenticationError, f"openai/{QUILL}", {"api_key": "wrong"}),
    ],
)
def test_refusals_have_their_classes(kind, model, options):
    with pytest.raises(kind):
        litellm.completion(model, messages=CODE_WORD, **{**SERVICE, **options})
