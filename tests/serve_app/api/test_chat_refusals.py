"""Section 3 of the contract: chats that are refused, with their exact messages."""

from typing import Any

import pytest

from tests.support.harness import BASE, CHAT, PLAIN, RunningEdge
from tests.support.wire import named, refused

pytest_plugins = ("tests.support.edge_fixtures",)

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("x", "messages[0] must be an object, got a string of 1 characters."),
        ({}, "messages[0].role is required."),
        (
            {"role": "function", "content": "x"},
            "messages[0].role must be 'system', 'developer', 'user', 'assistant' or 'tool', got \"function\".",
        ),
        ({"role": "user"}, "messages[0].content must be a string or a list of parts, got null."),
        ({"role": "user", "content": 5}, "messages[0].content must be a string or a list of parts, got 5."),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0] must be an object, got a string of 1 characters."),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            'messages[0].content[0].type must be "text" or "image_url", got "input_audio".',
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": None}]},
            "messages[0].content[0].text must be a string, got null.",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]},
            "messages[0].content[0] is an image, and the model 'tiny/Chat' takes no images.",
        ),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id is required for the role tool."),
        (
            {"role": "user", "content": "x", "tool_calls": [CALL]},
            "messages[0].tool_calls is for the role assistant only, got role 'user'.",
        ),
        (
            {"role": "assistant", "content": "x", "tool_call_id": "a"},
            "messages[0].tool_call_id is for the role tool only, got role 'assistant'.",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments must be the text of a JSON object: it is an array.",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]},
            "messages[0].tool_calls[0].function.arguments must be a string that holds a JSON object, got an object.",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "id": ""}]},
            'messages[0].tool_calls[0].id must not be empty, got "".',
        ),
    ],
)
def test_a_message_that_cannot_be_is_400(edge: RunningEdge, message: Any, says: str) -> None:
    said, param = refused(edge.post("/chat/completions", model=CHAT, messages=[message]))
    assert said == says
    assert param is not None
    assert named(says).startswith(param)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages must not be empty, got a list of 0."),
        (None, "messages must be a list, got null."),
        ([{"role": "user", "content": "x"}] * 4097, "messages must have at most 4096 items, got 4097."),
    ],
)
def test_messages_that_cannot_be_are_400(edge: RunningEdge, messages: Any, says: str) -> None:
    assert refused(edge.post("/chat/completions", model=CHAT, messages=messages)) == (says, "messages")


@pytest.mark.parametrize("name", [{}, {"name": "f"}])
def test_a_tool_result_for_a_call_that_nobody_made_before_is_400(edge: RunningEdge, name: dict[str, str]) -> None:
    call = {"id": "later", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for call_id in ("nope", "later"):
        result = {"role": "tool", "tool_call_id": call_id, "content": "y", **name}
        messages = [{"role": "user", "content": "x"}, result, {"role": "assistant", "tool_calls": [call]}]
        at = "messages[1].tool_call_id"
        says = f"{at} must be the id of a call in an earlier message, got {call_id!r}."
        assert refused(edge.post("/chat/completions", model=CHAT, messages=messages)) == (says, at)


def test_what_the_template_refuses_is_400_with_its_own_words(edge: RunningEdge) -> None:
    assert refused(edge.chat("REFUSE ME")) == ("This template refuses that message.", "messages")


def test_a_chat_on_a_model_without_template_points_to_completions(edge: RunningEdge) -> None:
    message = f"The model {BASE!r} has no chat template; use POST /completions with a prompt."
    assert refused(edge.chat(model=BASE)) == (message, "model")
    assert refused(edge.chat(model=BASE, tools=[TOOL])) == (message, "model")


def test_top_logprobs_need_logprobs(edge: RunningEdge) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None}):
        message = "top_logprobs needs logprobs to be true, got 3."
        assert refused(edge.chat(top_logprobs=3, **fields)) == (message, "top_logprobs")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("top_logprobs", 21, "must be at most 20, got 21."),
        ("top_logprobs", -1, "must be at least 0, got -1."),
        ("top_logprobs", True, "must be an integer, got true."),
        ("max_tokens", True, "must be an integer, got true."),
        ("max_completion_tokens", True, "must be an integer, got true."),
        ("max_completion_tokens", 2.5, "must be an integer, got 2.5."),
        ("logprobs", 1, "must be true or false, got 1."),
        ("max_tokens", 0, "must be at least 1, got 0."),
        ("max_completion_tokens", 0, "must be at least 1, got 0."),
        ("separate_reasoning", "no", 'must be true or false, got "no".'),
        ("parallel_tool_calls", 0, "must be true or false, got 0."),
        ("tools", {}, "must be a list, got an object."),
        ("reasoning_effort", [], "must be a string, a number or a boolean, got a list of 0."),
    ],
)
def test_a_chat_field_out_of_range_names_field_limit_and_value(
    edge: RunningEdge, field: str, value: Any, says: str
) -> None:
    assert refused(edge.chat(**{field: value})) == (f"{field} {says}", field)


@pytest.mark.parametrize("effort", ["high", 0.5, 1, "None"])
def test_an_effort_that_the_model_does_not_take_lists_those_it_does(edge: RunningEdge, effort: Any) -> None:
    message, param = refused(edge.chat(reasoning_effort=effort))
    assert (message, param) == (
        f"reasoning_effort: this model takes true, false, none, got {effort!r}.",
        "reasoning_effort",
    )


@pytest.mark.parametrize("effort", ["none", True, 0.5])
def test_a_model_that_cannot_reason_takes_no_effort(edge: RunningEdge, effort: Any) -> None:
    message = f"reasoning_effort must be left out: this model does not reason, got {effort!r}."
    assert refused(edge.chat(model=PLAIN, reasoning_effort=effort)) == (message, "reasoning_effort")


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (5, "tools[0] must be an object, got 5."),
        ({"type": "function"}, "tools[0].function is required."),
        ({"type": "code", "function": {"name": "f"}}, "tools[0].type must be 'function', got \"code\"."),
        (
            {"type": "function", "function": {"name": "a b"}},
            'tools[0].function.name must match ^[A-Za-z0-9_.:-]{1,128}$, got "a b".',
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": []}},
            "tools[0].function.parameters must be an object, got a list of 0.",
        ),
    ],
)
def test_a_tool_that_cannot_be_is_400(edge: RunningEdge, tool: Any, says: str) -> None:
    assert refused(edge.chat(tools=[tool])) == (says, named(says))


def test_two_tools_of_one_name_are_400(edge: RunningEdge) -> None:
    message = "tools[1].function.name must be unique, got 'get_weather' twice."
    assert refused(edge.chat(tools=[TOOL, TOOL])) == (message, "tools")


def test_more_tools_than_allowed_are_400(edge: RunningEdge) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(513)]
    assert refused(edge.chat(tools=tools)) == ("tools must have at most 512 items, got 513.", "tools")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_needs_tools_and_a_family_that_calls(edge: RunningEdge, choice: Any) -> None:
    shown = "'required'" if choice == "required" else "'get_weather'"
    assert refused(edge.chat(tool_choice=choice)) == (f"tool_choice {shown} needs tools.", "tool_choice")
    assert refused(edge.chat(model=PLAIN, tools=[TOOL], tool_choice=choice)) == (
        f"tool_choice {shown} cannot be served: the model {PLAIN!r} has no tool-call support.",
        "tool_choice",
    )


def test_a_demanded_function_must_be_declared(edge: RunningEdge) -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    message = "tool_choice must name one of tools, got 'other'."
    assert refused(edge.chat(tools=[TOOL], tool_choice=choice)) == (message, "tool_choice")


@pytest.mark.parametrize("choice", ["any", {"type": "function"}, {"function": {"name": "x"}}, 5])
def test_a_tool_choice_that_cannot_be_is_400(edge: RunningEdge, choice: Any) -> None:
    message, param = refused(edge.chat(tools=[TOOL], tool_choice=choice))
    assert param in ("tool_choice", "tool_choice.function.name")
    assert message.startswith(f"{param} must be ")


def test_no_message_repeats_the_text_of_a_conversation(edge: RunningEdge) -> None:
    for content in (["SECRET"], [{"type": "SECRET" * 40}], [{"type": "text", "text": ["SECRET"]}]):
        assert "SECRETSECRETSECRETSECRETSECRETSECRETSECRET" not in edge.chat(content=content).text[-60:]
    assert "SECRET" not in edge.complete([1, "SECRET"]).text


def test_nothing_that_was_refused_reached_the_engine(edge: RunningEdge) -> None:
    for fields in ({"temperature": -1}, {"stop": ""}, {"max_tokens": 0}, {"model": "x"}):
        assert edge.complete(**fields).status_code in (400, 404)
    assert edge.script.requests == []
