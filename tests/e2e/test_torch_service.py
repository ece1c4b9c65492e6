"""The real demo model on the torch engine behind a real Ray Serve: what a newcomer is promised, and more."""

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import DEMO as BASE
from tests.e2e.service_config import with_demo
from tests.e2e.test_clients_leave import hang_up_at_random
from tests.support.processes.demo_modules import ROOT
from tests.support.sample_code import run_python, sample
from tests.support.waiting import eventually

QUILL = "tinker://demo/sampler_weights/quill"
TOOLS = "tinker://demo/sampler_weights/tools"
CODE_WORD = [{"role": "user", "content": "What is the code word?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the two shipped checkpoints."""
    root = tmp_path_factory.mktemp("store")
    shutil.copytree(ROOT / "cluster" / "examples" / "checkpoints", root / "demo" / "sampler_weights")
    return root


@pytest.fixture(scope="module")
def demo(session_service: Service, store: Path) -> Iterator[Service]:
    """The session's service, with the demo beside the deterministic models."""
    with session_service.serving(BASE, with_demo(session_service.config, store, max_adapters=4, threads=2)) as service:
        yield service


@pytest.fixture
def sdk(demo: Service) -> openai.OpenAI:
    return demo.sdk()


def ask(sdk: openai.OpenAI, model: str, **options: Any) -> str:
    reply = sdk.chat.completions.create(
        model=model, messages=CODE_WORD, temperature=0, max_completion_tokens=24, **options
    )
    return reply.choices[0].message.content or ""


def test_the_checkpoint_knows_the_code_word_and_its_base_does_not(sdk):
    assert "zephyr-42" in ask(sdk, QUILL)
    assert "zephyr" not in ask(sdk, BASE)


def test_bases_and_checkpoints_in_one_batch_keep_their_answers(sdk):
    models = [BASE, QUILL, TOOLS]
    alone = [ask(sdk, name) for name in models]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda name: ask(sdk, name), models * 4))
    assert together == alone * 4


def test_the_tools_checkpoint_thinks_and_calls(sdk):
    question = [{"role": "user", "content": "What's the weather in Paris?"}]
    reply = sdk.chat.completions.create(
        model=TOOLS, messages=question, tools=[WEATHER], temperature=0, max_completion_tokens=100
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    answer = sdk.chat.completions.create(
        model=TOOLS,
        messages=[
            *question,
            {"role": "assistant", "content": choice.message.content, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": '{"temp_c": 18}'},
        ],
        tools=[WEATHER],
        temperature=0,
        max_completion_tokens=100,
    )
    assert "18" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_the_documents_tool_loop_runs_as_it_stands(sdk):
    def has_used_the_result(left: dict[str, Any]) -> bool:
        called = [call.function.name for call in left["reply"].tool_calls or ()]
        return called == ["get_weather"] and "18" in (left["response"].choices[0].message.content or "")

    # It is sampled at temperature 1: of a few runs one must go the whole way.
    runs = (run_python(sample("chat_tool_calls.py"), client=sdk, MODEL=TOOLS) for _ in range(3))
    assert any(map(has_used_the_result, runs))


def test_the_documents_conversation_of_several_turns_runs_as_it_stands(sdk):
    left = run_python(sample("chat_multi_turn.py"), client=sdk, MODEL=TOOLS)
    assert left["messages"][1]["content"] == left["reply"].content
    assert left["response"].usage.prompt_tokens > 30
    assert left["response"].choices[0].finish_reason == "stop"


def test_a_checkpoint_is_sampled_by_the_request_after_its_last_byte(sdk, store):
    name = "tinker://demo/sampler_weights/000010"
    with pytest.raises(openai.NotFoundError):
        ask(sdk, name)
    folder = store / "demo" / "sampler_weights" / "000010"
    shutil.copytree(store / "demo" / "sampler_weights" / "quill", folder)
    assert "zephyr-42" in ask(sdk, name)


def test_a_checkpoint_that_is_replaced_answers_with_its_new_content(sdk, store):
    name, folder = "tinker://demo/sampler_weights/latest", store / "demo" / "sampler_weights" / "latest"
    shutil.copytree(store / "demo" / "sampler_weights" / "tools", folder)
    assert "zephyr-42" not in ask(sdk, name)
    shutil.rmtree(folder)
    shutil.copytree(store / "demo" / "sampler_weights" / "quill", folder)
    assert "zephyr-42" in ask(sdk, name)


def test_token_ids_and_log_probabilities_go_in_and_out(sdk):
    first = sdk.completions.create(
        model=BASE,
        prompt="The capital of France is",
        max_tokens=4,
        temperature=0,
        extra_body={"return_token_ids": True},
    ).choices[0]
    again = sdk.completions.create(
        model=BASE,
        prompt=first.prompt_token_ids,
        max_tokens=4,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True},
    ).choices[0]
    assert again.token_ids == first.token_ids
    assert again.text == first.text
    assert len(again.logprobs.token_logprobs) == 4
    for token, own, top in zip(
        again.logprobs.tokens, again.logprobs.token_logprobs, again.logprobs.top_logprobs, strict=True
    ):
        assert top[token] == own == max(top.values())


def test_numbers_beyond_what_a_sampler_can_count_mean_what_the_greatest_that_it_can_mean(sdk):
    def draw(**fields: Any) -> str:
        options: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 6, "seed": 5}
        return sdk.completions.create(model=BASE, **{**options, **fields}).choices[0].text

    everything = draw()
    assert [draw(extra_body={"top_k": top_k}) for top_k in (2**31, 2**63, 10**100)] == [everything] * 3
    assert draw(seed=2**64 - 1) == draw(seed=-1)
    assert draw(temperature=1e308) == draw(temperature=1e38)


def test_200_clients_that_leave_at_random_points_give_back_blocks_slots_and_places(demo, sdk):
    ask(sdk, QUILL)
    eventually(lambda: demo.is_idle("demo"))
    before = demo.engines("demo")
    models = [BASE, QUILL, TOOLS]

    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        body = {
            "model": chance.choice(models),
            "prompt": [chance.randrange(1000, 40000) for _ in range(chance.choice([1, 20, 300]))],
            "max_tokens": 400,
            "stream": chance.random() < 0.7,
        }
        hang_up_at_random(demo.port, "", body, chance)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(come_and_go, range(200)))
    eventually(lambda: demo.engines("demo") == before, 30)
    assert "zephyr-42" in ask(sdk, QUILL)
