"""schemathesis, which makes up requests from the OpenAPI description, valid and not, finds nothing that breaks it."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema

from serve_app.api.schema.input_types import TOKEN_ID_MAX
from tests.support.harness import BASE, CHAT, KEY, PLAIN, RunningEdge
from tests.support.marketplace.slugs import SLUG, Sell, local, priced

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")

CONFIG: dict[str, Any] = {
    "seed": 1,
    "continue-on-failure": True,
    "request-timeout": 20,  # a request that hangs is a failure
    "generation": {"deterministic": True, "max-examples": 40, "mode": "all"},
    "auth": {"openapi": {"key": {"bearer": KEY}}},
    # The description says rules between fields in words, so that a body which is as described may still be refused.
    "checks": {"positive_data_acceptance": {"enabled": False}},
    # To schemathesis a header or query parameter that nobody knows is a fault of the request.
    "operations": [{"include-method": "GET", "checks": {"negative_data_rejection": {"enabled": False}}}],
}
OBJECT = {"type": "object", "additionalProperties": False}
VOCABULARY = 512
GENERATING = ["/v1/chat/completions", "/v1/completions"]


@pytest.fixture
def document(edge: RunningEdge, sell: Sell) -> Iterator[Any]:
    """As it is served, and with models and a slug that exist. Replies are short."""
    sell(local("here", CHAT, price=priced(0, 0)), allow_whole=True)  # within every price
    with edge.http(None) as client:
        document = client.get("../openapi.json").json()
    for body in ("ChatBody", "CompletionBody"):
        document["components"]["schemas"][body]["properties"]["model"] = {"enum": [CHAT, PLAIN, BASE, "nobody/nothing"]}
        document["components"]["schemas"][f"Slug{body}"]["properties"]["model"] = {"enum": [SLUG, f"{SLUG}/ep/here"]}
    edge.script.says("ok")
    return document


def explore(edge: RunningEdge, document: Any, *paths: str, **changes: Any) -> Counter[tuple[str | None, int]]:
    """Run schemathesis on some paths; how many answers of which status each had. Fails with what it found."""
    chosen = {**document, "paths": {path: document["paths"][path] for path in paths}}
    config = SchemathesisConfig.from_dict({**CONFIG, **changes, "base-url": edge.url.removesuffix("/v1")})
    api = schemathesis.openapi.from_dict(chosen, config=config)
    api.hook("map_body")(without_fractions)
    answers: Counter[tuple[str | None, int]] = Counter()
    found = []
    for event in from_schema(api).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if isinstance(event, events.ScenarioFinished):
            assert event.status in (Status.SUCCESS, Status.FAILURE, Status.SKIP), event
            for interaction in event.recorder.interactions.values():
                assert interaction.response is not None, event.label
                answers[event.label, interaction.response.status_code] += 1
                check_answer(interaction.response)
            for check in (check for checks in event.recorder.checks.values() for check in checks):
                if check.failure_info is not None:
                    found.append((check.name, check.failure_info.failure.message, check.failure_info.code_sample))
    assert found == [], found
    return answers


def without_fractions(context: object, body: Any) -> Any:
    """To JSON Schema 1.0 is an integer. It is none here, which can only be said in words."""
    if isinstance(body, float) and body.is_integer():
        return int(body)
    if isinstance(body, list):
        return [without_fractions(context, item) for item in body]
    if isinstance(body, dict):
        return {name: without_fractions(context, item) for name, item in body.items()}
    return body


def check_answer(response: Any) -> None:
    """Also where schemathesis does not look: methods and content types that are not described."""
    assert response.status_code < 500, response.content
    assert response.headers["x-request-id"]
    if response.status_code != 200 and response.request.method != "HEAD":
        body = response.json()
        assert list(body) == ["error"]
        assert list(body["error"]) == ["message", "type", "param", "code"]


def about_these_models(document: Any) -> Any:
    """With what depends on the model, or can be said in words only, as it is for the models here. Slugs are left out:
    their endpoints judge what they get.
    """
    schemas = document["components"]["schemas"]
    for path in GENERATING:
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        content["schema"] = content["schema"]["anyOf"][0]
    text_only = {"items": {"$ref": "#/components/schemas/TextPart"}, "type": "array"}
    for body, models in (("ChatBody", [CHAT]), ("CompletionBody", [CHAT, PLAIN, BASE])):
        properties = schemas[body]["properties"]
        properties["model"] = {"enum": models}
        for schema in properties["logit_bias"]["anyOf"]:
            schema["propertyNames"] = {"pattern": "^[0-9]{1,2}$"}
        for name in ("max_tokens", "max_completion_tokens"):
            for schema in properties.get(name, {}).get("anyOf", ()):
                schema["maximum"] = 100
    chat = schemas["ChatBody"]["properties"]
    chat["reasoning_effort"] = {"enum": ["none", "high", None]}
    chat["tool_choice"] = {"enum": ["none", "auto", "required", None]}
    chat["messages"]["maxItems"] = 20
    kinds = chat["messages"]["items"]["anyOf"]  # a result needs the call that it names
    chat["messages"]["items"]["anyOf"] = [kind for kind in kinds if not kind["$ref"].endswith("/ToolMessage")]
    chat["tools"]["anyOf"][0]["maxItems"] = 1  # their names are unique
    schemas["FunctionCall"]["properties"]["arguments"] = {"enum": ["", "{}", '{"a": 1}']}
    for role in ("SystemMessage", "UserMessage", "AssistantMessage", "ToolMessage"):
        content = schemas[role]["properties"]["content"]
        content["anyOf"] = [text_only if kind.get("type") == "array" else kind for kind in content["anyOf"]]
    chunks = schemas["CompletionBody"]["properties"]["prompt_chunks"]["anyOf"][0]
    chunks["items"] = {"$ref": "#/components/schemas/TokensPart"}
    return json.loads(json.dumps(document).replace(str(TOKEN_ID_MAX), str(VOCABULARY - 1)))


@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATING)
def test_no_made_up_request_for_a_reply_breaks_the_description(edge: RunningEdge, document: Any, path: str) -> None:
    answers = explore(edge, document, path)
    assert {status for _, status in answers} - {200} == {400, 401, 404, 405, 415}
    assert answers[f"POST {path}", 400] > 30, answers


@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATING)
def test_of_what_the_description_allows_95_percent_are_accepted(edge: RunningEdge, document: Any, path: str) -> None:
    generation = {**CONFIG["generation"], "mode": "positive"}
    answers = explore(edge, about_these_models(document), path, generation=generation)
    accepted = answers[f"POST {path}", 200] + answers[f"POST {path}", 422]
    refused = answers[f"POST {path}", 400]
    assert accepted >= 40
    assert accepted >= 0.95 * (accepted + refused), answers


@pytest.mark.slow
def test_no_other_made_up_request_breaks_the_description(edge: RunningEdge, document: Any) -> None:
    paths = [path for path in document["paths"] if path not in GENERATING]
    answers = explore(edge, document, *paths)
    operations = {f"{method.upper()} {path}" for path in paths for method in document["paths"][path]}
    assert {label for label, _ in answers} - {None} == operations  # a scenario of several has no label
    assert {status for _, status in answers} == {200, 400, 401, 404, 405}
