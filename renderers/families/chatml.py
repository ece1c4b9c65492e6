"""What the families have in common whose turns are `<|im_start|>role\\n…<|im_end|>` and whose tags are Qwen's."""

from renderers.efforts import Efforts
from renderers.families import tagged
from renderers.families.tagged import known_ids, needed_id
from renderers.markers import Tokenizer
from renderers.replies.tags import Tag
from renderers.templates.chat_template import ChatTemplate

HEADER = "<|im_start|>assistant\n"
TURN_END = "<|im_end|>"
TEXT_END = "<|endoftext|>"
CALL_TAGS = {"<tool_call>": Tag.CALL_OPEN, "</tool_call>": Tag.CALL_CLOSE}
TAGS = {"<think>": Tag.THINK_OPEN, "</think>": Tag.THINK_CLOSE, **CALL_TAGS}
JSON_CALL = '<tool_call>\n{"name": "judge", "arguments": {"stone": "onyx"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=judge>\n<parameter=stone>\nonyx\n</parameter>\n</function>\n</tool_call>"
"""What templates make of the call in `PROBE_CALL`."""


def end_ids(name: str, tokenizer: Tokenizer, template: ChatTemplate) -> dict[int, Tag]:
    """The end tokens. Raises `TemplateRefused`."""
    turn_end = needed_id(name, template, TURN_END)
    return dict.fromkeys(known_ids(turn_end, template.added.id_of(TEXT_END), tokenizer.eos_token_id), Tag.END)


def find_efforts(template: ChatTemplate) -> Efforts:
    """What the template does with `enable_thinking`: it decides, or the model always reasons, or never."""
    return tagged.find_efforts(template, [HEADER], "enable_thinking")
