"""Nemotron 3 and 3.5."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode, Reply
from tests.renderers.families.cases.qwen import SWITCH
from tests.renderers.families.cases.qwen3_5 import BROKEN_CALLS, CALL, MALFORMED, NOW, PARTS, write_call
from tests.support.renderer_kit import family_tokenizer

END = "<|im_end|>"


@cache
def nemotron_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<unk>", "</s>", "<|im_start|>", END, "<think>", "</think>", "<tool_call>", "</tool_call>"]
    return family_tokenizer(special, eos=END)


def write_plain(reply: Reply) -> str:
    calls = "".join(f"{write_call(*call)}\n" for call in reply.calls)
    return reply.text + "\n" * bool(calls) + calls + END


def write(reply: Reply) -> str:
    """Nano and Super."""
    return f"{reply.reasoning}\n</think>" + "\n" * bool(reply.text) + write_plain(reply)


def write_closely(reply: Reply) -> str:
    """Ultra and 3.5."""
    return f"{reply.reasoning}</think>{write_plain(reply)}"


CLOSELY = {
    "a broken call": (f"why</think>x\n<tool_call>\n</tool_call>{END}", "why", "x\n<tool_call>\n</tool_call>", []),
    "a second call that is broken": (
        f"</think>{CALL}\n<tool_call>\n</tool_call>{END}",
        "",
        "<tool_call>\n</tool_call>",
        [NOW],
    ),
    "a second beginning of reasoning": MALFORMED["a second beginning of reasoning"],
    "nothing": MALFORMED["nothing"],
}
WITH_NEWLINES = {
    name: (text.replace("</think>\n\n", "</think>\n"), *parts) for name, (text, *parts) in BROKEN_CALLS.items()
}


def nemotron3(name: str, writer, **fields) -> Case:
    given = {
        "name": name,
        "family": "nemotron3",
        "tokenizer": nemotron_tokenizer,
        "template": name,
        "modes": (
            Mode(None, reasons=True, write=writer, keeps_empty_reasoning=False),
            Mode(False, reasons=False, write=write_plain),
        ),
        "end": END,
        "efforts": SWITCH,
        "malformed": CLOSELY,
        "parts": PARTS,
        "reads": ("<think>", "</think>"),
    }
    return Case(**{**given, **fields})


CASES = [
    nemotron3("nemotron_3_nano", write, malformed=WITH_NEWLINES),
    nemotron3("nemotron_3_super", write, malformed=WITH_NEWLINES, efforts={"low": {"low_effort": True}, **SWITCH}),
    nemotron3("nemotron_3_ultra", write_closely, efforts={"medium": {"medium_effort": True}, **SWITCH}),
    nemotron3("nemotron_3_5_lightning", write_closely),
]
