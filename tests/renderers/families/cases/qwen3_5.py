"""Qwen3.5, 3.6 and 3.8."""

import json
from collections.abc import Callable
from functools import partial

from tests.renderers.families.case import Case, Mode, Reply
from tests.renderers.families.cases.qwen import SWITCH
from tests.support.renderer_kit import qwen_tokenizer

END = "<|im_end|>"
CALL = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
NOW = ("now", "{}")


def write_call(name: str, arguments: dict[str, object], spell: Callable[[object], str] = str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{_text(value, spell)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _text(value: object, spell: Callable[[object], str]) -> str:
    """`spell`: of numbers, booleans and null. Qwen3.5's template and Nemotron's have them as Python does."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else spell(value)


def write_plain(reply: Reply, spell: Callable[[object], str] = str) -> str:
    calls = "\n".join(write_call(*call, spell) for call in reply.calls)
    return "\n\n".join(part for part in (reply.text, calls) if part) + END


def write(reply: Reply, spell: Callable[[object], str] = str) -> str:
    return f"{reply.reasoning}\n</think>\n\n{write_plain(reply, spell)}"


def broken(body: str, *, closed: bool = True) -> tuple[str, str, str, list[tuple[str, str]]]:
    block = f"<tool_call>\n{body}" + "\n</tool_call>y" * closed
    return f"why\n</think>\n\nx\n{block}{END}", "why", f"x\n{block}", []


BROKEN_CALLS = {
    "JSON": broken('{"name": "now", "arguments": {}}'),
    "no function": broken("now"),
    "a function without a name": broken("<function=>\n</function>"),
    "an unclosed function": broken("<function=now>"),
    "an unclosed parameter": broken("<function=now>\n<parameter=a>\n1\n</function>"),
    "junk before": broken("junk <function=now>\n</function>"),
    "junk inside": broken("<function=now>\njunk\n</function>"),
    "junk after": broken("<function=now>\n</function>\njunk"),
    "junk between": broken("<function=now>\n<parameter=a>\n1\n</parameter>\njunk\n</function>"),
    "two functions": broken("<function=now>\n</function>\n<function=now>\n</function>"),
    "an unclosed call": broken("<function=now>\n</function>", closed=False),
}
MALFORMED = {
    **BROKEN_CALLS,
    "a second call that is broken": (
        f"\n</think>\n\n{CALL}\n<tool_call>\n</tool_call>{END}",
        "",
        "\n<tool_call>\n</tool_call>",
        [NOW],
    ),
    "a second beginning of reasoning": (f"<think>\nwhy\n</think>\n\nhi{END}", "", "<think>\nwhy\n</think>\n\nhi", []),
    "a call inside reasoning": (f"why\n{CALL}{END}", "why\n", CALL, []),
    "a stray end of reasoning": (f"\n</think>\n\nhi</think>x{END}", "", "hi</think>x", []),
    "a stray end of a call": (f"\n</think>\n\nhi\n</tool_call>{END}", "", "hi\n</tool_call>", []),
    "tokens after the end": (f"\n</think>\n\nhi{END}x{END}", "", f"hi{END}x", []),
    "nothing": (END, "", "", []),
}
PARTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "\n", "\n\n", "a", "<function=now>", "👍🏽",
    "<parameter=a>\n", "</parameter>", "</function>", CALL, "<think>\nwhy\n</think>\n\n",
    "<tool_call>\n<function=other>\n</function>\n</tool_call>",
)  # fmt: skip
IN_PYTHON = (Mode(None, reasons=True, write=write), Mode(False, reasons=False, write=write_plain))
IN_JSON = (
    Mode(None, reasons=True, write=partial(write, spell=json.dumps)),
    Mode(False, reasons=False, write=partial(write_plain, spell=json.dumps)),
)
LEVELS = {level: {"reasoning_effort": level} for level in ("low", "medium", "xhigh")}


def qwen3_5(name: str, modes: tuple[Mode, ...], **fields) -> Case:
    given = {
        "name": name,
        "family": "qwen3_5",
        "tokenizer": qwen_tokenizer,
        "template": name,
        "modes": modes,
        "end": END,
        "efforts": SWITCH,
        "malformed": MALFORMED,
        "parts": PARTS,
        "reads": ("</think>", "<tool_response>", "</tool_response>"),
    }
    return Case(**{**given, **fields})


CASES = [
    qwen3_5("qwen3_5_think", IN_PYTHON),
    qwen3_5("qwen3_5_nothink", (Mode(True, reasons=True, write=write), Mode(None, reasons=False, write=write_plain))),
    qwen3_5("qwen3_6", IN_JSON),
    qwen3_5("qwen3_8", IN_JSON, efforts={**LEVELS, **SWITCH}),
]
