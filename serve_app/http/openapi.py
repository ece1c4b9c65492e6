"""The OpenAPI description of the service, generated from the types of requests and replies.

Rules between fields are in `openapi_rules.py`; rules that no schema can express are in `openapi_texts.py`. Bounds are
those of the configuration.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from serve_app.api.schema import replies
from serve_app.api.schema.chat import ChatBody
from serve_app.api.schema.completion import CompletionBody
from serve_app.api.schema.slug import SlugChatBody, SlugCompletionBody
from serve_app.base.errors import MAX_RETRY_AFTER_S, codes_by_status
from serve_app.base.model_id import MAX_CHARACTERS
from serve_app.config.service import LimitsConfig
from serve_app.http.openapi_rules import RULES, Json, Object
from serve_app.http.openapi_texts import (
    ABOUT,
    CHAT_RULES,
    COMPLETION_RULES,
    FIELDS,
    STATUSES,
    STREAM,
    USAGE_PARAMETERS,
    USAGE_RULES,
)

_REFERENCE = "#/components/schemas/{model}"
_BODIES = ("ChatBody", "CompletionBody", "SlugChatBody", "SlugCompletionBody")
_TYPES: Mapping[str, tuple[JsonSchemaMode, type]] = {
    "ChatBody": ("validation", ChatBody),
    "CompletionBody": ("validation", CompletionBody),
    "SlugChatBody": ("validation", SlugChatBody),
    "SlugCompletionBody": ("validation", SlugCompletionBody),
    "ChatCompletion": ("serialization", replies.ChatCompletion),
    "ChatCompletionChunk": ("serialization", replies.ChatCompletionChunk),
    "TextCompletion": ("serialization", replies.TextCompletion),
    "TextCompletionChunk": ("serialization", replies.TextCompletionChunk),
    "UsageList": ("serialization", replies.UsageList),
    "ModelList": ("serialization", replies.ModelList),
    "EndpointList": ("serialization", replies.EndpointList),
    "LoadList": ("serialization", replies.LoadList),
    "StatusReply": ("serialization", replies.StatusReply),
    "VersionReply": ("serialization", replies.VersionReply),
    "ErrorReply": ("serialization", replies.ErrorReply),
}
DESCRIBE_US = 30_000
VERSION = "0.1.0"
_GENERATING = (400, 401, 404, 413, 415, 422, 429, 500, 503)


def describe_api(limits: LimitsConfig) -> bytes:
    """The description as JSON. Takes about `DESCRIBE_US` microseconds."""
    document: Object = {
        "openapi": "3.1.1",
        "info": {"title": "Roundhouse", "version": VERSION, "description": ABOUT},
        "servers": [{"url": "/"}, {"url": "/services/tinker-prod/oai/api", "description": "The same under /v1."}],
        "security": [{"key": []}],
        "paths": _paths(limits),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}},
            "headers": _headers(),
            "schemas": _schemas(limits),
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:
        """Fields get no title: their name is enough."""
        return False


def _schemas(limits: LimitsConfig) -> Object:
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[object]]] = [
        (name, mode, TypeAdapter(kind)) for name, (mode, kind) in _TYPES.items()
    ]
    _, found = TypeAdapter.json_schemas(adapters, ref_template=_REFERENCE, schema_generator=_Untitled)
    schemas: Object = {name: found["$defs"][name] for name in sorted(_reached(found["$defs"], _TYPES))}
    described = set()
    for body in _BODIES:
        properties = _object(_object(schemas, body), "properties")
        for name in properties:
            _object(properties, name)["description"] = FIELDS[name]
            described.add(name)
        if body.startswith("Slug"):
            _object(properties, "model")["minLength"] = 1
        else:
            _bound(properties, limits)
        _object(schemas, body)["allOf"] = list(RULES[body])
    schemas["Description"] = {"type": "object", "required": ["openapi"]}
    assert described == set(FIELDS), "a description is left of a field that is gone"
    return schemas


def _reached(schemas: Object, names: Iterable[str]) -> set[str]:
    """These schemas and all that they refer to. The types that our validators return are among them too."""
    reached: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schemas[name]))
    return reached


def _bound(properties: Object, limits: LimitsConfig) -> None:
    """Add the bounds that come from the configuration and not from the types."""
    _object(properties, "model").update({"minLength": 1, "maxLength": MAX_CHARACTERS})
    most = {"messages": limits.messages, "prompt_chunks": limits.messages, "tools": limits.tools}
    for name, count in {**most, "stop": limits.stop_sequences}.items():
        for schema in _alternatives(properties, name, "array"):
            schema["maxItems"] = count
    for schema in _alternatives(properties, "logit_bias", "object"):
        schema["maxProperties"] = limits.logit_bias_entries
    for schema in _alternatives(properties, "stop", "array"):
        items = _object(schema, "items")
        if items["type"] == "string":
            items["maxLength"] = limits.stop_characters
    for schema in _alternatives(properties, "stop", "string"):
        schema["maxLength"] = limits.stop_characters


def _alternatives(properties: Object, name: str, kind: str) -> Iterator[Object]:
    """The schemas of one kind among a property's alternatives."""
    if name not in properties:
        return
    schema = _object(properties, name)
    choices = schema.get("anyOf", [schema])
    assert isinstance(choices, list)
    for choice in choices:
        assert isinstance(choice, dict)
        if choice.get("type") == kind:
            yield choice


def _object(parent: Object, name: str) -> Object:
    child = parent[name]
    assert isinstance(child, dict)
    return child


def _paths(limits: LimitsConfig) -> Object:
    return {
        "/v1/chat/completions": {
            "post": _generating("ChatCompletion", ("ChatBody", "SlugChatBody"), CHAT_RULES, limits)
        },
        "/v1/completions": {
            "post": _generating("TextCompletion", ("CompletionBody", "SlugCompletionBody"), COMPLETION_RULES, limits)
        },
        "/v1/usage": {
            "get": _operation(
                "getUsage",
                USAGE_RULES,
                _responses(("UsageList",), (400, 401, 404, 429, 500, 503)),
                _usage_parameters(),
            )
        },
        **_model_paths(),
        "/healthz": {"get": _open("isAlive", "Whether the process answers.", "StatusReply", (500,))},
        "/health": {"get": _open("health", "The same as `/healthz`.", "StatusReply", (500,))},
        "/ping": {"get": _open("ping", "The same as `/healthz`.", "StatusReply", (500,))},
        "/version": {"get": _open("version", "The version of this service.", "VersionReply", (500,))},
        "/readyz": {"get": _open("isReady", "Whether every model can produce a token.", "StatusReply", (500, 503))},
        "/openapi.json": {"get": _open("describe", "This description.", "Description", (500,))},
        "/metrics": {"get": _metrics()},
    }


def _model_paths() -> Object:
    with_checkpoints = _parameter("query", "checkpoints", "`1` or `true`: list checkpoints too, 1000 on a page.")
    after = _parameter("query", "after", "With `checkpoints`: the `next` of the page before.")
    return {
        "/v1/models": {
            "get": _operation(
                "listModels",
                "The base models that the key may use, their variants, and the marketplace slugs.",
                _responses(("ModelList",), (400, 401, 429, 500, 503)),
                (with_checkpoints, after),
            )
        },
        "/v1/models/{id}": {
            "get": _operation(
                "retrieveModel",
                "A base model, a variant, a checkpoint, or a marketplace slug.",
                _responses(("ModelReply", "SlugReply"), (400, 401, 404, 422, 429, 500, 503)),
                (_encoded("id"),),
            )
        },
        "/v1/models/{id}/load": {
            "post": _operation(
                "loadCheckpoint",
                "Has every running replica of the base model load a checkpoint, so that no request waits for it.",
                _responses(("LoadList",), (400, 401, 404, 422, 429, 500, 503)),
                (_encoded("id"),),
            )
        },
        "/v1/models/{slug}/endpoints": {
            "get": _operation(
                "listEndpoints",
                "The endpoints of a marketplace slug, with their prices, their health and how fast they are.",
                _responses(("EndpointList",), (401, 404, 429, 500, 503)),
                (_encoded("slug"),),
            )
        },
    }


def _encoded(name: str) -> Object:
    return _parameter("path", name, "Percent-encoded, including slashes.")


def _metrics() -> Object:
    about = "The metrics of the service in Prometheus' text format, for keys with `metrics: true`."
    responses = _responses((), (401, 404, 500, 503))
    _object(responses, "200")["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return {**_operation("readMetrics", about, responses), "servers": [{"url": "/"}]}


def _usage_parameters() -> list[Json]:
    first, last, by = (_parameter("query", name, about) for name, about in USAGE_PARAMETERS.items())
    return [first, last, {**by, "schema": {"enum": ["day", "model"]}}]


def _generating(reply: str, bodies: tuple[str, ...], rules: str, limits: LimitsConfig) -> Object:
    responses = _responses((reply,), _GENERATING)
    for status in responses:
        for name in ("x-ignored-fields", "x-endpoint", "x-checkpoint-digest"):
            _object(_object(responses, status), "headers")[name] = _header(name)
    whole = _object(responses, "200")
    content = _object(whole, "content")
    whole["content"] = {**content, "text/event-stream": {"schema": _event(f"{reply}Chunk")}}
    description = f"Unknown fields are ignored; null means unset. At most {limits.body_bytes} bytes of UTF-8."
    return {
        **_operation(f"create{reply}", rules, responses),
        "requestBody": {"required": True, "description": description, "content": _json(*bodies)},
    }


def _event(chunk: str) -> Object:
    """One event of a stream. Tools use a stream's schema for each event; OpenAPI before 3.2 has no field for it."""
    references: list[Json] = [{"$ref": _REFERENCE.format(model=name)} for name in (chunk, "ErrorReply")]
    data: Object = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": references}}
    return {
        "type": "object",
        "description": STREAM.format(chunk=chunk),
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _open(name: str, description: str, reply: str, failures: Iterable[int]) -> Object:
    """These paths need no key and have one prefix only."""
    return {**_operation(name, description, _responses((reply,), failures)), "security": [], "servers": [{"url": "/"}]}


def _operation(name: str, description: str, responses: Object, parameters: Iterable[Json] = ()) -> Object:
    request_id = _parameter(
        "header", "x-request-id", "The response repeats it if it is 1 to 128 letters, digits and `._:-`."
    )
    return {
        "operationId": name,
        "description": description,
        "parameters": [*parameters, request_id],
        "responses": responses,
    }


def _parameter(place: str, name: str, description: str) -> Object:
    schema: Object = {"type": "string", "minLength": 1} if place == "path" else {"type": "string"}
    return {"name": name, "in": place, "required": place == "path", "description": description, "schema": schema}


def _responses(kinds: tuple[str, ...], failures: Iterable[int]) -> Object:
    """The responses at each status of the table of errors. `kinds`: the schemas of success."""
    codes = codes_by_status()
    found: Object = {"200": {"description": "The reply.", "headers": _headers_of(200), "content": _json(*kinds)}}
    for status in failures:
        named = ", ".join(f"`{code}`" for code in codes[status])
        description = f"{STATUSES[status]} Codes: {named}." if named else STATUSES[status]
        found[str(status)] = {
            "description": description,
            "headers": _headers_of(status),
            "content": _json("ErrorReply"),
        }
    return found


def _headers_of(status: int) -> Object:
    more = {404: ["retry-after"], 429: ["retry-after"], 500: ["x-should-retry"], 503: ["retry-after", "x-should-retry"]}
    return {name: _header(name) for name in ["x-request-id", *more.get(status, [])]}


def _header(name: str) -> Object:
    return {"$ref": f"#/components/headers/{name}"}


def _headers() -> Object:
    texts = {
        "x-request-id": "The id of this request in the logs.",
        "x-ignored-fields": "The ignored fields of the body, separated by commas; absent if there are none.",
        "x-endpoint": "The endpoint that a marketplace slug's request was sent to; absent for models.",
        "x-checkpoint-digest": "The content of the checkpoint that was sampled, as a digest; absent for base models.",
        "x-should-retry": "`false`: a retry cannot succeed.",
    }
    wait: Object = {"type": "integer", "minimum": 1, "maximum": MAX_RETRY_AFTER_S}
    headers: Object = {name: {"description": text, "schema": {"type": "string"}} for name, text in texts.items()}
    return {**headers, "retry-after": {"description": "Seconds after which a retry can succeed.", "schema": wait}}


def _json(*schemas: str) -> Object:
    references: list[Json] = [{"$ref": _REFERENCE.format(model=name)} for name in schemas]
    return {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}
