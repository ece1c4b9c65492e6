"""The OpenAPI description says what the service does: no more, no less."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.routing import Route

from renderers.base import RenderError
from serve_app.api.bodies.body_limits import check_sizes
from serve_app.api.bodies.json_body import parse_object
from serve_app.api.schema.chat import ChatBody
from serve_app.api.schema.completion import CompletionBody
from serve_app.api.schema.input_types import TOKEN_ID_MAX
from serve_app.api.schema.sampling import parse_body
from serve_app.api.schema.slug import SlugChatBody, SlugCompletionBody, SlugFields
from serve_app.api.slugs.request import slug_request
from serve_app.api.validate import validate_chat, validate_completion
from serve_app.base.errors import InvalidRequest
from serve_app.catalog.catalog import ResolvedModel
from serve_app.catalog.served_model import load_model
from serve_app.config.marketplace import SlugConfig
from serve_app.config.service import LimitsConfig, ModelConfig
from serve_app.http.app import PREFIXES, build_http_app
from serve_app.http.openapi import describe_api
from serve_app.marketplace.slugs import Slug, Wanted
from tests.support.description import closed, validator_of
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.harness import BASE, CHAT, RunningEdge, StoredCheckpoint
from tests.support.marketplace.slugs import SLUG, Sell, ask, ask_chat, local, priced, slug

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")

LIMITS = LimitsConfig(messages=3, tools=2, stop_sequences=2, stop_characters=4, logit_bias_entries=2)
DOCUMENT = json.loads(describe_api(LIMITS))
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES: dict[str, type[BaseModel]] = {"ChatBody": ChatBody, "CompletionBody": CompletionBody}
SLUG_BODIES: dict[str, type[BaseModel]] = {"SlugChatBody": SlugChatBody, "SlugCompletionBody": SlugCompletionBody}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


CLOSED = closed(DOCUMENT)
VALIDATORS = {name: validator_of(name, DOCUMENT) for name in (*BODIES, *SLUG_BODIES)}


def check(name: str, value: Any) -> None:
    """It is as described, and holds nothing that is not."""
    validator_of(name, CLOSED).validate(value)


# --- the document ---


def test_it_is_valid_and_needs_no_key(edge: RunningEdge) -> None:
    with edge.http(None) as client:
        response = client.get("../openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    openapi_spec_validator.validate(response.json())
    assert response.json()["openapi"].startswith("3.1.")


def test_its_bounds_are_those_of_the_configuration_also_when_it_changes(edge: RunningEdge) -> None:
    with edge.http() as client:
        before = client.get("../openapi.json").content
        edge.reconfigure(limits={"messages": 7})
        try:
            during = client.get("../openapi.json")
        finally:
            edge.reconfigure()
        after = client.get("../openapi.json").content
    assert before == after == describe_api(LimitsConfig())
    assert during.json()["components"]["schemas"]["ChatBody"]["properties"]["messages"]["maxItems"] == 7


def test_every_path_and_method_is_described_and_no_other(edge: RunningEdge) -> None:
    served = set()
    for route in build_http_app(edge.service).routes:
        assert isinstance(route, Route)
        served |= {(method, route.path.replace(":path", "")) for method in route.methods or () if method != "HEAD"}
    described = set()
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            servers = operation.get("servers", DOCUMENT["servers"])
            described |= {(method.upper(), server["url"].rstrip("/") + path) for server in servers}
    assert described == served
    assert {prefix.removesuffix("/v1") or "/" for prefix in PREFIXES} == {s["url"] for s in DOCUMENT["servers"]}


def test_what_needs_no_key_says_so(edge: RunningEdge) -> None:
    with edge.http(None) as client:
        for path, operations in DOCUMENT["paths"].items():
            for method, operation in operations.items():
                response = client.request(method, edge.url.removesuffix("/v1") + path.replace("{id}", "x"))
                assert (response.status_code == 401) == (operation.get("security", DOCUMENT["security"]) != []), path


def test_every_reference_leads_somewhere_and_nothing_is_described_in_vain() -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from references(item)

    found = {reference.rsplit("/", 1)[1] for reference in references(DOCUMENT)}
    assert found == {*SCHEMAS, *DOCUMENT["components"]["headers"]}


# --- requests ---


@pytest.mark.parametrize("name", [*BODIES, *SLUG_BODIES])
def test_every_field_that_is_honoured_is_described_and_no_other(name: str) -> None:
    properties, fields = SCHEMAS[name]["properties"], {**BODIES, **SLUG_BODIES}[name].model_fields
    assert set(properties) == set(fields)
    assert all(schema["description"] for schema in properties.values())
    required = {field for field, info in fields.items() if info.is_required()}
    assert set(SCHEMAS[name]["required"]) == required


@cache
def _target() -> ResolvedModel:
    """A model with tools and every token id."""
    folder = save_model_folder(Path(tempfile.mkdtemp()) / "model")
    model = load_model(ModelConfig(id="m", app="a", source=str(folder), renderer="qwen3"))
    model = replace(model, vocab_size=TOKEN_ID_MAX + 1)
    return ResolvedModel("m", model, model.context_length, model.renderer)


_ABOUT_THE_MODEL = ("takes no images", "reasoning_effort")
_IN_WORDS = ("must be unique", "must name one of tools")


def _accepted(name: str, body: Any) -> bool:
    """By everything that judges a body. What depends on the model, or is said in words, is left out."""
    try:
        check_sizes(body, LIMITS, longest_context=1000)
        parsed: Any = parse_body(BODIES[name], body)
        (validate_chat if name == "ChatBody" else validate_completion)(parsed, _target(), LIMITS)
    except (InvalidRequest, RenderError) as exc:
        assume(not any(words in str(exc) for words in (*_ABOUT_THE_MODEL, *_IN_WORDS)))
        return False
    return bool(parsed.model)


SCALARS = st.sampled_from(
    [None, True, False, 0, 1, 2, -1, 20, 21, 0.5, -0.5, 2.5, 10**6, 10**7, 2**31, 2**64, -(2**63) - 1]
) | st.sampled_from(["", "a", "abcd", "abcde", "none", "function", "text", "user", "tool", "x y", "\n", "é", "a" * 257])
KEYS = [
    "type",
    "text",
    "role",
    "content",
    "function",
    "name",
    "arguments",
    "url",
    "image_url",
    "tokens",
    "id",
    "1",
    "x",
]
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)
PART: Any = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "tokens", "audio"])},
    optional={
        "text": SCALARS,
        "image_url": SCALARS | st.fixed_dictionaries({}, optional={"url": SCALARS, "detail": SCALARS}),
        "tokens": st.lists(SCALARS, max_size=2),
    },
)
NAMED: Any = st.fixed_dictionaries({}, optional={"name": SCALARS, "description": SCALARS, "parameters": ANYTHING})
FUNCTION: Any = st.fixed_dictionaries(
    {}, optional={"id": SCALARS, "type": st.sampled_from(["function", "x", None]), "function": NAMED | SCALARS}
)
MESSAGE: Any = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot", 1])},
    optional={
        "content": SCALARS | st.lists(PART, max_size=2),
        "reasoning_content": SCALARS,
        "tool_calls": SCALARS | st.lists(FUNCTION, max_size=2),
        "tool_call_id": SCALARS,
        "name": SCALARS,
    },
)
LIKELY: dict[str, Any] = {
    "messages": st.lists(MESSAGE | ANYTHING, max_size=4),
    "prompt": SCALARS | st.lists(SCALARS | st.lists(SCALARS, max_size=2), max_size=2),
    "prompt_chunks": st.lists(PART, max_size=4),
    "tools": st.lists(FUNCTION, max_size=3),
    "tool_choice": FUNCTION | st.sampled_from(["auto", "none", "required", "any"]),
    "stop": SCALARS | st.lists(SCALARS, max_size=3) | st.lists(st.text(max_size=5), max_size=3),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "01", "-1", "a", "1" * 11, "٣", "2"]), SCALARS, max_size=3),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": SCALARS, "x": SCALARS}),
}


@st.composite
def bodies(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """One that is accepted, but for a field or two."""
    body: dict[str, Any] = {"model": "m"}
    if name == "ChatBody":
        body["messages"] = [{"role": "user", "content": "x"}]
    elif draw(st.integers(0, 9)):
        body["prompt"] = "x"
    fields = [*BODIES[name].model_fields, "unknown"]
    for field in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3)):
        body[field] = draw(LIKELY.get(field, SCALARS) | ANYTHING)
    return body


AGREE = settings(max_examples=1000, deadline=None, derandomize=True)


@pytest.mark.slow
@AGREE
@given(body=bodies("ChatBody"))
@example(body={"messages": [{"role": "user"}]})
@example(body={"model": "m", "messages": []})
def test_a_chat_is_accepted_exactly_if_it_is_as_described(body: Any) -> None:
    assert _accepted("ChatBody", body) == VALIDATORS["ChatBody"].is_valid(body)


@pytest.mark.slow
@AGREE
@given(body=bodies("CompletionBody"))
def test_a_completion_is_accepted_exactly_if_it_is_as_described(body: Any) -> None:
    assert _accepted("CompletionBody", body) == VALIDATORS["CompletionBody"].is_valid(body)


PRICE: Any = st.fixed_dictionaries(
    {}, optional={"max_prompt": SCALARS, "max_completion": SCALARS, "sort": SCALARS | st.just("latency"), "x": SCALARS}
)
WHOLE = Wanted(Slug(SlugConfig.model_validate(slug(local("a"), allow_whole=True)), ()))


@st.composite
def slug_bodies(draw: st.DrawFn, name: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": SLUG, "stream": True}
    body |= {"messages": [{"role": "user"}]} if name == "SlugChatBody" else {"prompt": "x"}
    likely = {**LIKELY, "price": PRICE}
    for field in draw(st.lists(st.sampled_from([*SLUG_BODIES[name].model_fields, "unknown"]), min_size=1, max_size=3)):
        body[field] = draw(likely.get(field, SCALARS) | ANYTHING)
    return {**body, "model": draw(st.sampled_from([SLUG, 1, None]) | st.just(SLUG))}


def _taken_by_slug(kind: type[SlugFields], body: Any) -> bool:
    try:
        slug_request(WHOLE, kind, body, b"")
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("kind", [SlugChatBody, SlugCompletionBody])
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_slug_takes_a_body_exactly_if_it_is_as_described(kind: type[SlugFields], data: st.DataObject) -> None:
    body = data.draw(slug_bodies(kind.__name__))
    assert _taken_by_slug(kind, body) == VALIDATORS[kind.__name__].is_valid(body)


# --- replies ---


def test_replies_are_as_described(edge: RunningEdge) -> None:
    every = {"return_token_ids": True, "max_tokens": 40}
    for fields in ({}, {**every, "logprobs": 2}, {**every, "logprobs": 0, "echo": True}):
        check("TextCompletion", edge.complete(**fields).json())
    edge.script.says("<think>hm</think>\n\nyes", CALL)
    for fields in ({}, {**every, "logprobs": True, "top_logprobs": 2}, {**every, "tools": TOOLS}):
        check("ChatCompletion", edge.chat(**fields).json())


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
def test_every_chunk_of_a_stream_is_as_described(edge: RunningEdge, usage: Any) -> None:
    edge.script.says("<think>hm</think>\n\nyes", CALL)
    every = {"stream": True, "return_token_ids": True, "max_tokens": 40, **usage}
    texts = edge.events(edge.complete(**every, logprobs=2, echo=True))
    chats = edge.events(edge.chat(**every, logprobs=True, top_logprobs=2, tools=TOOLS))
    for name, events in (("TextCompletionChunk", texts), ("ChatCompletionChunk", chats)):
        assert events.pop() == "[DONE]"
        for event in events:
            check(name, event)


def test_models_and_states_are_as_described(edge: RunningEdge) -> None:
    edge.checkpoints.held["tinker://r/sampler_weights/a"] = StoredCheckpoint("1", owner="alice")
    with edge.http() as client:
        check("ModelList", client.get("/models?checkpoints=1").json())
        check("ModelReply", client.get(f"/models/{CHAT}").json())
        check("StatusReply", client.get("../healthz").json())
        check("StatusReply", client.get("../readyz").json())


def test_what_slugs_say_is_as_described(edge: RunningEdge, sell: Sell) -> None:
    sell(slug(local("a", CHAT), local("b", price=priced(0.1, 1000, 0.000001)), allow_whole=True))
    usage = {"stream_options": {"include_usage": True}}
    for name, response in (("TextCompletionChunk", ask(edge, **usage)), ("ChatCompletionChunk", ask_chat(edge))):
        *events, done = edge.events(response)
        assert done == "[DONE]"
        for event in events:
            check(name, event)
    check("TextCompletion", ask(edge, stream=False).json())
    with edge.http() as client:
        check("ModelList", client.get("/models").json())
        check("SlugReply", client.get(f"/models/{SLUG}").json())
        check("EndpointList", client.get(f"/models/{SLUG}/endpoints").json())
    described = DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]
    for response in (ask(edge, stream=False), ask(edge, price={"max_prompt": 0}), ask(edge, price=1)):
        headers = described[str(response.status_code)]["headers"]
        assert "x-endpoint" in headers
    check("ErrorReply", ask(edge, price={"max_prompt": 0}).json())
    assert "no_endpoint_available" in described["503"]["description"]


def test_refusals_are_as_described(edge: RunningEdge) -> None:
    refusals = [edge.complete(temperature=-1), edge.complete(model="x"), edge.post("/completions", key="x", model=BASE)]
    assert [response.status_code for response in refusals] == [400, 404, 401]
    for response in refusals:
        check("ErrorReply", response.json())
        described = DOCUMENT["paths"]["/v1/completions"]["post"]["responses"][str(response.status_code)]
        assert "x-request-id" in described["headers"]


def test_the_one_field_that_cannot_be_described_is_said_in_words() -> None:
    """Arguments are a string that holds a JSON object."""
    schema = SCHEMAS["FunctionCall"]["properties"]["arguments"]
    assert schema == {"type": "string", "contentMediaType": "application/json", "contentSchema": {"type": "object"}}


def test_the_limit_of_bytes_is_said_in_words() -> None:
    body = json.loads(describe_api(LimitsConfig(body_bytes=12345)))["paths"]["/v1/completions"]["post"]["requestBody"]
    assert "12345 bytes" in body["description"]


def test_it_is_read_like_any_body() -> None:
    assert parse_object(describe_api(LIMITS)) == DOCUMENT
