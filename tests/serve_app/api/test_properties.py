"""Whatever is sent is answered by a reply or a refusal in the one shape; and a stream is what a whole reply is."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.harness import BASE, CHAT, PLAIN, RunningEdge

pytest_plugins = ("tests.support.edge_fixtures",)

RUN = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 25)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


SAMPLING = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 2),
    "logit_bias": st.dictionaries(st.integers(0, 511).map(str), st.floats(-100, 100), max_size=3),
    "seed": st.integers(0, 2**64 - 1),
    "stop": TEXTS | st.lists(TEXTS, max_size=3) | st.lists(st.integers(0, 511), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.none(),
    "return_token_ids": st.booleans(),
    "max_tokens": st.integers(1, 12),
    "prompt_cache_key": TEXTS,
    "unknown": ANYTHING,
}
COMPLETION = {
    "prompt": TEXTS | st.lists(st.integers(0, 511), max_size=5) | st.lists(TEXTS, max_size=2),
    "prompt_chunks": st.none(),
    "logprobs": st.integers(0, 20),
    "echo": st.booleans(),
}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "user"]), "content": TEXTS | PARTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.none() | TEXTS},
        optional={"reasoning_content": TEXTS, "tool_calls": st.just(CALLS), "name": TEXTS.filter(bool)},
    ),
    st.just({"role": "tool", "tool_call_id": "c1", "content": "18"}),
)
CHAT_FIELDS = {
    "messages": st.lists(MESSAGE, min_size=1, max_size=4),
    "max_completion_tokens": st.integers(1, 12),
    "reasoning_effort": st.sampled_from([True, False, "none", None]),
    "separate_reasoning": st.booleans(),
    "tools": st.just(TOOLS),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "parallel_tool_calls": st.booleans(),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
}
MODELS = st.sampled_from([CHAT, CHAT, PLAIN, BASE])


def some_of(fields: dict[str, st.SearchStrategy[Any]], *required: str) -> st.SearchStrategy[Any]:
    """Bodies with a model, a bound on the reply, the required fields and any of the others; then up to two of all are
    replaced by anything.
    """
    needed = {"model": MODELS, **{name: fields[name] for name in (*required, "max_tokens")}}
    optional = {name: value for name, value in fields.items() if name not in needed}
    odd = st.just({}) | st.dictionaries(st.sampled_from([*needed, *optional]), ANYTHING, max_size=2)
    return st.builds(lambda body, odd: {**body, **odd}, st.fixed_dictionaries(needed, optional=optional), odd)


def check_answer(edge: RunningEdge, response: Any) -> None:
    """200 with a reply, or a refusal in the one shape; never a fault of ours."""
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            events = edge.events(response)
            assert events[-1] == "[DONE]" or set(events[-1]["error"]) == {"message", "type", "param", "code"}
        else:
            assert response.json()["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        return
    assert response.status_code in (400, 404, 422), response.text
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"


@RUN
@given(body=some_of({**SAMPLING, **COMPLETION}, "prompt"))
def test_no_completion_is_answered_by_a_fault_of_ours(edge: RunningEdge, body: dict[str, Any]) -> None:
    check_answer(edge, edge.post("/completions", **body))


@RUN
@given(body=some_of({**SAMPLING, **CHAT_FIELDS}, "messages"))
def test_no_chat_is_answered_by_a_fault_of_ours(edge: RunningEdge, body: dict[str, Any]) -> None:
    check_answer(edge, edge.post("/chat/completions", **body))


@RUN
@given(content=st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_no_body_is_answered_by_a_fault_of_ours(edge: RunningEdge, content: bytes) -> None:
    with edge.http() as client:
        response = client.post("/completions", content=content, headers={"content-type": "application/json"})
    check_answer(edge, response)


# --- a stream is a whole reply ---

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
FRAGMENTS = st.sampled_from([*MARKERS, "\n", "\n\n", CALL, CALL, "日本", "😀", "STOP", "ST", "OP", "a"]) | TEXTS
REPLIES = st.lists(FRAGMENTS, max_size=8).map("".join)
TOKENS = st.lists(st.integers(0, 397), max_size=20)  # any bytes, in any order
HOW = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.sampled_from(["STOP", ["OP", "a"], "日", "\ufffd", "<tool_call>"]),
        "max_tokens": st.integers(1, 30),
        "return_token_ids": st.just(True),
    },
)


def without_ids(calls: list[Any] | None) -> Any:
    """Call ids are random."""
    return [{name: value for name, value in call.items() if name not in ("id", "index")} for call in calls or []]


def folded_text(events: list[Any]) -> dict[str, Any]:
    *events, usage, done = events
    assert done == "[DONE]"
    found = [event["choices"][0] for event in events]
    logprobs = [choice["logprobs"] for choice in found if choice["logprobs"]]
    columns = {key: [item for part in logprobs for item in part[key]] for key in logprobs[0]} if logprobs else None
    return {
        "text": "".join(choice["text"] for choice in found),
        "finish_reason": found[-1]["finish_reason"],
        "token_ids": [token for choice in found for token in choice.get("token_ids", [])],
        "logprobs": columns,
        "usage": usage["usage"],
    }


def folded_chat(events: list[Any]) -> dict[str, Any]:
    *events, usage, done = events
    assert done == "[DONE]"
    found = [event["choices"][0] for event in events]
    return {
        "content": "".join(choice["delta"]["content"] or "" for choice in found) or None,
        "reasoning_content": "".join(choice["delta"]["reasoning_content"] or "" for choice in found) or None,
        "tool_calls": without_ids([call for choice in found for call in choice["delta"].get("tool_calls", [])]),
        "finish_reason": found[-1]["finish_reason"],
        "token_ids": [token for choice in found for token in choice.get("token_ids", [])],
        "logprobs": [entry for choice in found for entry in (choice["logprobs"] or {"content": []})["content"]],
        "usage": {**usage["usage"], "prompt_tokens_details": None},
    }


@RUN
@given(reply=REPLIES | TOKENS, fields=HOW, logprobs=st.none() | st.integers(0, 3), echo=st.booleans())
def test_a_streamed_completion_is_the_whole_one(
    edge: RunningEdge, reply: Any, fields: Any, logprobs: int | None, echo: bool
) -> None:
    edge.script.says(*([reply] if isinstance(reply, str) else reply))
    fields = {**fields, "logprobs": logprobs, "echo": echo}
    whole = edge.complete("The 日", **fields).json()
    streamed = edge.complete("The 日", stream=True, stream_options={"include_usage": True}, **fields)
    stream = folded_text(edge.events(streamed))
    choice = whole["choices"][0]
    assert stream == {
        "text": choice["text"],
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids", []),
        "logprobs": choice["logprobs"],
        "usage": whole["usage"],
    }


@RUN
@given(reply=REPLIES | TOKENS, fields=HOW, logprobs=st.booleans(), separate=st.booleans())
def test_a_streamed_chat_is_the_whole_one(
    edge: RunningEdge, reply: Any, fields: Any, logprobs: bool, separate: bool
) -> None:
    edge.script.says(*([reply] if isinstance(reply, str) else reply))
    fields = {**fields, "logprobs": logprobs, "separate_reasoning": separate, "tools": TOOLS}
    whole = edge.chat(**fields).json()
    stream = folded_chat(edge.events(edge.chat(stream=True, stream_options={"include_usage": True}, **fields)))
    choice = whole["choices"][0]
    edge.wait_until_idle()
    if edge.recorder.ended[-1].unparsed:  # the one difference: a stream cannot take back what it has sent
        assert (choice["message"]["reasoning_content"], choice["message"]["tool_calls"]) == (None, None)
        for known in ("content", "reasoning_content", "tool_calls", "finish_reason", "usage"):
            del stream[known]
        assert stream == {
            "token_ids": choice.get("token_ids", []),
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
        }
        return
    assert stream == {
        "content": choice["message"]["content"],
        "reasoning_content": choice["message"]["reasoning_content"],
        "tool_calls": without_ids(choice["message"]["tool_calls"]),
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids", []),
        "logprobs": (choice["logprobs"] or {"content": []})["content"],
        "usage": {**whole["usage"], "prompt_tokens_details": None},
    }


@RUN
@given(tokens=TOKENS, cut=st.integers(1, 25))
def test_text_is_what_the_tokenizer_decodes(edge: RunningEdge, tokens: list[int], cut: int) -> None:
    edge.script.says(*tokens)
    expected = edge.script.tokenizer.decode(tokens[:cut], skip_special_tokens=True)
    assert edge.complete(max_tokens=cut).json()["choices"][0]["text"] == expected
