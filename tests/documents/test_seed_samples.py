"""Every sample of the four documents that the API reproduces, run as it stands, against the whole service.

The sample with an image in `prompt_chunks` is in
`tests/serve_app/images/test_real_pixels.py`. The samples of tool calls and of several
turns also run against a real model, in `e2e/test_torch_service.py`; the one for openai-node is in `clients/`.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.support.harness import BASE, CHAT, KEY, RunningEdge
from tests.support.marketplace.slugs import SLUG, Sell, ask, local, remote
from tests.support.marketplace.upstream import running_upstream
from tests.support.sample_code import environment, run_curl, run_python, sample, send_as_curl

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")

REASONING, ANSWER = "17 * 20 = 340, and 17 * 3 = 51. 340 + 51 = 391.", "17 * 23 = 391."
SOLVED = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"
ASK_KEY = "ask_an-inference-key"
COLORS = " red, yellow and blue."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

Send = Callable[[str, str], str]
by_curl = pytest.mark.parametrize("send", [run_curl, send_as_curl] if shutil.which("curl") else [send_as_curl])


def text_of(edge: RunningEdge, name: str) -> str:
    return sample(name, host=f"http://127.0.0.1:{edge.port}", chat_model=CHAT, text_model=BASE)


def run(edge: RunningEdge, name: str, **names: Any) -> dict[str, Any]:
    return run_python(text_of(edge, name), **{"client": edge.sdk(), "MODEL": CHAT, **names})


def says_in_turn(edge: RunningEdge, *replies: str) -> None:
    """One reply per request."""
    waiting = iter([[*edge.script.encode(reply), edge.script.end] for reply in replies])
    edge.script.reply = lambda request: next(waiting)


def prompt(edge: RunningEdge, index: int) -> str:
    return str(edge.script.tokenizer.decode(edge.script.requests[index].prompt_token_ids))


def kinds(value: Any) -> Any:
    """The form of a JSON value: what is in it, without the values themselves."""
    if isinstance(value, dict):
        return {name: kinds(item) for name, item in value.items()}
    return [kinds(item) for item in value] if isinstance(value, list) else type(value)


def has_form(value: Any, form: Any) -> bool:
    """All that the documented one has, of the same kinds; more fields are allowed."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(name in value and has_form(value[name], form[name]) for name in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(map(has_form, value, form)) and len(value) == len(form)
    return bool(value == form)


# --- the overview ---


def test_the_client_of_the_overview_gets_its_answer(edge, monkeypatch, capsys):
    for name, value in environment(KEY).items():
        monkeypatch.setenv(name, value)
    edge.script.says(SOLVED)
    run_python(text_of(edge, "overview_client.py"))["client"].close()
    assert capsys.readouterr().out == f"{ANSWER}\n"
    assert "What is 17 * 23?" in prompt(edge, 0)


@by_curl
def test_the_curl_of_the_overview_is_told_which_efforts_this_model_takes(edge, send: Send):
    error = json.loads(send(text_of(edge, "overview_curl.sh"), KEY))["error"]
    assert error["message"] == "reasoning_effort: this model takes true, false, none, got 'high'."


@by_curl
def test_a_wrong_key_is_told_to_curl_as_well(edge, send: Send):
    assert json.loads(send(text_of(edge, "overview_curl.sh"), "tml-nobody"))["error"]["code"] == "invalid_api_key"


def test_what_is_inside_an_extra_body_key_of_raw_json_is_lost(edge):
    edge.script.says("Hi.")
    response = edge.chat(extra_body={"top_k": 3})
    assert edge.script.requests[-1].sampling.top_k == 0
    assert response.headers["x-ignored-fields"] == "extra_body"


# --- chat ---


def test_the_first_chat_prints_the_answer(edge, capsys):
    edge.script.says(SOLVED)
    run(edge, "chat_first.py")
    assert capsys.readouterr().out == f"{ANSWER}\n"


def test_an_effort_that_the_model_does_not_take_is_400_with_those_it_does(edge):
    with pytest.raises(openai.BadRequestError, match="this model takes true, false, none, got 'high'"):
        run(edge, "chat_reasoning_effort.py")


def test_a_streamed_chat_prints_reasoning_answer_and_tokens(edge, capsys):
    edge.script.says(SOLVED)
    run(edge, "chat_streaming.py")
    num_tokens = len(edge.script.requests[0].prompt_token_ids) + len(edge.script.encode(SOLVED)) + 1
    assert capsys.readouterr().out == f"\n[Reasoning]\n{REASONING}\n[Answer]\n{ANSWER}\nTokens: {num_tokens}\n"


def test_the_tool_loop_brings_the_result_to_the_model(edge):
    says_in_turn(edge, f"<think>\nI will call it.\n</think>\n\n{CALL}", "It is 18 °C in Paris.")
    left = run(edge, "chat_tool_calls.py")
    assert left["response"].choices[0].message.content == "It is 18 °C in Paris."
    assert left["reply"].content is None
    assert "<think>\nI will call it.\n</think>" in prompt(edge, 1)
    assert '<tool_response>\n{"city": "Paris", "temp_c": 18}\n</tool_response>' in prompt(edge, 1)


def test_the_tool_loop_takes_several_calls(edge):
    says_in_turn(edge, CALL + CALL.replace("Paris", "Rome"), "Both 18.")
    run(edge, "chat_tool_calls.py")
    assert prompt(edge, 1).count("<tool_response>") == 2


def test_the_tool_loop_ends_where_the_model_answers_with_text_only(edge):
    edge.script.says("I do not know.")
    left = run(edge, "chat_tool_calls.py")
    assert (left["reply"].tool_calls, "response" in left) == (None, False)


def test_several_turns_keep_their_reasoning(edge):
    says_in_turn(edge, SOLVED, "400")
    left = run(edge, "chat_multi_turn.py")
    assert left["response"].choices[0].message.content == "400"
    assert f"{SOLVED}<|im_end|>\n<|im_start|>user\nNow add 9 to that." in prompt(edge, 1)


def test_the_request_of_the_reference_prints_reasoning_and_answer(edge, capsys):
    edge.script.says(SOLVED)
    run(edge, "chat_request.py")
    assert capsys.readouterr().out == f"{REASONING}\n{ANSWER}\n"
    sampling = edge.script.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (256, 0.7)


def test_the_conversation_with_a_tool_call_is_rendered_whole(edge):
    edge.script.says("Yes.")
    messages = json.loads(sample("chat_conversation.json"))
    assert edge.post("/chat/completions", model=CHAT, messages=messages).status_code == 200
    for text in ("You are a helpful assistant.", '{"city": "Paris"}', '{"temp_c": 18}', "It is 18 °C in Paris."):
        assert text in prompt(edge, 0)


def test_a_chat_reply_has_every_field_of_the_documented_one(edge):
    edge.script.says(SOLVED)
    documented, reply = json.loads(sample("chat_response.json")), edge.chat().json()
    assert has_form(kinds(reply), kinds(documented)), reply
    assert reply["choices"] == documented["choices"]


# --- completions ---


def test_the_first_completion_prints_its_text(edge, capsys):
    edge.script.says(" Paris.")
    run(edge, "text_first.py")
    assert capsys.readouterr().out == " Paris.\n"
    assert edge.script.requests[0].sampling.max_tokens == 50


def test_token_ids_go_in_and_out(edge, capsys):
    edge.script.says(" Paris.")
    tokens = edge.script.encode("The capital of France is")
    run(edge, "text_token_ids.py", tokens=tokens)
    assert capsys.readouterr().out == f"{[*edge.script.encode(' Paris.'), edge.script.end]}\n{tokens}\n"


def test_a_completion_has_every_field_of_the_documented_one(edge):
    documented = json.loads(sample("text_response.json"))
    edge.script.says(documented["choices"][0]["text"])
    reply = edge.complete("The capital of France is").json()
    assert has_form(kinds(reply), kinds(documented)), reply
    assert reply["choices"] == documented["choices"]


# --- the marketplace ---


@pytest.fixture(params=["local", "remote"])
def market(request: pytest.FixtureRequest, edge: RunningEdge, sell: Sell) -> Iterator[RunningEdge]:
    """The service with a slug whose endpoint is here or elsewhere, and a key as that document has them."""
    edge.script.says(COLORS)
    key = {"name": "ask", "sha256": hashlib.sha256(ASK_KEY.encode()).hexdigest(), "models": [SLUG]}
    with running_upstream() as upstream:
        endpoint = local("it") if request.param == "local" else remote("it", upstream.url)
        sell(endpoint, changes={"keys": [key, *edge.config["keys"]]})
        yield edge


def market_sample(edge: RunningEdge, name: str, model: str = SLUG) -> str:
    return sample(name, host=f"http://127.0.0.1:{edge.port}", text_model=model)


@by_curl
@pytest.mark.parametrize("model", [SLUG, f"{SLUG}/ep/it"])
def test_the_marketplaces_curl_streams_events_to_done(market: RunningEdge, send: Send, model: str):
    printed = send(market_sample(market, "marketplace_curl.sh", model), ASK_KEY)
    *events, done = [line for line in printed.split("\n") if line]
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == COLORS
    assert choices[-1]["finish_reason"] == "stop"
    assert {chunk["model"] for chunk in chunks} == {model}


def test_the_marketplaces_python_prints_the_text(market: RunningEdge, capsys: pytest.CaptureFixture[str]):
    run_python(market_sample(market, "marketplace_stream.py"), client=market.sdk(ASK_KEY))
    assert capsys.readouterr().out == COLORS


def test_a_chunk_has_every_field_of_the_marketplaces(market: RunningEdge):
    documented, done = sample("marketplace_events.txt", text_model=SLUG).split("\n\n")
    *_, last = events = market.events(ask(market, max_tokens=32))
    assert f"data: {last}" == done.strip()
    form = json.loads(documented.removeprefix("data: "))
    form["choices"][0].pop("finish_reason")  # null until the last chunk
    assert all(has_form(kinds(event), kinds(form)) for event in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_the_marketplaces_key_may_use_the_slug_only(market: RunningEdge):
    assert ask(market, key=ASK_KEY).status_code == 200
    assert ask(market, BASE, key=ASK_KEY).status_code == 404


def test_price_means_nothing_to_a_base_model_and_is_named_as_ignored(edge):
    edge.script.says(COLORS)
    response = edge.complete(stream=True, price={"max_prompt": 1, "sort": "price"}, prompt_cache_key="tenant-7")
    assert response.headers["x-ignored-fields"] == "price"
    assert "".join(event["choices"][0]["text"] for event in edge.events(response)[:-1]) == COLORS
