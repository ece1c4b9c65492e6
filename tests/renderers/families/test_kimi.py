"""Kimi: what the contract does not ask of every family."""

import json

import pytest

from renderers import registry
from renderers.base import RenderError, ReplyEnd, TemplateRefused
from renderers.families.kimi_tools import typescript, with_sorted_keys
from renderers.messages import Conversation, ImagePart, Message, Role, TextPart, Tool, ToolCall
from tests.renderers.families.case import TOOLS
from tests.renderers.families.cases.kimi import (
    CALL,
    END,
    END_3,
    THOUGHT,
    calls_3,
    closed,
    k3_tokenizer,
    opened,
    section,
    tokenizer,
    tokenizer_without_reasoning,
    write_call,
)
from tests.support.renderer_kit import assistant, parse, pieces_of, qwen_tokenizer, result, template, tool, user


@pytest.fixture(scope="module")
def k2():
    return registry.build(None, tokenizer_without_reasoning(), template("kimi_k2_instruct"))


@pytest.fixture(scope="module")
def k2_thinking():
    return registry.build(None, tokenizer(), template("kimi_k2_thinking"))


@pytest.fixture(scope="module")
def k2_5():
    return registry.build(None, tokenizer(), template("kimi_k2_5"))


@pytest.fixture(scope="module")
def k3():
    return registry.build(None, k3_tokenizer(), template("kimi_k3"))


def text_of(renderer, made, *messages, tools=(), effort=None):
    return made.decode(renderer.render(Conversation(messages, tools, effort)).token_ids)


# --- K2 ---


def test_a_call_keeps_the_id_that_the_model_gave_it(k2):
    calls = section(write_call("functions.now:3", "{}"), write_call("functions.forecast:4", '{"city": "Köln"}'))
    parsed = parse(k2, [pieces_of(tokenizer(), f"hi{calls}{END}")], ReplyEnd.END, "", TOOLS)
    assert parsed.ids == ["functions.now:3", "functions.forecast:4"]
    assert parsed.calls == [("now", "{}"), ("forecast", '{"city": "Köln"}')]


def test_a_name_may_have_dots_and_colons(k2):
    named = tool("a.b:1")
    parsed = parse(
        k2, [pieces_of(tokenizer(), section(write_call("functions.a.b:1:0", "{}")))], ReplyEnd.CUT, "", (named,)
    )
    assert (parsed.ids, parsed.calls) == (["functions.a.b:1:0"], [("a.b:1", "{}")])


def test_the_id_is_rendered_in_the_history_and_the_model_goes_on_counting(k2_5):
    call = ToolCall("functions.now:7", "now", "{}")
    text = text_of(k2_5, tokenizer(), user("q"), assistant("", call), result("functions.now:7", "18"))
    assert section(write_call("functions.now:7", "{}")) in text
    assert "<|im_system|>now<|im_middle|>## Return of functions.now:7\n18<|im_end|>" in text


def test_k2_speaks_as_kimi_unless_the_system_says_otherwise(k2):
    assert "You are Kimi, an AI assistant created by Moonshot AI." in text_of(k2, tokenizer(), user("q"))


def test_tools_are_declared_with_sorted_keys(k2):
    text = text_of(k2, tokenizer(), user("q"), tools=(tool("f"),))
    assert f"tool_declare<|im_middle|>{json.dumps([tool('f').declared], sort_keys=True)}<|im_end|>" in text


def test_reasoning_may_speak_of_calls(k2_thinking):
    parsed = parse(k2_thinking, [pieces_of(tokenizer(), f"<think>a{CALL}b</think>c{END}")], ReplyEnd.END, "", TOOLS)
    assert (parsed.reasoning, parsed.text, parsed.calls, parsed.malformed) == (f"a{CALL}b", "c", [], False)


@pytest.mark.parametrize("effort", [True, False, "none", "high"])
@pytest.mark.parametrize(("name", "why"), [("k2", "does not reason"), ("k2_thinking", "always reasons")])
def test_k2_takes_no_effort(request, name, why, effort):
    with pytest.raises(RenderError) as error:
        request.getfixturevalue(name).check_effort(effort)
    assert str(error.value) == f"reasoning_effort must be left out: this model {why}, got {effort!r}."


def test_reasoning_of_k2_5_is_on_unless_it_is_switched_off(k2_5):
    prefills = {
        effort: k2_5.render(Conversation((user("q"),), effort=effort)).prefill for effort in (None, True, False)
    }
    assert prefills == {None: "<think>", True: "<think>", False: "<think></think>"}


def test_with_reasoning_off_the_model_s_reasoning_tags_are_errors(k2_5):
    parsed = parse(k2_5, [pieces_of(tokenizer(), f"<think>a</think>b{END}")], ReplyEnd.END, "<think></think>", TOOLS)
    assert (parsed.reasoning, parsed.text, parsed.malformed) == ("", "<think>a</think>b", True)


def test_k2_5_takes_images(k2_5):
    image = Message(Role.USER, (TextPart("What is "), ImagePart(0)))
    text = text_of(k2_5, tokenizer(), image)
    assert "What is <|media_begin|>image<|media_content|><|media_pad|><|media_end|><|im_end|>" in text


@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k3"])
def test_a_vocabulary_without_the_tokens_is_refused(name):
    with pytest.raises(TemplateRefused, match=f"renderer '{name}' needs the special token"):
        registry.build(name, qwen_tokenizer(), template("qwen3"))


# --- tools as TypeScript ---


def declared(name="f", parameters=None, **fields):
    function = {"name": name, **fields} | ({} if parameters is None else {"parameters": parameters})
    return Tool(name, parameters or {}, {"type": "function", "function": function})


def fields_of(properties, **schema):
    """What stands between the braces."""
    text = typescript([declared(parameters={"type": "object", "properties": properties, **schema})])
    return text.partition("(_: {\n")[2].rpartition("\n}) => any;")[0]


def test_tools_are_a_namespace():
    text = typescript([declared("f", description="Does f.\n\nOften."), declared("g", {"type": "object"})])
    assert text == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "// Does f.\n\n// Often.\ntype f = (_: {}) => any;\n"
        "type g = (_: {}) => any;\n}\n"
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "  a?: string"),
        ({"type": "integer"}, "  a?: number"),
        ({"type": "boolean", "default": True}, "  // Default: True\n  a?: boolean"),
        ({"type": "string", "default": "é"}, '  // Default: "é"\n  a?: string'),
        (
            {"type": "string", "description": "A\nB", "minLength": 1, "maxLength": 2},
            "  // A\n  // B\n  // maxLength: 2, minLength: 1\n  a?: string",
        ),
        ({"type": "number", "minimum": 0.5}, "  // minimum: 0.5\n  a?: number"),
        ({"enum": ["x", 1, None]}, '  a?: "x" | 1 | None'),
        ({"type": ["string", "null"]}, "  a?: string | null"),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, "  a?: number | Array<any>"),
        ({"type": "array", "items": {"type": "string"}, "minItems": 1}, "  // minItems: 1\n  a?: Array<string>"),
        (
            {"type": "array", "items": {"type": "string", "description": "One."}},
            "  a?: Array<\n    // One.\n    string\n  >",
        ),
        ({}, "  a?: any"),
        (True, "  a?: any"),
        ({"type": "object", "additionalProperties": False}, "  a?: {\n    [k: string]: never\n  }"),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "  a?: {\n    [k: string]: number\n  }",
        ),
    ],
)
def test_a_schema_is_a_type(schema, text):
    assert fields_of({"a": schema}) == text


def test_required_fields_come_first_and_each_kind_in_order():
    names = fields_of({name: {"type": "string"} for name in "dbca"}, required=["d", "c"])
    assert names == "  c: string,\n  d: string,\n  a?: string,\n  b?: string"


def test_definitions_are_interfaces():
    node = {"type": "object", "description": "A node.", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    text = typescript([declared(parameters={"properties": {"a": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}})])
    assert "// A node.\ninterface Node {\n  next?: Node\n}\ntype f = (_: {\n  a?: Node\n}) => any;" in text
    text = typescript([declared(parameters={"properties": {"a": {"$ref": "#"}}})])
    assert "interface parameters {\n  a?: parameters\n}\ntype f = (_: parameters) => any;" in text


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Missing"},
        {"$ref": "https://example.com"},
        {"oneOf": [{"type": "string"}]},
        {"type": ["string", "date"]},
        {"type": "integer", "enum": ["x"]},
        {"type": ["integer", "string"], "enum": [1]},
        {"description": 3, "type": "string"},
        {"type": "object", "required": 3},
        "string",
    ],
)
def test_a_schema_without_a_word_in_typescript_is_declared_as_json(k2_5, schema):
    strange = declared(parameters={"type": "object", "properties": {"a": schema}})
    assert typescript([tool(), strange]) is None
    text = text_of(k2_5, tokenizer(), user("q"), tools=(strange,))
    as_json = json.dumps([with_sorted_keys(strange.declared)], separators=(",", ":"))
    assert f"tool_declare<|im_middle|>{as_json}<|im_end|>" in text


def test_the_declaration_is_what_the_template_writes(k2_5):
    text = text_of(k2_5, tokenizer(), user("q"), tools=TOOLS)
    assert f"tool_declare<|im_middle|>{typescript(TOOLS)}<|im_end|>" in text


def test_a_deep_schema_is_declared_as_json():
    schema = {"type": "string"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    assert typescript([declared(parameters={"properties": {"a": schema}})]) is None


def test_without_tools_there_is_no_declaration():
    assert typescript([]) is None


# --- K3 ---


def k3_arguments(k3, body, name="forecast"):
    call = opened(f'call tool="{name}" index="1"') + body + closed("call")
    written = f"w{THOUGHT}{closed('response')}{calls_3(call)}{closed('message')}{END_3}"
    parsed = parse(k3, [pieces_of(k3_tokenizer(), written)], ReplyEnd.END, "<|open|>think<|sep|>", TOOLS)
    assert not parsed.malformed
    [(_, arguments)] = parsed.calls
    return json.loads(arguments)


def argument(key, kind, value):
    return opened(f'argument key="{key}" type="{kind}"') + value + closed("argument")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (argument("city", "string", "5"), {"city": "5"}),
        (argument("city", "number", "5"), {"city": "5"}),
        (argument("days", "number", "5") + argument("exact", "boolean", "true"), {"days": 5, "exact": True}),
        (argument("a&quot;&amp;b", "null", "null"), {'a"&b': None}),
        (argument("a", "string", "1") + argument("a", "string", "2"), {"a": "2"}),
        (opened('json type="object"') + '{"city": "Köln"}' + closed("json"), {"city": "Köln"}),
        ("", {}),
    ],
)
def test_arguments_of_k3_are_what_tags_and_declaration_say(k3, body, arguments):
    assert k3_arguments(k3, body) == arguments


def test_k3_tells_its_effort_to_the_template(k3):
    for effort, words in [(None, "`thinking_effort=max`"), ("low", "`thinking_effort=low`"), ("none", None)]:
        text = text_of(k3, k3_tokenizer(), user("q"), effort=effort)
        assert words in text if words else "thinking_effort" not in text


def test_what_is_no_tag_of_its_place_is_sent_at_once(k3):
    parser = k3.parser(k3.render(Conversation((user("q"),))), TOOLS)
    sent = [parser.feed([piece]) for piece in pieces_of(k3_tokenizer(), "why<|open|>x<|sep|>")]
    assert "".join(delta.text for deltas in sent for delta in deltas) == "why<|open|>x<|sep|>"
    assert not sent[-3]  # the marker may yet begin a tag


def test_a_reply_of_k3_may_be_cut_in_a_tag(k3):
    written = f"w{THOUGHT}hi<|close|>resp"
    parsed = parse(k3, [pieces_of(k3_tokenizer(), written)], ReplyEnd.CUT, "<|open|>think<|sep|>", TOOLS)
    assert (parsed.reasoning, parsed.text, parsed.malformed, parsed.raw_text) == ("w", "hi", False, written)
