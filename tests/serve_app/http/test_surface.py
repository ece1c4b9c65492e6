"""Section 1 of the contract: paths, keys, headers, and what is no request at all."""

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from engines.interface.errors import AdapterRefused
from tests.support.harness import BASE, CHAT, HERE, KEY, NEXT_PAGE, OTHER_KEY, RunningEdge, StoredCheckpoint
from tests.support.wire import error, exchange, post_head, read_response

pytest_plugins = ("tests.support.edge_fixtures",)

PATHS = "The endpoints are /v1/chat/completions, /v1/completions, /v1/models, /v1/usage."
BODY = {"model": BASE, "prompt": "hi", "max_tokens": 1}


@pytest.mark.parametrize("prefix", ["/v1", "/services/tinker-prod/oai/api/v1"])
@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/models", f"/models/{BASE}"])
def test_both_prefixes_serve_every_endpoint(edge: RunningEdge, prefix: str, path: str) -> None:
    with edge.http() as client:
        url = edge.url.removesuffix("/v1") + prefix + path
        body = {**BODY, "model": CHAT, "messages": [{"role": "user", "content": "x"}]}
        response = client.post(url, json=body) if path.endswith("completions") else client.get(url)
    assert response.status_code == 200


def test_health_needs_no_key(edge: RunningEdge) -> None:
    with edge.http(None) as client:
        live, ready = client.get("../healthz"), client.get("../readyz")
    assert (live.status_code, live.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


def test_the_probes_of_other_servers_are_answered_without_a_key(edge: RunningEdge) -> None:
    with edge.http(None) as client:
        for path in ("../health", "../ping"):
            response = client.get(path)
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        version = client.get("../version")
    with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
        assert version.json() == {"version": tomllib.load(file)["project"]["version"]}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/chat/completions", "Did you mean '/v1/chat/completions'?"),
        ("/completions", "Did you mean '/v1/completions'?"),
        ("/v1/v1/models", "Did you mean '/v1/models'?"),
        ("/v1/completions/", "Did you mean '/v1/completions'?"),
        ("/v1/embeddings", PATHS),
    ],
)
def test_a_path_that_is_not_there_says_which_are(edge: RunningEdge, path: str, says: str) -> None:
    with edge.http() as client:
        response = client.post(f"..{path}", json=BODY)
    assert response.status_code == 404
    assert response.json() == error(f"There is no path {path!r}. {says}", code="not_found")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "No API key: send it as 'Authorization: Bearer <key>'."),
        ("Bearer wrong", "The API key is not valid."),
        (f"Basic {KEY}", "The Authorization header must be 'Bearer <key>'."),
    ],
)
@pytest.mark.parametrize("path", ["/completions", "/models", "/nowhere"])
def test_without_a_valid_key_everything_is_401(edge: RunningEdge, path: str, header: str | None, message: str) -> None:
    with edge.http(None) as client:
        response = client.post(path, json=BODY, headers={} if header is None else {"authorization": header})
    assert response.status_code == 401
    assert response.json() == error(message, "authentication_error", code="invalid_api_key")


def test_a_connection_goes_on_after_a_request_that_was_not_let_in(edge: RunningEdge) -> None:
    body = json.dumps(BODY).encode()
    lengths = ("content-type: application/json", f"content-length: {len(body)}")
    stranger = post_head("/v1/completions", *lengths).replace(KEY.encode(), b"nobody") + body
    with edge.raw() as connection:
        for request, status in ((stranger, 401), (post_head("/v1/completions", *lengths) + body, 200)):
            connection.sendall(request)
            assert read_response(connection)[0] == status


def test_401_comes_before_the_body_is_read(edge: RunningEdge) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n"
    )
    assert exchange(edge, request)[0] == 401


@pytest.mark.parametrize("prefix", ["ask_", "tml-"])
def test_prefixes_of_keys_carry_no_meaning(edge: RunningEdge, prefix: str) -> None:
    assert edge.post("/completions", key=prefix + KEY, **BODY).status_code == 401


def test_a_sane_request_id_of_the_client_comes_back(edge: RunningEdge) -> None:
    with edge.http() as client:
        assert client.get("/models", headers={"x-request-id": "a-1.b:c_2"}).headers["x-request-id"] == "a-1.b:c_2"


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "<script>", "\xe9"])
def test_any_other_request_id_is_replaced(edge: RunningEdge, sent: str) -> None:
    with edge.http() as client:
        found = client.get("/models", headers={"x-request-id": sent.encode("latin-1")}).headers["x-request-id"]
    assert len(found) == 32
    int(found, 16)


def test_every_response_has_a_request_id(edge: RunningEdge) -> None:
    with edge.http(None) as client:
        for response in (client.get("../healthz"), client.get("/models"), client.get("/nowhere")):
            assert response.headers["x-request-id"]
    assert edge.complete(stream=True, max_tokens=2).headers["x-request-id"]
    assert edge.complete(temperature=-1).headers["x-request-id"]


def test_ignored_fields_are_named(edge: RunningEdge) -> None:
    response = edge.chat(max_tokens=1, n=2, response_format={"type": "json_object"}, user=None, store=True)
    assert response.headers["x-ignored-fields"] == "n, response_format, store"
    assert len(response.json()["choices"]) == 1


def test_ignored_fields_are_named_in_streams_and_refusals_too(edge: RunningEdge) -> None:
    assert edge.complete(stream=True, max_tokens=1, best_of=3).headers["x-ignored-fields"] == "best_of"
    assert edge.complete(max_tokens=5000, best_of=3).headers["x-ignored-fields"] == "best_of"


def test_fields_that_are_ignored_within_others_are_named_by_their_place(edge: RunningEdge) -> None:
    parts = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "unset": None}]
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "strict": True}}
    messages = [
        {"role": "user", "content": parts, "weight": 1},
        {"role": "user", "content": parts, "weight": 1},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
    ]
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    names = edge.post("/chat/completions", model=CHAT, messages=messages, max_tokens=1, **options).headers
    assert names["x-ignored-fields"].split(", ") == [
        "stream_options.include_obfuscation",
        "messages[].weight",
        "messages[].content[].cache_control",
        "messages[].tool_calls[].index",
        "messages[].tool_calls[].function.strict",
    ]
    chunks = [{"type": "tokens", "tokens": [1], "note": 1}]
    response = edge.complete(None, prompt_chunks=chunks, max_tokens=1)
    assert response.headers["x-ignored-fields"] == "prompt_chunks[].note"


def test_names_of_ignored_fields_are_safe_in_a_header(edge: RunningEdge) -> None:
    odd = {"a\r\nset-cookie: x": 1, "ä": 1, "z" * 200: 1, "": 1}
    many = {f"f{i}": 1 for i in range(100)}
    response = edge.complete(max_tokens=1, **odd, **many)
    names = response.headers["x-ignored-fields"].split(", ")
    assert names[:3] == ["a%0D%0Aset-cookie%3A%20x", "%C3%A4", "z" * 64]
    assert names[32:] == ["and 72 more"]


def test_the_names_of_ignored_fields_are_bounded_in_bytes_too(edge: RunningEdge) -> None:
    names = {f"{index:02}" + "\U0001f642" * 100: 1 for index in range(40)}
    for stream in (False, True):
        header = edge.complete(max_tokens=1, stream=stream, **names).headers["x-ignored-fields"]
        assert header.isascii()
        assert len(header) <= 2048 + len(", and 40 more")
        shown = header.split(", ")
        assert shown[0] == "00" + "%F0%9F%99%82" * 62
        assert shown[-1] == f"and {40 - (len(shown) - 1)} more"


def test_the_accept_header_is_not_negotiated(edge: RunningEdge) -> None:
    with edge.http() as client:
        body = {**BODY, "stream": True}
        response = client.post("/completions", json=body, headers={"accept": "application/json"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_streams_are_not_cached_or_buffered_on_the_way(edge: RunningEdge) -> None:
    headers = edge.complete(stream=True, max_tokens=1).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("text/plain", "Content-Type must be application/json, got 'text/plain'."),
        ("application/x", "Content-Type must be application/json, got 'application/x'."),
        ("", "Content-Type must be application/json, got ''."),
        ("application/json; charset=latin-1", "The charset of application/json must be utf-8, got 'latin-1'."),
    ],
)
def test_another_content_type_is_415(edge: RunningEdge, declared: str, message: str) -> None:
    with edge.http() as client:
        response = client.post("/completions", content=json.dumps(BODY), headers={"content-type": declared})
    assert response.status_code == 415
    assert response.json() == error(message, code="unsupported_media_type")


def test_no_content_type_is_415(edge: RunningEdge) -> None:
    status, _, body = exchange(edge, post_head("/v1/completions", "content-length: 2") + b"{}")
    message = "Content-Type must be application/json, got None."
    assert (status, json.loads(body)) == (415, error(message, code="unsupported_media_type"))


@pytest.mark.parametrize(
    "declared",
    [
        "application/json",
        "Application/JSON;charset=UTF-8",
        'application/json; charset="utf-8"',
        "application/json; v=1;",
    ],
)
def test_json_in_utf8_is_understood(edge: RunningEdge, declared: str) -> None:
    with edge.http() as client:
        response = client.post("/completions", content=json.dumps(BODY), headers={"content-type": declared})
    assert response.status_code == 200


def test_a_compressed_body_is_415(edge: RunningEdge) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    with edge.http() as client:
        response = client.post("/completions", content=gzip.compress(json.dumps(BODY).encode()), headers=headers)
    assert response.status_code == 415
    assert response.json() == error("Content-Encoding must be identity, got 'gzip'.", code="unsupported_media_type")


@pytest.mark.parametrize("path", ["/nowhere", "/chat", "/models/"])
def test_an_unknown_path_is_404(edge: RunningEdge, path: str) -> None:
    with edge.http() as client:
        response = client.post(path, json=BODY) if path != "/models/" else client.get("/chat/")
    shown = path if path != "/models/" else "/chat/"
    assert response.status_code == 404
    assert response.json() == error(f"There is no path '/v1{shown}'. {PATHS}", code="not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", "/completions", "POST"), ("DELETE", "/models", "GET, HEAD")]
)
def test_another_method_is_405(edge: RunningEdge, method: str, path: str, allowed: str) -> None:
    with edge.http() as client:
        response = client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    message = f"The path '/v1{path}' does not take the method {method}."
    assert response.json() == error(message, code="method_not_allowed")


def test_models_lists_every_base_and_its_variants(edge: RunningEdge) -> None:
    models = {model.id: model for model in edge.sdk().models.list()}
    assert list(models) == ["tiny/Chat", "tiny/Chat:peft:128", "tiny/Plain", "tiny/Base"]
    assert models["tiny/Chat:peft:128"].model_dump()["context_length"] == 128
    assert models["tiny/Base"].owned_by == "roundhouse"


def test_models_lists_only_what_the_key_may_use(edge: RunningEdge) -> None:
    assert [model.id for model in edge.sdk(OTHER_KEY).models.list()] == [BASE]


def test_checkpoints_are_listed_when_asked_for(edge: RunningEdge) -> None:
    mine, theirs, public = (f"tinker://r/sampler_weights/{name}" for name in ("mine", "theirs", "public"))
    edge.checkpoints.held[mine] = StoredCheckpoint("1", owner="alice")
    edge.checkpoints.held[theirs] = StoredCheckpoint("2", owner="bob")
    edge.checkpoints.held[public] = StoredCheckpoint("3", owner="bob", public=True)
    with edge.http() as client:
        assert all(not item["id"].startswith("tinker://") for item in client.get("/models").json()["data"])
        body = client.get("/models?checkpoints=1").json()
    assert [item["id"] for item in body["data"]][-2:] == [mine, public]
    assert body["data"][-1] == {
        "id": public,
        "object": "model",
        "created": 1_750_000_000,
        "owned_by": "user",
        "base_model": CHAT,
        "error": None,
        "digest": "3",
        "tier": "disk",
    }
    assert body["has_more"] is False


def test_checkpoints_are_listed_for_the_bases_that_the_key_may_use(edge: RunningEdge) -> None:
    for name, base in (("on-chat", CHAT), ("on-base", BASE), ("elsewhere", "other/Base")):
        edge.checkpoints.held[f"tinker://r/sampler_weights/{name}"] = StoredCheckpoint(name, base_model=base)

    def listed(key: str) -> list[str]:
        with edge.http(key) as client:
            ids = [item["id"] for item in client.get("/models?checkpoints=1").json()["data"]]
        return [name.rpartition("/")[2] for name in ids if name.startswith("tinker://")]

    assert (listed(KEY), listed(OTHER_KEY)) == (["on-chat", "on-base"], ["on-base"])
    edge.checkpoints.held["tinker://r/sampler_weights/silent"] = StoredCheckpoint("s", base_model=None)
    assert listed(OTHER_KEY) == ["on-base", "silent"]


def test_a_listing_says_what_is_broken_and_names_bases_as_requests_do(edge: RunningEdge) -> None:
    source = edge.config["models"][2]["source"]  # what PEFT writes as the base is where it was loaded from
    stored = {
        "broken": StoredCheckpoint("1", base_model=source, problem="The checkpoint is not complete."),
        "silent": StoredCheckpoint("2", base_model=None),
    }
    for name, checkpoint in stored.items():
        edge.checkpoints.held[f"tinker://r/sampler_weights/{name}"] = checkpoint
    with edge.http() as client:
        items = client.get("/models?checkpoints=1").json()["data"][-2:]
    assert [(item["base_model"], item["error"]) for item in items] == [
        (BASE, "The checkpoint is not complete."),
        (None, None),
    ]


def test_a_listing_says_where_the_content_of_a_checkpoint_is(edge: RunningEdge) -> None:
    for name, directory in (("used", HERE), ("here", HERE), ("far", "/elsewhere")):
        edge.checkpoints.held[f"tinker://r/sampler_weights/{name}"] = StoredCheckpoint(f"of-{name}", directory)
    assert edge.chat(model="tinker://r/sampler_weights/used", max_tokens=1).status_code == 200
    with edge.http() as client:
        items = client.get("/models?checkpoints=1").json()["data"][-3:]
    assert [(item["digest"], item["tier"]) for item in items] == [
        ("of-used", "device"),
        ("of-here", "disk"),
        ("of-far", "store"),
    ]


def test_a_listing_that_is_cut_says_so(edge: RunningEdge) -> None:
    for index in range(3):
        edge.checkpoints.held[f"tinker://r/sampler_weights/{index}"] = StoredCheckpoint(str(index))
    with edge.http() as client:
        assert client.get("/models?checkpoints=true").json()["has_more"] is True


def test_checkpoints_come_in_pages_and_the_first_begins_with_the_models(edge: RunningEdge) -> None:
    for index in range(4):
        edge.checkpoints.held[f"tinker://r/sampler_weights/{index}"] = StoredCheckpoint(str(index))
    with edge.http() as client:
        first = client.get("/models", params={"checkpoints": "1"}).json()
        second = client.get("/models", params={"checkpoints": "1", "after": first["next"]}).json()
        models = client.get("/models?after=anything").json()
    assert edge.checkpoints.asked_after == [None, NEXT_PAGE]
    assert (first["next"], second["next"], models["next"]) == (NEXT_PAGE, None, None)
    assert first["data"] == [*models["data"], *second["data"]]
    assert all(item["id"].startswith("tinker://") for item in second["data"])


def test_what_is_no_next_page_is_refused(edge: RunningEdge) -> None:
    with edge.http() as client:
        response = client.get("/models?checkpoints=1&after=x")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_names_the_content_of_the_checkpoint_that_it_is_of(edge: RunningEdge, stream: bool) -> None:
    path = "tinker://r/sampler_weights/n"
    for content in ("d1", "d2"):
        edge.checkpoints.held[path] = StoredCheckpoint(content)
        for ask in (edge.chat, edge.complete):
            response = ask(model=path, stream=stream, max_tokens=1)
            assert response.headers["x-checkpoint-digest"] == content
    assert "x-checkpoint-digest" not in edge.chat(stream=stream, max_tokens=1).headers
    edge.script.says(AdapterRefused("no such tensor"))
    refused = edge.chat(model=path, stream=stream)
    assert (refused.status_code, refused.headers["x-checkpoint-digest"]) == (422, "d2")
    assert "x-checkpoint-digest" not in edge.chat(model="tinker://r/sampler_weights/none").headers


def test_a_checkpoint_is_a_model_with_the_context_of_its_base(edge: RunningEdge) -> None:
    path = "tinker://run:train:0/sampler_weights/000080"
    edge.checkpoints.held[path] = StoredCheckpoint("1", owner="alice")
    assert edge.sdk().models.retrieve(path).model_dump()["context_length"] == 4096
    assert edge.sdk().models.retrieve(f"{CHAT}:peft:128;{path}").model_dump()["context_length"] == 128


def test_one_model_is_found_by_the_id_as_the_sdk_encodes_it(edge: RunningEdge) -> None:
    assert edge.sdk().models.retrieve("tiny/Chat:peft:128").id == "tiny/Chat:peft:128"


def test_the_id_of_a_model_is_decoded_once(edge: RunningEdge) -> None:
    path = "tinker://run:train:0/sampler_weights/000080"
    edge.checkpoints.held[path] = StoredCheckpoint("1", owner="alice")
    with edge.http() as client:
        for requested in ("tiny/Chat", "tiny/Chat:peft:128", path, f"{CHAT}:peft:128;{path}"):
            assert client.get(f"/models/{quote(requested, safe='')}").json()["id"] == requested
        twice = client.get(f"/models/{quote(quote(CHAT, safe=''), safe='')}")
    message = "The model 'tiny%2FChat' does not exist, or this key may not use it. Did you mean 'tiny/Chat'?"
    assert (twice.status_code, twice.json()) == (404, error(message, param="model", code="model_not_found"))


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model is required."),
        ({"model": None}, "model must be a string, got null."),
        ({"model": 5}, "model must be a string, got 5."),
        ({"model": ""}, "model must have 1 to 1024 characters, got 0."),
    ],
)
def test_a_request_without_a_model_is_400(edge: RunningEdge, path: str, fields: Any, message: str) -> None:
    response = edge.post(path, messages=[{"role": "user", "content": "x"}], prompt="x", **fields)
    assert (response.status_code, response.json()) == (400, error(message, param="model"))


def test_an_unknown_model_is_404(edge: RunningEdge) -> None:
    with edge.http() as client:
        response = client.get("/models/nobody%2Fnothing")
    message = "The model 'nobody/nothing' does not exist, or this key may not use it."
    assert (response.status_code, response.json()) == (404, error(message, param="model", code="model_not_found"))


def test_there_are_no_marketplace_slugs(edge: RunningEdge) -> None:
    with edge.http() as client:
        response = client.get("/models/some/slug/endpoints")
    message = "There is no marketplace slug 'some/slug'."
    assert (response.status_code, response.json()) == (404, error(message, code="not_found"))


@pytest.mark.parametrize(
    "path", ["tinker://r/sampler_weights/endpoints", "tinker%3A%2F%2Fr%2Fsampler_weights%2Fendpoints"]
)
def test_a_checkpoint_that_is_called_endpoints_can_be_looked_up(edge: RunningEdge, path: str) -> None:
    name = "tinker://r/sampler_weights/endpoints"
    with edge.http() as client:
        missing = client.get(f"/models/{path}")
        edge.checkpoints.held[name] = StoredCheckpoint("d")
        found = client.get(f"/models/{path}")
    message = f"The model {name!r} does not exist, or this key may not use it."
    assert (missing.status_code, missing.json()) == (404, error(message, param="model", code="model_not_found"))
    assert (found.status_code, found.json()["id"]) == (200, name)


def test_headers_that_ray_serve_obeys_have_no_effect(edge: RunningEdge) -> None:
    headers = {
        "x-request-timeout-seconds": "0.000001",
        "x-request-disconnect-disabled": "?1",
        "serve_multiplexed_model_id": "x",
        "x-session-id": "x",
    }
    with edge.http() as client:
        response = client.post("/completions", json=BODY, headers=headers)
    assert response.status_code == 200
    assert response.json()["model"] == BASE


def test_a_path_without_a_key_and_a_method_of_its_own_is_still_the_error_shape(edge: RunningEdge) -> None:
    status, headers, body = exchange(edge, b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    if headers["content-type"] == "application/json":
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    else:  # the server's parser does not know the method: it never reached the application
        assert (status, body) == (400, b"Invalid HTTP request received.")
