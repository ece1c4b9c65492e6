"""Llama 3: all replies are text."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode
from tests.support.renderer_kit import family_tokenizer

END = "<|eot_id|>"
SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", END,
    "<|python_tag|>",
]  # fmt: skip


@cache
def llama3_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer(SPECIAL, eos=END, bos="<|begin_of_text|>")


def llama3(name: str) -> Case:
    return Case(
        name=name,
        family="llama3",
        tokenizer=llama3_tokenizer,
        template=name,
        modes=(Mode(None, reasons=False, write=lambda reply: f"{reply.text}{END}"),),
        end=END,
        parts=('{"name": "now", "parameters": {}}', "<|python_tag|>", "now.call()", "<think>", "\n", " "),
        takes_tools=False,
        template_takes_tools=False,
    )


CASES = [llama3("llama3"), llama3("llama3_1"), llama3("llama3_2")]
