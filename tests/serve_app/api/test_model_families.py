"""Models whose families have formats of their own, over HTTP: gpt-oss, GLM and Inkling, streamed and whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from transformers import PreTrainedTokenizerFast

from engines.fake import FakeConfig
from tests.renderers.families.cases.glm import glm_tokenizer
from tests.support.harness import RunningEdge, config_for, running_edge
from tests.support.renderer_kit import template
from tests.support.special_tokens import gpt_oss_tokenizer, inkling_tokenizer

VOCAB_SIZE = 200_100
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
QUESTION: Any = [{"role": "user", "content": "What is 17 * 23?"}]

MODELS: dict[str, tuple[PreTrainedTokenizerFast, str | None]] = {
    "openai/gpt-oss": (gpt_oss_tokenizer(), "gpt_oss"),
    "zai/GLM-5.3": (glm_tokenizer(), "glm5_3"),
    "thinkingmachines/Inkling": (inkling_tokenizer(), None),
}
ANSWERS = {
    "openai/gpt-oss": "<|channel|>analysis<|message|>17 * 23<|end|><|start|>assistant"
    "<|channel|>final<|message|>It is 391.<|return|>",
    "zai/GLM-5.3": "17 * 23</think>It is 391.<|user|>",
    "thinkingmachines/Inkling": "<|message_model|><|content_thinking|>17 * 23<|end_message|>"
    "<|message_model|><|content_text|>It is 391.<|end_message|><|content_model_end_sampling|>",
}
CALLS = {
    "openai/gpt-oss": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Köln"}<|call|>',
    "zai/GLM-5.3": "</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"
    "<|observation|>",
    "thinkingmachines/Inkling": "<|message_model|>get_weather<|content_invoke_tool_json|>"
    '{"name":"get_weather","args":{"city":"Köln"}}<|end_message|><|content_model_end_sampling|>',
}
every_model = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    models = []
    for name, (tokenizer, source) in MODELS.items():
        folder = tmp_path_factory.mktemp("model")
        _save(folder, tokenizer, source)
        models.append({"id": name, "app": "tiny", "source": str(folder)})
    config = {**config_for({"chat": "unused", "base": "unused"}), "models": models}
    with running_edge(config, FakeConfig(vocab_size=VOCAB_SIZE, context_length=4096)) as running:
        yield running


def _save(folder: Path, tokenizer: PreTrainedTokenizerFast, source: str | None) -> None:
    tokenizer.save_pretrained(folder)
    if source is not None:
        (folder / "chat_template.jinja").write_text(template(source), encoding="utf-8")
    facts = {"max_position_embeddings": 4096, "vocab_size": VOCAB_SIZE, "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(facts))


def says(edge: RunningEdge, model: str, text: str) -> None:
    ids = MODELS[model][0].encode(text, add_special_tokens=False)
    edge.script.reply = lambda request: ids


def prompt(edge: RunningEdge, model: str) -> str:
    return str(MODELS[model][0].decode(edge.script.requests[-1].prompt_token_ids))


@every_model
def test_the_sample_with_an_effort_gives_reasoning_and_text(families: RunningEdge, model: str) -> None:
    says(families, model, ANSWERS[model])
    with families.sdk() as client:
        response = client.chat.completions.create(model=model, messages=QUESTION, reasoning_effort="high")
    [choice] = response.choices
    assert (choice.message.content, choice.finish_reason) == ("It is 391.", "stop")
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "17 * 23"
    assert choice.message.tool_calls is None


@every_model
def test_a_stream_gives_the_same_parts(families: RunningEdge, model: str) -> None:
    says(families, model, ANSWERS[model])
    response = families.post("/chat/completions", model=model, messages=QUESTION, stream=True)
    deltas = [event["choices"][0]["delta"] for event in families.events(response)[:-1]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "17 * 23"
    assert "".join(delta.get("content") or "" for delta in deltas) == "It is 391."


@every_model
def test_a_demanded_call_comes_back_and_goes_into_the_next_prompt(families: RunningEdge, model: str) -> None:
    says(families, model, CALLS[model])
    with families.sdk() as client:
        first = client.chat.completions.create(
            model=model, messages=QUESTION, tools=TOOLS, tool_choice="required", reasoning_effort="low"
        )
        message = first.choices[0].message
        assert (message.content, first.choices[0].finish_reason) == (None, "tool_calls")
        assert message.tool_calls is not None
        [call] = message.tool_calls
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Köln"}')
        history: Any = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "18"}]
        says(families, model, ANSWERS[model])
        second = client.chat.completions.create(model=model, messages=history, tools=TOOLS)
    assert second.choices[0].message.content == "It is 391."
    assert "Köln" in prompt(families, model)


@every_model
def test_a_call_of_what_was_not_declared_is_text(families: RunningEdge, model: str) -> None:
    says(families, model, CALLS[model])
    response = families.post("/chat/completions", model=model, messages=QUESTION)
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert "get_weather" in choice["message"]["content"]
    refused = families.post("/chat/completions", model=model, messages=QUESTION, tools=TOOLS, tool_choice="none")
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "tool_choice")


def test_numbers_are_efforts_of_inkling_and_booleans_are_not(families: RunningEdge) -> None:
    model = "thinkingmachines/Inkling"
    for effort, level in [(0.8, "0.8"), (0, "0"), (0.99, "0.99"), ("minimal", "0.1"), (None, "0.9")]:
        response = families.post("/chat/completions", model=model, messages=QUESTION, reasoning_effort=effort)
        assert response.status_code == 200, response.text
        assert f"Thinking effort level: {level}<|end_message|>" in prompt(families, model)
    for effort in (True, False, 1, 0.995, -0.1, "on"):
        response = families.post("/chat/completions", model=model, messages=QUESTION, reasoning_effort=effort)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "reasoning_effort")
        assert error["message"] == (
            "reasoning_effort: this model takes none, minimal, low, medium, high, xhigh, max "
            f"or a number from 0.0 to 0.99, got {effort!r}."
        )
