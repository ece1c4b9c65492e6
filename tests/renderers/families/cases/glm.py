"""GLM-4.5, 4.6, 4.7 and 5.3."""

from dataclasses import replace
from functools import cache, partial

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode, Reply, dump
from tests.support.special_tokens import placed_tokenizer

SPECIAL = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
]  # fmt: skip
MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
PLACES = {token: 154820 + index for index, token in enumerate(SPECIAL)}
PLACES |= {token: 154841 + index for index, token in enumerate([*MARKERS, "/nothink"])}
END = "<|user|>"
NOW = ("now", "{}")
CALL = "<tool_call>now</tool_call>"


@cache
def glm_tokenizer() -> PreTrainedTokenizerFast:
    return placed_tokenizer(PLACES, eos="<|endoftext|>")


def write_call(name: str, arguments: dict[str, object], gap: str) -> str:
    written = "".join(
        f"{gap}<arg_key>{key}</arg_key>{gap}<arg_value>{value if isinstance(value, str) else dump(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"{gap}<tool_call>{name}{written}{gap}</tool_call>"


def write_plain(reply: Reply, gap: str = "") -> str:
    text = f"{gap}{reply.text}" if reply.text else ""
    return text + "".join(write_call(*call, gap) for call in reply.calls) + END


def write_opened(reply: Reply) -> str:
    return f"{reply.reasoning}</think>{write_plain(reply)}"


def write_lines(reply: Reply) -> str:
    return f"\n<think>{reply.reasoning}</think>" + write_plain(reply, "\n")


SWITCH = {True: {"enable_thinking": True}, False: {"enable_thinking": False}, "none": {"enable_thinking": False}}
LEVELS = {level: {"reasoning_effort": level} for level in ("low", "high", "max")}
BROKEN_CALLS = {
    "a call of nothing": "",
    "a key without a value": "now<arg_key>a</arg_key>",
    "a value without a key": "now<arg_value>a</arg_value>",
    "an open value": "now<arg_key>a</arg_key><arg_value>a",
    "an empty key": "now<arg_key></arg_key><arg_value>a</arg_value>",
    "text between the arguments": "now<arg_key>a</arg_key>x<arg_value>a</arg_value>",
    "text after the arguments": "now<arg_key>a</arg_key><arg_value>a</arg_value>x",
    "a value in a value": "now<arg_key>a</arg_key><arg_value>a<arg_value>b</arg_value></arg_value>",
}
BROKEN = {name: f"hi<tool_call>{body}</tool_call>y" for name, body in BROKEN_CALLS.items()} | {
    "a call in a call": f"<tool_call>{CALL}</tool_call>",
    "reasoning in a call": "<tool_call>now<think>a</think></tool_call>",
    "an unclosed call": "hi<tool_call>now",
    "a stray end of a call": "hi</tool_call>",
    "a stray argument": "hi<arg_key>a</arg_key>",
    "a second end of reasoning": "hi</think>",
    "tokens after the end": f"hi{END}x",
}
MALFORMED = {name: (f"why</think>{text}{END}", "why", text, []) for name, text in BROKEN.items()} | {
    "a call in reasoning": (f"why {CALL}</think>hi{END}", "why ", f"{CALL}</think>hi", []),
    "reasoning begun twice": (f"<think>why</think>hi{END}", "", "<think>why</think>hi", []),
    "a call after a call that is broken": (
        f"why</think>{CALL} <tool_call></tool_call>{CALL}{END}",
        "why",
        f"<tool_call></tool_call>{CALL}",
        [NOW],
    ),
    "nothing": (END, "", "", []),
}
PARTS = (
    *MARKERS, "<|system|>", "<|assistant|>", "<|observation|>", "\n", " ", "a", "now", "<", "👍🏽", CALL,
    "<tool_call>forecast<arg_key>city</arg_key><arg_value>日</arg_value></tool_call>", "<tool_call>other</tool_call>",
)  # fmt: skip

# A reply that calls ends with <|observation|> in a history, and here with <|user|>: see test_glm.
OPENED = Mode(None, reasons=True, write=write_opened, keeps_calls=False)
LOW = replace(OPENED, effort="low")
OFF = Mode(False, reasons=False, write=write_plain, keeps_calls=False)
WITH_LINES = replace(OPENED, write=write_lines)
OFF_WITH_LINES = replace(OFF, write=partial(write_plain, gap="\n"))

CASES = [
    Case(
        name=name,
        family="glm",
        tokenizer=glm_tokenizer,
        template=name,
        modes=modes,
        end=END,
        efforts=efforts,
        malformed=malformed,
        parts=PARTS,
        reads=("</think>", "/nothink"),
    )
    for name, modes, efforts, malformed in [
        ("glm4_5", (WITH_LINES, OFF_WITH_LINES), SWITCH, {}),
        ("glm4_6", (WITH_LINES, OFF_WITH_LINES), SWITCH, {}),
        ("glm4_7", (OPENED, OFF), SWITCH, MALFORMED),
        ("glm5_3", (OPENED, LOW), LEVELS, MALFORMED),
    ]
]
