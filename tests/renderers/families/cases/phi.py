"""Phi-4 and its relatives."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode, Reply
from tests.support.renderer_kit import family_tokenizer

END = "<|im_end|>"
MINI_END = "<|end|>"
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", END]


@cache
def phi4_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer(CHATML, eos=END)


@cache
def phi4_reasoning_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer([*CHATML, "<think>", "</think>"], eos=END)


@cache
def phi4_mini_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", MINI_END, "<|tool|>", "<|/tool|>"]
    return family_tokenizer(special, eos="<|endoftext|>")


def write_reasoning(reply: Reply) -> str:
    return (f"<think>{reply.reasoning}</think>\n\n" if reply.reasoning else "") + reply.text + END


def phi4(name: str, tokenizer, mode: Mode, **fields) -> Case:
    given = {
        "name": name,
        "family": "phi4",
        "tokenizer": tokenizer,
        "template": name,
        "modes": (mode,),
        "end": END,
        "parts": ("<think>", "</think>", "<|im_start|>", "<|user|>", "why", "\n", " "),
        "malformed": {"tokens after the end": (f"hi{END}x{END}", "", f"hi{END}x", []), "nothing": (END, "", "", [])},
        "takes_tools": False,
        "template_takes_tools": False,
    }
    return Case(**{**given, **fields})


MALFORMED_REASONING = {
    "a stray end of reasoning": (f"hi</think>x{END}", "", "hi</think>x", []),
    "reasoning inside reasoning": (f"<think>a<think>b{END}", "a", "<think>b", []),
}

CASES = [
    phi4("phi4", phi4_tokenizer, Mode(None, reasons=False, write=lambda reply: f"{reply.text}{END}")),
    phi4(
        "phi4_reasoning",
        phi4_reasoning_tokenizer,
        Mode(None, reasons=True, write=write_reasoning),
        efforts={True: {}},
        malformed=MALFORMED_REASONING,
    ),
    phi4(
        "phi4_mini",
        phi4_mini_tokenizer,
        Mode(None, reasons=False, write=lambda reply: f"{reply.text}{MINI_END}"),
        end=MINI_END,
        malformed={},
    ),
]
