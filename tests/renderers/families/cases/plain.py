"""Families whose replies have no structure."""

from tests.renderers.families.case import Case, Mode
from tests.support.renderer_kit import chatml_tokenizer, qwen_tokenizer

CASES = [
    Case(
        name="generic",
        family="generic",
        tokenizer=qwen_tokenizer,
        template="qwen3",
        modes=(Mode(None, reasons=False, write=lambda reply: f"{reply.text}<|im_end|>"),),
        end="<|im_end|>",
        parts=("<think>", "</think>", "<tool_call>", "a\n", " "),
        reads=("</think>", "<tool_response>"),
        recognised=False,
        takes_tools=False,
    ),
    Case(
        name="role_colon",
        family="role_colon",
        tokenizer=chatml_tokenizer,
        template=None,
        modes=(Mode(None, reasons=False, write=lambda reply: f" {reply.text}<|im_end|>"),),
        end="<|im_end|>",
        parts=(" ", "a", "\n", "User:", "<|im_end|>"),
        recognised=False,
        takes_tools=False,
        template_takes_tools=False,
    ),
]
