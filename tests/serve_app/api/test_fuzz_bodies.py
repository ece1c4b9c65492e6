"""Bodies that are hardly JSON, or JSON that is hardly a request: read exactly, or refused in one sentence."""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serve_app.api.bodies.json_body import parse_object
from serve_app.api.schema.chat import ChatBody
from serve_app.api.schema.completion import CompletionBody
from serve_app.api.schema.sampling import parse_body
from serve_app.base.errors import InvalidRequest
from tests.support.harness import BASE, CHAT, PLAIN, RunningEdge

pytest_plugins = ("tests.support.edge_fixtures",)

RUN = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHAPE = ["message", "type", "param", "code"]
COMPLETION = {"model": BASE, "prompt": "x", "max_tokens": 2}
CONVERSATION = {"model": CHAT, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TEXT = '{"model": "tiny/Base", "prompt": "é😀\\u00e9\\ud83d\\ude00\\n", "stop": ["\\u0000"], "top_p": 5e-1, "seed": -0}'


def send(edge: RunningEdge, content: bytes, path: str = "/completions") -> tuple[int, Any]:
    """The answer, once it is known to be a reply or a refusal in the one shape."""
    with edge.http() as client:
        response = client.post(path, content=content, headers={"content-type": "application/json"})
    body = response.json()
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert list(body) == ["error"]
        assert list(body["error"]) == SHAPE
        assert 0 < len(body["error"]["message"]) < 500
    return response.status_code, body


# --- what is no JSON ---


@pytest.mark.parametrize("end", range(len(TEXT.encode())))
def test_json_that_is_cut_anywhere_is_refused(end: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^The request body is not valid JSON: .* at line 1 column \d+\.$"):
        parse_object(TEXT.encode()[:end])


@pytest.mark.parametrize(
    "coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "latin-1", "cp1252", "cp037"]
)
def test_another_encoding_is_refused(edge: RunningEdge, coding: str) -> None:
    status, body = send(edge, '{"model": "tiny/Base", "prompt": "é"}'.encode(coding))
    assert (status, body["error"]["param"]) == (400, None)
    assert body["error"]["message"].startswith("The request body is not valid JSON: ")


@pytest.mark.parametrize(
    "content",
    [
        b"\xc0\xaf",  # overlong
        b"\xe0\x80\xaf",
        b"\xf0\x80\x80\xaf",
        b"\xf4\x90\x80\x80",  # beyond U+10FFFF
        b"\xed\xb0\x80",  # half a pair
        b"\xed\xa0\xbd\xed\xb8\x80",  # both halves, each by itself
        b"\x80",
        b"\xe2\x82",  # not all of it
        b"\xfe",
        b"\xff",
        b"\0",  # a NUL may only stand as \u0000
        b"\x1f",
        b"\n",
        b"\\x41",
        b"\\u12",
        b"\\uD83D\\n",
        b"\\u{41}",
        b"\\'",
    ],
)
def test_text_that_is_none_is_refused_in_names_and_values(content: bytes) -> None:
    for body in (b'{"prompt": "' + content + b'"}', b'{"' + content + b'": 1}', b'{"a": [{"b": "' + content + b'"}]}'):
        with pytest.raises(InvalidRequest, match="not valid JSON"):
            parse_object(body)


@pytest.mark.parametrize(
    "literal",
    [
        *("NaN", "Infinity", "-Infinity", "nan", "inf", "0x10", "01", "-01", "+1", ".5", "1.", "1e", "1e+", "1_000"),
        *("--1", "-", "True", "None", "undefined", "'x'", "// a\n1", "/* a */1", "1,", "9" * 5000, "\u0661"),
    ],
)
def test_what_only_other_readers_take_for_a_value_is_refused(literal: str) -> None:
    for body in (f'{{"seed": {literal}}}', f'{{"unknown": [{literal}]}}'):
        with pytest.raises(InvalidRequest, match="not valid JSON"):
            parse_object(body.encode())


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_is_bounded_wherever_it_stands(opening: str, closing: str) -> None:
    for depth, is_read in ((100, True), (195, True), (250, False), (100_000, False)):
        for field in ("unknown", "prompt", "tools", "logit_bias", "stop", "model"):
            body = f'{{"{field}": {opening * depth}0{closing * depth}}}'.encode()
            if is_read:
                assert set(parse_object(body)) == {field}
            else:
                with pytest.raises(
                    InvalidRequest, match=r"recursion limit exceeded|nested at most 200 deep, got \d+\."
                ):
                    parse_object(body)


@RUN
@given(data=st.data())
def test_a_body_that_was_damaged_is_read_like_any_reader_would_or_refused(data: st.DataObject) -> None:
    content = bytearray(TEXT.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        found = parse_object(bytes(content))
    except InvalidRequest:
        return
    assert found == json.loads(content.decode())


@RUN
@given(pairs=st.lists(st.tuples(st.sampled_from(["a", "b", "\\u0061"]), st.integers(0, 9)), max_size=6))
def test_of_keys_that_are_repeated_the_last_one_wins_at_every_depth(pairs: list[tuple[str, int]]) -> None:
    inner = "{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"
    expected = {"a" if name == "\\u0061" else name: value for name, value in pairs}
    assert parse_object(f'{{"x": 1, "x": [{inner}]}}'.encode()) == {"x": [expected]}


# --- numbers ---

NUMBERS = ["1" + "0" * 400, "-1" + "0" * 400, "9" * 4000, "1e999", "-1e999", "1E+999", "1e308", "-1e308", "1.8e308"]
NUMBERS += [
    "5e-324",
    "1e-999",
    "-1e-999",
    "-0",
    "-0.0",
    "0.0",
    "1e0",
    "1.0",
    "1e2",
    str(2**63),
    str(2**64),
    "0." + "1" * 4000,
]
IN_PLACES = {
    **{
        name: f'"{name}": %s'
        for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
    },
    **{
        name: f'"{name}": %s'
        for name in ("repetition_penalty", "max_tokens", "logprobs", "prompt", "model", "stop", "n")
    },
    "bias": '"logit_bias": {"1": %s}',
    "prompt id": '"prompt": [1, %s]',
    "stop id": '"stop": [%s]',
    "chunk": '"prompt": null, "prompt_chunks": [{"type": "tokens", "tokens": [%s]}]',
    "effort": '"reasoning_effort": %s',
    "completion tokens": '"max_completion_tokens": %s',
    "alternatives": '"logprobs": true, "top_logprobs": %s',
    "schema": '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": %s}}}]',
    "content": '"messages": [{"role": "user", "content": %s}]',
    "call": '"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1", '
    '"function": {"name": "f", "arguments": "{\\"a\\": %s}"}}]}]',
}


@pytest.mark.parametrize("place", IN_PLACES)
def test_no_number_anywhere_is_a_fault_of_ours(edge: RunningEdge, place: str) -> None:
    """Of a name that is repeated the last one wins."""
    edge.script.says("ok")
    for number in NUMBERS:
        for path, body in (("/completions", COMPLETION), ("/chat/completions", CONVERSATION)):
            content = json.dumps(body)[:-1] + ", " + IN_PLACES[place] % number + "}"
            status, answer = send(edge, content.encode(), path)
            if status == 200:
                json.dumps(answer, allow_nan=False)
            else:
                assert number not in answer["error"]["message"] or len(number) < 100


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
def test_a_number_beyond_all_floats_is_refused_by_name(edge: RunningEdge, field: str, number: str) -> None:
    status, body = send(edge, (json.dumps(COMPLETION)[:-1] + f', "{field}": {number}}}').encode())
    assert (status, body["error"]["param"]) == (400, field)
    assert body["error"]["message"].startswith(f"{field} must be ")


# --- values ---

WILD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.floats(),  # 1e999 is read as infinity; NaN cannot be written
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.sampled_from(["\0", "\u2028", "\ufeff", "\x7f", "<|im_end|>", "a" * 5000]),
).filter(lambda value: value == value)
VALUES = st.recursive(
    WILD,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@RUN
@given(data=st.data(), kind=st.sampled_from([ChatBody, CompletionBody]))
def test_the_validators_take_or_refuse_every_value_of_every_field(
    data: st.DataObject, kind: type[ChatBody] | type[CompletionBody]
) -> None:
    raw: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    for field in data.draw(st.lists(st.sampled_from([*kind.model_fields, "unknown"]), max_size=3)):
        raw[field] = data.draw(VALUES)
    try:
        body: ChatBody | CompletionBody = parse_body(kind, raw)
    except InvalidRequest as exc:
        refusal = exc
    else:
        numbers = [body.temperature, body.top_p, body.min_p, *(body.logit_bias or {}).values()]
        assert all(number is None or math.isfinite(number) for number in numbers)
        return
    assert re.split(r"[.[]", refusal.param or "")[0] in kind.model_fields
    assert str(refusal).startswith(refusal.param or "?")
    assert str(refusal).isprintable()
    assert len(str(refusal)) < 500


@settings(RUN, max_examples=150)
@given(data=st.data(), model=st.sampled_from([CHAT, PLAIN, BASE]))
@example(data=None, model=CHAT)
def test_every_text_is_text_to_the_end(edge: RunningEdge, data: Any, model: str) -> None:
    """NUL, private and unassigned characters, markers: prompts and stops of all kinds are served."""
    texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
    prompt, stop = ("\0\ufffe", "\0") if data is None else (data.draw(texts), data.draw(texts))
    edge.script.says(prompt[:5])
    if model == BASE:
        response = edge.complete(prompt, stop=stop, max_tokens=9)
    else:
        response = edge.chat(prompt, model=model, stop=[stop], max_tokens=9)
    assert response.status_code == 200, response.text
    assert edge.script.requests[-1].prompt_token_ids
