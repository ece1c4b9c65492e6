"""Qwen2.5 and Qwen3."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode, Reply, dump
from tests.support.renderer_kit import QWEN_SPECIAL, chatml_tokenizer, family_tokenizer, qwen_tokenizer

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW = ("now", "{}")


@cache
def qwen2_5_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer(QWEN_SPECIAL, ["<tool_call>", "</tool_call>"], eos=END)


def write_call(name: str, arguments: dict[str, object]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {dump(arguments)}}}\n</tool_call>'


def write_plain(reply: Reply) -> str:
    return "\n".join([reply.text] * bool(reply.text) + [write_call(*call) for call in reply.calls]) + END


def write(reply: Reply) -> str:
    reasoning = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    return reasoning + write_plain(reply)


def write_after_open_block(reply: Reply) -> str:
    return f"{reply.reasoning}\n</think>\n\n{write_plain(reply)}"


SWITCH = {True: {"enable_thinking": True}, False: {"enable_thinking": False}, "none": {"enable_thinking": False}}
HYBRID = (Mode(None, reasons=True, write=write), Mode(False, reasons=False, write=write_plain, keeps_calls=False))
READS = ("</think>", "<tool_response>", "</tool_response>")
PARTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "\n", "\n\n", "a", " <", "<t", "👍🏽",
    '{"name": "forecast", "arguments": {"city": "日"}}', CALL, "<think>\nwhy\n</think>\n\n",
    '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
)  # fmt: skip
BROKEN_CALLS = {
    "bad JSON": "{oops}",
    "no name": '{"arguments": {}}',
    "arguments that are text": '{"name": "now", "arguments": "{}"}',
    "arguments that are a list": '{"name": "now", "arguments": []}',
}
MALFORMED_CALLS = {
    **{
        name: (f"x\n<tool_call>\n{body}\n</tool_call>y{END}", "", f"x\n<tool_call>\n{body}\n</tool_call>y", [])
        for name, body in BROKEN_CALLS.items()
    },
    "an unclosed call": (f"{CALL}\n<tool_call>\n{{}}{END}", "", "\n<tool_call>\n{}", [NOW]),
    "a stray end of a call": (f"hi\n</tool_call>{END}", "", "hi\n</tool_call>", []),
    "a call inside a call": (f"<tool_call>{CALL}{END}", "", f"<tool_call>{CALL}", []),
    "tokens after the end": (f"hi{END}x{END}", "", f"hi{END}x", []),
    "nothing": (END, "", "", []),
}
MALFORMED = {
    **MALFORMED_CALLS,
    "a stray end of reasoning": (f"hi</think>x{END}", "", "hi</think>x", []),
    "reasoning inside reasoning": (f"<think>\na<think>b</think>c{END}", "a", "<think>b</think>c", []),
    "a call inside reasoning": (f"<think>\na\n{CALL}\n</think>{END}", "a\n", f"{CALL}\n</think>", []),
}


def qwen3(name: str, **fields) -> Case:
    given = {
        "name": name,
        "family": "qwen3",
        "tokenizer": qwen_tokenizer,
        "template": name,
        "modes": HYBRID,
        "end": END,
        "efforts": SWITCH,
        "malformed": MALFORMED,
        "parts": PARTS,
        "reads": READS,
    }
    return Case(**{**given, **fields})


CASES = [
    qwen3("qwen3"),
    qwen3("qwen3_vl", modes=(Mode(None, reasons=False, write=write_plain),), efforts={}),
    qwen3("qwen3_instruct_2507", modes=(Mode(None, reasons=False, write=write_plain),), efforts={}),
    qwen3(
        "qwen2_5",
        family="qwen2_5",
        tokenizer=qwen2_5_tokenizer,
        modes=(Mode(None, reasons=False, write=write_plain),),
        efforts={},
        malformed=MALFORMED_CALLS,
    ),
    qwen3(
        "qwen3_text",
        family="qwen3_text",
        tokenizer=chatml_tokenizer,
        template="qwen3",
        recognised=False,
        markers_are_tokens=False,
        malformed={name: MALFORMED[name] for name in ("tokens after the end", "nothing")},
    ),
]
