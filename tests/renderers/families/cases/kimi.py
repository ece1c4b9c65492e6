"""Kimi K2, K2-Thinking and K2.5."""

from dataclasses import replace
from functools import cache

from jinja2.sandbox import SandboxedEnvironment
from transformers import PreTrainedTokenizerFast

from renderers.families.kimi_tools import typescript, with_sorted_keys
from renderers.messages import Conversation
from tests.renderers.families.case import Case, Mode, Reply, dump
from tests.support.renderer_kit import family_tokenizer, hf_messages, oracle_ids

END = "<|im_end|>"
SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENT, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MEDIA = [f"<|media_{name}|>" for name in ("begin", "content", "pad", "end", "start")]
ROLES = ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]
SPECIAL = ["[BOS]", "[EOS]", END, *ROLES, SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT, CALL_END, *MEDIA]
THINK = ["<think>", "</think>"]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer(SPECIAL, THINK, eos="[EOS]")


@cache
def tokenizer_without_reasoning() -> PreTrainedTokenizerFast:
    return family_tokenizer(SPECIAL, eos="[EOS]")


def write_call(call_id: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{call_id}{ARGUMENT}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return f"{SECTION_BEGIN}{''.join(calls)}{SECTION_END}"


def write_plain(reply: Reply) -> str:
    calls = [
        write_call(f"functions.{name}:{index}", dump(arguments)) for index, (name, arguments) in enumerate(reply.calls)
    ]
    return reply.text + (section(*calls) if calls else "") + END


def write(reply: Reply) -> str:
    return f"<think>{write_after_open_block(reply)}"


def write_after_open_block(reply: Reply) -> str:
    return f"{reply.reasoning}</think>{write_plain(reply)}"


def sorted_tools(conversation: Conversation) -> Conversation:
    tools = tuple(replace(tool, declared=with_sorted_keys(tool.declared)) for tool in conversation.tools)
    return replace(conversation, tools=tools)


def k2_oracle_ids(made: PreTrainedTokenizerFast, source: str, conversation: Conversation, **fields) -> list[int]:
    return oracle_ids(made, source, sorted_tools(conversation), **fields)


def k2_queue_oracle_ids(
    made: PreTrainedTokenizerFast, source: str, conversation: Conversation, *, arguments_as_text: bool
) -> list[int]:
    """transformers' sandbox refuses these templates, since they append to a list: another sandbox that does not."""
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = dump
    text = environment.from_string(source).render(
        messages=hf_messages(conversation, arguments_as_text=arguments_as_text),
        tools=[tool.declared for tool in sorted_tools(conversation).tools] or None,
        add_generation_prompt=True,
    )
    return made.backend_tokenizer.encode(text, add_special_tokens=False).ids


def k2_5_oracle_ids(made: PreTrainedTokenizerFast, source: str, conversation: Conversation, **fields) -> list[int]:
    return oracle_ids(made, source, sorted_tools(conversation), tools_ts_str=typescript(conversation.tools), **fields)


NOW = ("now", "{}")
CALL = section(write_call("functions.now:0", "{}"))
BROKEN = {
    "bad JSON": write_call("functions.now:0", "{oops}"),
    "arguments that are a list": write_call("functions.now:0", "[]"),
    "no arguments": write_call("functions.now:0", ""),
    "no argument marker": f"{CALL_BEGIN}functions.now:0{{}}{CALL_END}",
    "an id without a number": write_call("functions.now", "{}"),
    "an id of another form": write_call("call_1", "{}"),
    "an id without a name": write_call("functions.:0", "{}"),
    "an id in spaces": write_call(" functions.now:0 ", "{}"),
    "space before a call": f"\n{write_call('functions.now:0', '{}')}",
    "space after a call": f"{write_call('functions.now:0', '{}')} ",
    "no call": "",
    "an unclosed call": f"{CALL_BEGIN}functions.now:0{ARGUMENT}{{}}",
    "a call inside a call": f"{CALL_BEGIN}{write_call('functions.now:0', '{}')}",
}
CALLS_MALFORMED = {
    **{
        name: (f"x{SECTION_BEGIN}{calls}{SECTION_END}y{END}", "", f"x{SECTION_BEGIN}{calls}{SECTION_END}y", [])
        for name, calls in BROKEN.items()
    },
    "an unclosed section": (f"x{CALL[: -len(SECTION_END)]}{END}", "", f"x{CALL[: -len(SECTION_END)]}", []),
    "text after the section": (f"{CALL}x{END}", "", "x", [NOW]),
    "a second section": (f"{CALL}{CALL}{END}", "", CALL, [NOW]),
    "a stray end of a section": (f"x{SECTION_END}{END}", "", f"x{SECTION_END}", []),
    "a stray call": (f"x{write_call('functions.now:0', '{}')}{END}", "", f"x{write_call('functions.now:0', '{}')}", []),
    "tokens after the end": (f"hi{END}x{END}", "", f"hi{END}x", []),
    "nothing": (END, "", "", []),
}
MALFORMED = {
    **CALLS_MALFORMED,
    "a stray end of reasoning": (f"hi</think>x{END}", "", "hi</think>x", []),
    "reasoning inside reasoning": (f"<think>a<think>b</think>c{END}", "a", "<think>b</think>c", []),
}
PARTS = (
    SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT, CALL_END, "functions.now:0", "{}", "\n", " <", "a", "👍🏽",
    "<|im_user|>", CALL, section(write_call("functions.forecast:3", '{"city": "日"}')),
    section(write_call("functions.elsewhere:0", "{}")),
)  # fmt: skip
SWITCH = {True: {"thinking": True}, False: {"thinking": False}, "none": {"thinking": False}}


def k2(name: str, **fields) -> Case:
    given = {
        "name": name,
        "family": "kimi_k2",
        "tokenizer": tokenizer_without_reasoning,
        "template": name,
        "modes": (Mode(None, reasons=False, write=write_plain),),
        "end": END,
        "malformed": CALLS_MALFORMED,
        "parts": PARTS,
        "oracle": k2_queue_oracle_ids,
    }
    return Case(**given | fields)


# --- K3 ---

END_3 = "<|end_of_msg|>"


def opened(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def closed(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def kind_of(value: object) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def write_call_3(name: str, arguments: dict[str, object], index: int = 1) -> str:
    written = "".join(
        opened(f'argument key="{key}" type="{kind_of(value)}"')
        + (value if isinstance(value, str) else dump(value))
        + closed("argument")
        for key, value in arguments.items()
    )
    return opened(f'call tool="{name}" index="{index}"') + written + closed("call")


def calls_3(*calls: str) -> str:
    return opened("tools") + "".join(calls) + closed("tools")


def write_3_plain(reply: Reply) -> str:
    calls = [write_call_3(*call, index) for index, call in enumerate(reply.calls, 1)]
    return reply.text + closed("response") + (calls_3(*calls) if calls else "") + closed("message") + END_3


def write_3(reply: Reply) -> str:
    return f"{reply.reasoning}{THOUGHT}{write_3_plain(reply)}"


THOUGHT = closed("think") + opened("response")
NOW_3 = calls_3(write_call_3("now", {}))
HI_3 = f"w{THOUGHT}hi{closed('response')}"
CLOSED_3 = closed("message")
ENDED_3 = CLOSED_3 + END_3
BROKEN_3 = {
    "no call": "",
    "text outside calls": f"a{write_call_3('now', {})}",
    "text after a call": f"{write_call_3('now', {})}\n",
    "text outside arguments": write_call_3("now", {}).replace("<|close|>", "a<|close|>"),
    "a call without a name": write_call_3("", {}),
    "a call without an index": opened('call tool="now"') + closed("call"),
    "an argument outside a call": opened('argument key="city" type="string"') + closed("argument"),
    "an argument without a type": write_call_3("now", {"a": "b"}).replace(' type="string"', ""),
    "bad JSON": write_call_3("now", {"a": 1}).replace(">1<", ">{oops}<"),
    "a value of another type": write_call_3("now", {"a": 1}).replace(">1<", ">true<"),
    "an unclosed call": opened('call tool="now" index="1"'),
    "an object that is none": opened('call tool="now" index="1"')
    + opened('json type="object"')
    + "[]"
    + closed("json")
    + closed("call"),
}
STRAY_3 = f"hi<|open|><|close|>{closed('response')}"
MALFORMED_3 = {
    **{
        name: (f"{HI_3}{calls_3(calls)}{ENDED_3}", "w", f"hi{calls_3(calls)}{CLOSED_3}", [])
        for name, calls in BROKEN_3.items()
    },
    "no end of reasoning": (f"w{END_3}", "w", "", []),
    "no end of the response": (f"w{THOUGHT}hi{END_3}", "w", "hi", []),
    "no end of the message": (f"{HI_3}{END_3}", "w", "hi", []),
    "no response": (f"w{closed('think')}hi{END_3}", "w", "hi", []),
    "calls in the response": (f"w{THOUGHT}hi{NOW_3}{END_3}", "w", f"hi{NOW_3}", []),
    "text after the response": (f"{HI_3}x{ENDED_3}", "w", f"hix{CLOSED_3}", []),
    "text after the calls": (f"{HI_3}{NOW_3}x{ENDED_3}", "w", f"hix{CLOSED_3}", [NOW]),
    "two blocks of calls": (f"{HI_3}{NOW_3}{NOW_3}{ENDED_3}", "w", f"hi{NOW_3}{CLOSED_3}", [NOW]),
    "unclosed calls": (f"{HI_3}{NOW_3[:-7]}{END_3}", "w", f"hi{NOW_3[:-7]}", []),
    "an unknown tag": (f"w{THOUGHT}hi{opened('other')}{END_3}", "w", f"hi{opened('other')}", []),
    "part of a tag": (f"w{THOUGHT}hi<|open|>to{END_3}", "w", "hi<|open|>to", []),
    "a stray marker": (f"w{THOUGHT}hi<|open|><|close|>{closed('response')}{END_3}", "w", STRAY_3, []),
    "tokens after the end": (f"{HI_3}{ENDED_3}x{END_3}", "w", f"hi{END_3}x", []),
    "nothing": (END_3, "", "", []),
}
PARTS_3 = (
    "<|open|>", "<|close|>", "<|sep|>", "think", "response", "tools", closed("think"), THOUGHT, closed("response"),
    closed("message"), NOW_3, calls_3(write_call_3("forecast", {"city": "日"})), "a", "\n", "👍🏽",
    calls_3(write_call_3("elsewhere", {})),
)  # fmt: skip
EFFORTS_3 = {**{level: {"thinking_effort": level} for level in ("low", "high", "max")}, **SWITCH}


@cache
def k3_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer(["[BOS]", "[EOS]", "<|open|>", "<|close|>", "<|sep|>", END_3], eos="[EOS]")


CASES = [
    Case(
        name="kimi_k3",
        family="kimi_k3",
        tokenizer=k3_tokenizer,
        template="kimi_k3",
        modes=(
            Mode(None, reasons=True, write=write_3),
            Mode("low", reasons=True, write=write_3),
            Mode("none", reasons=False, write=write_3_plain),
        ),
        end=END_3,
        efforts=EFFORTS_3,
        malformed=MALFORMED_3,
        parts=PARTS_3,
    ),
    k2("kimi_k2", oracle=k2_oracle_ids),
    k2("kimi_k2_instruct"),
    k2(
        "kimi_k2_thinking",
        tokenizer=tokenizer,
        modes=(Mode(None, reasons=True, write=write),),
        malformed=MALFORMED,
        parts=(*PARTS, *THINK),
    ),
    k2(
        "kimi_k2_5",
        tokenizer=tokenizer,
        modes=(
            Mode(None, reasons=True, write=write_after_open_block),
            Mode(False, reasons=False, write=write_plain),
        ),
        efforts=SWITCH,
        malformed={
            "nothing": (END, "", "", []),
            "text after the section": (f"w</think>{CALL}x{END}", "w", "x", [NOW]),
            "reasoning inside reasoning": (f"a<think>b</think>c{END}", "a", "<think>b</think>c", []),
        },
        parts=(*PARTS, *THINK),
        oracle=k2_5_oracle_ids,
    ),
]
