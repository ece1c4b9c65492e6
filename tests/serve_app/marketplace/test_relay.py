"""What a client gets of an upstream's events, and which tokens are counted."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.errors import UpstreamLost
from serve_app.base.json_structure import members
from serve_app.marketplace.bounds import Bounds
from serve_app.marketplace.events import Event, Events
from serve_app.marketplace.relay import Relay, Used
from serve_app.marketplace.secret import Secret
from tests.support.files.json_texts import OBJECTS, VALUES, spelled

SECRET = 'sk-1/"2\\3'
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
COUNTED = Used(9, 0, 3)
BOUNDS = Bounds(guessed_prompt=11, prompt=41, completion=50)
DONE = Event(b"[DONE]")


def relay(*, wants_usage: bool = False, secret: str | None = None) -> Relay:
    return Relay("acme/tri", BOUNDS, wants_usage=wants_usage, secret=Secret(secret))


def chunk(text: str = " a", finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "theirs", "choices": [choice], **more}


def event(value: object) -> Event:
    return Event(json.dumps(value, separators=(",", ":")).encode())


def data_of(content: bytes) -> list[bytes]:
    return [each.data for each in Events().feed(content)]


def relayed(*values: object, wants_usage: bool = False) -> tuple[list[Any], Used]:
    """All chunks that the client gets, without `[DONE]`, and what is counted."""
    using = relay(wants_usage=wants_usage)
    content = using.pass_on([event(value) for value in values])
    *chunks, last = data_of(content + using.end())
    assert last == b"[DONE]"
    return [json.loads(each) for each in chunks], using.used


def test_a_chunk_with_its_usage_many_times_takes_time_in_proportion_to_its_length() -> None:
    choice = b'{"choices":[{"index":0,"text":"a"}]'
    text = choice + 20_000 * b',"usage":null' + b',"z":[]}'
    began_at = time.process_time()
    (result,) = data_of(relay().pass_on([Event(text)]))
    assert time.process_time() - began_at < 1
    assert json.loads(result) == {"model": "acme/tri", "choices": [{"index": 0, "text": "a"}], "z": []}


@given(OBJECTS, st.data(), st.booleans())
def test_a_chunk_keeps_its_bytes_except_for_model_and_usage(other: dict[str, Any], data: Any, wants: bool) -> None:
    own = data.draw(st.fixed_dictionaries({"choices": st.lists(VALUES, min_size=1)}, optional={"usage": VALUES}))
    text = data.draw(spelled({**other, "model": data.draw(VALUES | st.just("theirs")), **own}))
    content = relay(wants_usage=wants).pass_on([Event(text)])
    if not content:  # it was only usage
        assert isinstance(json.loads(text).get("usage"), dict)
        return
    (result,) = data_of(content)
    before, after = members(text.replace(b"\n", b" ")), members(result)
    assert after.pop("model").strip() == b'"acme/tri"'
    before.pop("model")
    usage = before.pop("usage", None)
    assert after.pop("usage", None) is None if usage is None or not wants else after.pop("usage").strip() == b"null"
    assert after == before


TEXTS = st.sampled_from(["a", " b", "theirs", "cmpl-1", '"', "\\", "\n", "é", "", SECRET, "sk-1/", "text", "stop", "}"])
ALIKE = st.tuples(TEXTS, st.sampled_from(["", "", "", "stop"]), st.sampled_from([{}, {}, {"usage": None}, {"x": 1}]))
SHAPES_OF_TEXT = st.sampled_from(["text", "content", "reasoning", "other"])


def spelled_alike(text: str, finish: str, more: Any, name: str, ascii_only: bool, blank: str) -> bytes:
    value = chunk(text, finish or None, **more)
    if name != "text":
        value["choices"] = [{"index": 0, "delta": {name: text}, "finish_reason": finish or None}]
    return json.dumps(value, separators=("," + blank, ":" + blank), ensure_ascii=ascii_only).encode()


def as_it_comes(using: Relay, each: Event) -> bytes:
    return using.again(b"data: %b\n\n" % each.data) or using.pass_on([each])


def test_a_text_after_another_is_not_read_again() -> None:
    using = relay()
    content = using.pass_on([event(chunk("a"))])
    for text in ("b", "a long text", " "):
        assert using.again(b"data: %b\n\n" % event(chunk(text)).data) == content.replace(
            b'"a"', b'"%b"' % text.encode()
        )
    using.pass_on([DONE])
    assert using.again(b"data: %b\n\n" % event(chunk("b")).data) == b""


@settings(deadline=None)
@given(st.lists(ALIKE, max_size=8), SHAPES_OF_TEXT, st.booleans(), st.sampled_from(["", " "]), st.booleans())
def test_an_event_that_is_like_the_last_one_means_what_it_means_alone(
    values: list[Any], name: str, ascii_only: bool, blank: str, wants: bool
) -> None:
    events = [Event(spelled_alike(*value, name, ascii_only, blank)) for value in values]
    alone = [relay(wants_usage=wants, secret="sk-1/2345") for _ in events]
    using = relay(wants_usage=wants, secret="sk-1/2345")
    assert [as_it_comes(using, each) for each in events] == [
        own.pass_on([each]) for own, each in zip(alone, events, strict=True)
    ]
    assert using.used.completion == sum(own.used.completion for own in alone)
    assert using.finish_reason == next((value[1] for value in reversed(values) if value[1]), "")


def test_the_key_and_what_is_no_json_are_found_in_an_event_like_the_last_one_too() -> None:
    using = relay(secret="sk-upstream-key")
    using.pass_on([event(chunk("a"))])
    assert b"upstream-key" not in as_it_comes(using, event(chunk("my sk-upstream-key")))
    using.pass_on([event(chunk("a"))])
    with pytest.raises(UpstreamLost):
        as_it_comes(using, Event(event(chunk("@")).data.replace(b"@", b"\xff")))


@pytest.mark.parametrize(
    "text",
    [
        b'{"choices":[{"text":"\\"model\\": \\"theirs\\""}],"model":"theirs"}',
        b'{"model" : "theirs" , "choices":[{"model":"mine","text":"}"}],"x":{"model":"other"}}',
        b'{"x":{"model":"other"},"choices":[{"text":"{"}],"mod\\u0065l":"theirs"}',
        b'{"choices":[{"text":"a"}]}',
        b'{"choices":[{"text":"a"}],"model":null}',
        b'{"choices":[{"text":"]}"}],"created":1,"model":"the\\"irs","object":"o"}',
    ],
)
def test_only_the_chunks_own_model_becomes_what_was_asked_for(text: bytes) -> None:
    (result,) = data_of(relay().pass_on([Event(text)]))
    assert json.loads(result) == json.loads(text) | {"model": "acme/tri"}


OWN = [chunk(), chunk("", "stop"), {**chunk(), "choices": [], "usage": USAGE}]
BESIDE = [chunk(), chunk(" b", "stop", usage=USAGE)]
EVERY = [chunk(usage=USAGE | {"completion_tokens": 1}), chunk("", "stop", usage=USAGE)]
EVERY_AND_OWN = [*EVERY, {**chunk(), "choices": [], "usage": USAGE}]
NULLS = [chunk(usage=None), chunk("", "stop", usage=None), {**chunk(), "choices": [], "usage": USAGE}]
IN_CHOICE = [chunk(), chunk("", "stop")]
IN_CHOICE[1]["choices"][0]["usage"] = USAGE
SHAPES = pytest.mark.parametrize("values", [OWN, BESIDE, EVERY, EVERY_AND_OWN, NULLS], ids=str)


@SHAPES
def test_usage_is_counted_and_left_out_for_those_who_did_not_ask(values: list[Any]) -> None:
    chunks, used = relayed(*values)
    assert used == COUNTED
    assert all("usage" not in each for each in chunks)
    assert [each["choices"] for each in chunks] == [each["choices"] for each in values if each["choices"]]


@SHAPES
def test_usage_comes_once_and_last_for_those_who_asked(values: list[Any]) -> None:
    *chunks, last = relayed(*values, wants_usage=True)[0]
    assert all(each.get("usage") is None for each in chunks)
    assert last == {**chunk(), "model": "acme/tri", "choices": [], "usage": USAGE}


def test_usage_in_a_choice_is_counted() -> None:
    assert relayed(*IN_CHOICE)[1] == COUNTED


def test_cached_and_reasoning_tokens_are_parts_of_the_others() -> None:
    details = {
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 99},
    }
    assert relayed(chunk("", "stop", usage=USAGE | details))[1] == Used(9, 5, 3, 3)


@pytest.mark.parametrize("usage", [None, {}, 7, {"prompt_tokens": -1, "completion_tokens": 2}, {"prompt_tokens": True}])
def test_without_usage_tokens_are_estimated_from_what_came(usage: Any) -> None:
    chunks, used = relayed(chunk(usage=usage), chunk(""), chunk(" b"), chunk("", "stop"), wants_usage=True)
    assert used == Used(11, 0, 2, 0, is_estimated=True)
    assert chunks[-1]["choices"] == []
    if not usage:
        assert chunks[-1]["usage"]["total_tokens"] == 13


COUNTS = st.integers(0, 100) | st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(prompt=COUNTS, completion=COUNTS, cached=COUNTS, reasoning=COUNTS, wants=st.booleans(), own=st.booleans())
def test_no_more_is_believed_than_the_request_can_have_used(
    prompt: int, completion: int, cached: int, reasoning: int, wants: bool, own: bool
) -> None:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    last = [{**chunk(), "choices": [], "usage": usage}] if own else [chunk("", "stop", usage=usage)]
    chunks, used = relayed(chunk(), chunk("", "stop"), *last, wants_usage=wants)
    is_true = prompt <= BOUNDS.prompt and completion <= BOUNDS.completion
    assert (used.prompt, used.completion) == (min(prompt, BOUNDS.prompt), min(completion, BOUNDS.completion))
    assert (used.cached, used.reasoning) == (min(cached, used.prompt), min(reasoning, used.completion))
    assert used.is_estimated is not is_true
    if wants:
        assert chunks[-1]["usage"] == (usage if is_true else used.shown)


def test_what_came_is_believed_beyond_the_limit_that_was_asked_for() -> None:
    """An upstream may not know the field that the caller has used."""
    texts = [chunk(f" {number}") for number in range(BOUNDS.completion + 9)]
    usage = {"prompt_tokens": 9, "completion_tokens": len(texts)}
    assert relayed(*texts, chunk("", "stop", usage=usage))[1] == Used(9, 0, len(texts))


def test_a_whole_reply_with_too_much_usage_shows_what_is_counted() -> None:
    using = relay()
    usage = {"prompt_tokens": 9, "completion_tokens": 51, "x": 1}
    shown = json.loads(using.whole(json.dumps(chunk("a", "stop", usage=usage)).encode()))["usage"]
    assert (using.is_doubtful, using.used) == (True, Used(9, 0, 50, 0, is_estimated=True))
    assert shown == using.used.shown


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_every_kind_of_delta_is_counted(name: str) -> None:
    value = {"choices": [{"index": 0, "delta": {name: "x"}, "finish_reason": "stop"}]}
    assert relayed(value)[1].completion == 1


def test_a_whole_reply_keeps_its_usage_and_is_counted() -> None:
    using = relay()
    text = (
        b'{"id":"1","model":"theirs","choices":[{"index":0,"text":"a","finish_reason":"length"}],"usage":%b, "x":0.10}'
    )
    text %= json.dumps(USAGE).encode()
    assert using.whole(text) == text.replace(b"theirs", b"acme/tri")
    assert (using.used, using.finish_reason) == (COUNTED, "length")


def test_a_whole_reply_without_usage_is_estimated_from_its_text() -> None:
    using = relay()
    using.whole(json.dumps({"choices": [{"message": {"content": "x" * 9, "reasoning": "y" * 4}}]}).encode())
    assert using.used == Used(11, 0, 4, 0, is_estimated=True)


@pytest.mark.parametrize(
    "values",
    [
        [chunk("", "stop")],
        [chunk(), chunk(" b", "length")],
        [chunk("", "stop"), chunk("")],  # more after the reason
        [chunk()],
    ],
)
def test_a_reply_is_complete_with_its_reason_or_done(values: list[Any]) -> None:
    using = relay()
    using.pass_on([*map(event, values), DONE, event(chunk("too late"))])
    assert using.end() == b"data: [DONE]\n\n"


def test_a_reply_without_done_is_complete_when_each_choice_is() -> None:
    using = relay()
    using.pass_on([event(chunk("", "stop"))])
    assert using.end() == b"data: [DONE]\n\n"
    using.pass_on([event({"choices": [{"index": 1, "text": "a"}]})])
    with pytest.raises(UpstreamLost, match="before the reply was complete"):
        using.end()


@pytest.mark.parametrize("values", [[], [chunk()], [{"choices": [{"index": [], "finish_reason": ""}]}]])
def test_a_reply_that_was_cut_is_lost(values: list[Any]) -> None:
    using = relay()
    using.pass_on(list(map(event, values)))
    with pytest.raises(UpstreamLost, match="before the reply was complete"):
        using.end()


@pytest.mark.parametrize(
    "bad",
    [
        event({"error": {"message": f"{SECRET} is over its quota", "code": 429}}),
        event({"error": "gone"}),
        Event(b'{"message":"gone"}', b"error"),
        Event(b"{not json"),
        Event(b"[1]"),
        Event(b"\xff"),
    ],
)
def test_an_error_or_nonsense_ends_the_reply_without_the_upstreams_words(bad: Event) -> None:
    with pytest.raises(UpstreamLost, match=r"^The upstream sent an (error during|event that is no JSON)"):
        relay(secret=SECRET).pass_on([bad])


def test_an_event_of_several_lines_is_one_line_for_the_client() -> None:
    text = json.dumps(chunk("", "stop"), indent=1).encode()
    content = relay().pass_on([Event(text)])
    assert content.count(b"\n") == 2
    assert json.loads(content.removeprefix(b"data: ")) == chunk("", "stop", model="acme/tri")


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=8, max_size=12), st.data())
def test_the_key_is_hidden_however_it_is_spelled(key: str, data: Any) -> None:
    spellings = [[json.dumps(each)[1:-1], f"\\u{ord(each):04x}", f"\\u{ord(each):04X}"] for each in key]
    spelling = "".join(data.draw(st.sampled_from(each)) for each in spellings)
    content = f'{{"a":"before {spelling} after"}}'.encode()
    assert json.loads(Secret(key).hide_in_json(content)) == {"a": "before *** after"}
    assert Secret(key).hide_in(f"before {key}") == "before ***"


def test_the_key_is_hidden_in_chunks_and_whole_replies() -> None:
    using = relay(secret="sk-upstream-key")
    content = using.pass_on([event(chunk("sk-upstream-key", "stop", system_fingerprint="sk-upstream-key"))])
    content += relay(secret="sk-upstream-key").whole(json.dumps(chunk("sk-upstream-key")).encode())
    assert b"upstream-key" not in content
    assert content.count(b"***") == 3
    assert Secret(None).hide_in_json(b"{}") == b"{}"
