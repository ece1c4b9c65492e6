"""Phi-4, Phi-4-reasoning, Phi-4-mini and Phi-3: no tools. Those whose vocabulary has `<think>` reason.

Phi-4-mini's template takes tools only as text in a system message, which the API does not have.
"""

from renderers.efforts import Efforts
from renderers.families.tagged import TaggedRenderer, known_ids, known_tags, needed_template
from renderers.markers import Tokenizer
from renderers.replies.json_calls import parse_json_call
from renderers.replies.tags import Framing, Tag, TagGrammar
from renderers.templates.chat_template import ChatTemplate

NAME = "phi4"
_THINK = {"<think>": Tag.THINK_OPEN, "</think>": Tag.THINK_CLOSE}
_FRAMING = Framing(after_think_open=1, before_think_close=1, after_think_close=2)
_TURNS = ("<|im_start|>user<|im_sep|>sphinx<|im_end|>", "<|user|>sphinx<|end|>", "<|user|>\nsphinx<|end|>")


def build(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """Raises `TemplateRefused`."""
    template = needed_template(NAME, template)
    tags = known_tags(template, _THINK)
    ends = template.turn_end_ids | known_ids(template.added.id_of("<|endoftext|>"), tokenizer.eos_token_id)
    grammar = TagGrammar(tags | dict.fromkeys(ends, Tag.END), parse_json_call, framing=_FRAMING)
    # No template has a switch: a model that reasons always does.
    efforts: Efforts = {True: {}} if tags else {}
    return TaggedRenderer(NAME, template, headers=[], grammar=grammar, efforts=efforts, supports_tools=False)


def recognises(template: ChatTemplate) -> bool:
    """Whether the template writes one of these turns, of markers."""
    has_markers = template.has_markers("<|im_start|>", "<|im_sep|>", "<|im_end|>") or template.has_markers(
        "<|user|>", "<|assistant|>", "<|end|>"
    )
    return has_markers and any(turn in template.user_text for turn in _TURNS)
