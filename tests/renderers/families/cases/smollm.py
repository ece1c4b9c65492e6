"""SmolLM2 and SmolLM3."""

from dataclasses import replace
from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode
from tests.renderers.families.cases import qwen
from tests.support.renderer_kit import chatml_tokenizer, family_tokenizer

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]


@cache
def smollm3_tokenizer() -> PreTrainedTokenizerFast:
    markers = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<code>",
        "</code>",
    ]
    return family_tokenizer(SPECIAL, markers, eos="<|im_end|>", bos="<|begin_of_text|>")


CASES = [
    Case(
        name="smollm2",
        family="smollm2",
        tokenizer=chatml_tokenizer,
        template="smollm2",
        modes=(Mode(None, reasons=False, write=lambda reply: f"{reply.text}<|im_end|>"),),
        end="<|im_end|>",
        parts=("<think>", "<tool_call>", "<|im_start|>", "\n", " "),
        takes_tools=False,
        template_takes_tools=False,
    ),
    qwen.qwen3(
        "smollm3",
        family="smollm3",
        tokenizer=smollm3_tokenizer,
        reads=(),
        template_takes_tools=False,
        modes=tuple(replace(mode, keeps_calls=False) for mode in qwen.HYBRID),  # the template shows no calls
    ),
]
