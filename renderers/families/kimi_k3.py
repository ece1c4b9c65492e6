"""Kimi K3: replies in XTML, with reasoning, a response and calls in tags of their own."""

from collections.abc import Sequence

from renderers.base import RenderedPrompt
from renderers.efforts import Efforts, switch
from renderers.families.tagged import TaggedRenderer, known_ids, needed_id, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Tool
from renderers.replies.lexed import LexedParser
from renderers.replies.tags import Start, Tag, TagGrammar, TagParser
from renderers.replies.xtml import CLOSE, OPEN, RESPONSE, SEP, THINK, XTML_TAGS, XtmlLexer, parse_calls
from renderers.templates.chat_template import ChatTemplate

NAME = "kimi_k3"
_HEADER = f'{OPEN}message role="assistant"{SEP}'
_TURN_END = "<|end_of_msg|>"
_EFFORTS: Efforts = {**{level: {"thinking_effort": level} for level in ("low", "high", "max")}, **switch("thinking")}


class KimiK3Renderer(TaggedRenderer):
    """The prompt begins the reasoning, or the response of a model that must not reason."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        template = needed_template(NAME, template)
        end, *_ = [needed_id(NAME, template, spelling) for spelling in (_TURN_END, OPEN, CLOSE, SEP)]
        ends = known_ids(end, tokenizer.eos_token_id)
        grammar = TagGrammar(
            XTML_TAGS | dict.fromkeys(ends, Tag.END),
            parse_calls,
            text_in_reasoning=frozenset((Tag.CALL_PART,)),
            must_close_reasoning=True,
            calls_come_last=True,
        )
        super().__init__(NAME, template, headers=[_HEADER], grammar=grammar, efforts=_EFFORTS)

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> LexedParser:
        reasons = prompt.prefill == f"{OPEN}{THINK}{SEP}"
        parser = TagParser(self._grammar, Start.REASONING if reasons else Start.REASONED, tools)
        return LexedParser(XtmlLexer(THINK if reasons else RESPONSE, self.stop_token_ids), parser)


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its vocabulary has the tokens, and its template writes calls in XTML."""
    return template.has_markers(_TURN_END, OPEN, CLOSE, SEP) and f'{OPEN}call tool="judge"' in template.call_text
