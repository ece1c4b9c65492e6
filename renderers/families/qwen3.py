"""Qwen3 and related models: ChatML, `<think>` blocks, tool calls as JSON in `<tool_call>` (Qwen3, Qwen3-VL, the 2507
models).

The template tells what a model can do. If it closes the think block when thinking is switched off, the model is a
hybrid. If it opens the block, the model always reasons. Otherwise it never does.
"""

from collections.abc import Sequence

from renderers.base import RenderedPrompt, RenderError, TemplateRefused
from renderers.families.generic import refuse_effort
from renderers.markers import Tokenizer
from renderers.messages import Conversation, Effort, Tool
from renderers.replies.tags import Start, Tag, TagGrammar, TagParser
from renderers.templates.chat_template import PROBE_CALL, PROBE_USER, ChatTemplate
from renderers.tools import parse_name_and_arguments

_THINK = {"<think>": Tag.THINK_OPEN, "</think>": Tag.THINK_CLOSE}
_CALL = {"<tool_call>": Tag.CALL_OPEN, "</tool_call>": Tag.CALL_CLOSE}
_TURN_END = "<|im_end|>"
_TEXT_END = "<|endoftext|>"
_HEADER = "<|im_start|>assistant\n"


class Qwen3Renderer:
    """The tags are markers of the vocabulary. A model without the think tags (Qwen2.5) never reasons."""

    name = "qwen3"
    supports_tools = True
    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        if template is None:
            raise TemplateRefused(f"The model has no chat template, and the renderer {self.name!r} needs one.")
        self._template = template
        end = template.added.id_of(_TURN_END)
        if end is None:
            raise TemplateRefused(f"The renderer {self.name!r} needs the special token {_TURN_END!r}.")
        ends = (end, template.added.id_of(_TEXT_END), tokenizer.eos_token_id)
        self.stop_token_ids = frozenset(token_id for token_id in ends if token_id is not None)
        self._grammar = self._make_grammar()
        self._efforts = self._find_efforts()

    def _make_grammar(self) -> TagGrammar:
        ids = {spelling: self._template.added.id_of(spelling) for spelling in _THINK | _CALL}
        missing = [spelling for spelling in _CALL if ids[spelling] is None]
        if missing:
            raise TemplateRefused(
                f"The renderer {self.name!r} needs the token {missing[0]!r}; "
                f"{Qwen3TextRenderer.name!r} finds it in ordinary text."
            )
        by_id = {token_id: (_THINK | _CALL)[spelling] for spelling, token_id in ids.items() if token_id is not None}
        return TagGrammar(by_id | dict.fromkeys(self.stop_token_ids, Tag.END), {}, parse_name_and_arguments)

    def _find_efforts(self) -> tuple[Effort, ...]:
        by_default = self._start(self._prefill())
        switched_off = self._start(self._prefill(enable_thinking=False))
        if switched_off is Start.REASONED and by_default is not Start.REASONED:
            return (True, False, "none")
        return () if by_default in (Start.TEXT, Start.REASONED) else (True,)

    def _prefill(self, **variables: object) -> str:
        try:
            return _after_header(self._template.render(PROBE_USER, **variables).text)
        except RenderError:
            return ""

    def check_effort(self, effort: Effort | None) -> None:
        if not self._efforts:
            refuse_effort(effort)
        # 1 equals True in Python, and is not accepted for it.
        elif effort is not None and not any(type(effort) is type(known) and effort == known for known in self._efforts):
            accepted = ", ".join("none" if known == "none" else str(known).lower() for known in self._efforts)
            raise RenderError(f"reasoning_effort: this model takes {accepted}, got {effort!r}.", "reasoning_effort")

    def render(self, conversation: Conversation) -> RenderedPrompt:
        self.check_effort(conversation.effort)
        variables: dict[str, object] = {}
        if conversation.effort is not None:
            variables["enable_thinking"] = conversation.effort is True
        rendered = self._template.render(conversation, **variables)
        return RenderedPrompt(rendered.token_ids, _after_header(rendered.text))

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> TagParser:
        return TagParser(self._grammar, self._start(prompt.prefill))

    @staticmethod
    def _start(prefill: str) -> Start:
        tag = prefill.rstrip("\n")
        if tag.endswith("</think>"):
            return Start.REASONED
        if tag.endswith("<think>"):
            return Start.REASONING if prefill != tag else Start.REASONING_UNFRAMED
        return Start.TEXT


class Qwen3TextRenderer(Qwen3Renderer):
    """The same format from a model whose vocabulary lacks the tags: they are characters in ordinary text."""

    name = "qwen3_text"

    def _make_grammar(self) -> TagGrammar:
        return TagGrammar(dict.fromkeys(self.stop_token_ids, Tag.END), _THINK | _CALL, parse_name_and_arguments)


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its vocabulary has the tokens, and its template writes calls in this form.

    (Qwen3.5 has the same tokens and another form.)
    """
    if any(template.added.id_of(token) is None for token in (_TURN_END, *_CALL)):
        return False
    try:
        text = template.render(PROBE_CALL).text
    except RenderError:
        return False
    return '<tool_call>\n{"name": "judge", "arguments": {"stone": "onyx"}}\n</tool_call>' in text


def _after_header(text: str) -> str:
    """The text with which the prompt already starts the assistant's reply."""
    return text[text.rindex(_HEADER) + len(_HEADER) :] if _HEADER in text else ""
