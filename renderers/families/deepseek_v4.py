"""DeepSeek V3.2 and V4: calls in DSML, at the end of a reply.

The template tells what a model can do: which efforts it knows, and how it spells the block of calls.
"""

from collections.abc import Sequence

from renderers.base import RenderedPrompt, RenderError, TemplateRefused
from renderers.efforts import Efforts, switch
from renderers.families.tagged import TaggedRenderer, known_ids, needed_id, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Tool
from renderers.replies.dsml import MARKER, DsmlForm, DsmlLexer, dsml_grammar
from renderers.replies.lexed import LexedParser
from renderers.templates.chat_template import PROBE_USER, ChatTemplate

NAME = "deepseek_v4"
_HEADERS = ("<｜Assistant｜>", "</function_results>\n\n")
"""A reply to the result of a call has no token for its role in V3.2."""
_TURN_END = "<｜end▁of▁sentence｜>"
_FORMS = (DsmlForm("tool_calls"), DsmlForm("function_calls"))


class DeepSeekV4Renderer(TaggedRenderer):
    """Thinking is switched on and off by the template, and must be closed in a reply."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        template = needed_template(NAME, template)
        form = _find_form(template)
        if form is None:
            raise TemplateRefused(f"The renderer {NAME!r} needs a chat template that writes calls in DSML.")
        self._form = form
        end, self._marker_id, *_ = [
            needed_id(NAME, template, spelling) for spelling in (_TURN_END, MARKER, "<think>", "</think>")
        ]
        grammar = dsml_grammar(form, template.added, known_ids(end, tokenizer.eos_token_id))
        super().__init__(NAME, template, headers=_HEADERS, grammar=grammar, efforts=_find_efforts(template))

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> LexedParser:
        return LexedParser(DsmlLexer(self._form, self._marker_id), super().parser(prompt, tools))


def _find_form(template: ChatTemplate) -> DsmlForm | None:
    return next((form for form in _FORMS if f"<{MARKER}{form.block_name}" in template.call_text), None)


def _find_efforts(template: ChatTemplate) -> Efforts:
    """The levels are those that change the prompt; "high" is how a model with levels thinks anyway."""
    thinking = _prompt(template, thinking=True)
    if thinking == _prompt(template, thinking=False):
        return {}
    levels: Efforts = {
        level: {"thinking": True, "reasoning_effort": level}
        for level in ("low", "high", "max")
        if level == "high" or _prompt(template, thinking=True, reasoning_effort=level) != thinking
    }
    return switch("thinking") if len(levels) == 1 else {**levels, **switch("thinking")}


def _prompt(template: ChatTemplate, **variables: object) -> str:
    try:
        return template.render(PROBE_USER, **variables).text
    except RenderError:
        return ""


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its vocabulary has the tokens, and its template writes calls in DSML."""
    return template.has_markers(_TURN_END, MARKER, "<think>", "</think>") and _find_form(template) is not None
