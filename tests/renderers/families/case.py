"""What a family gives to the contract test, and the random conversations and replies that it is tested with."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from renderers import registry
from renderers.base import RenderedPrompt, Renderer, ReplyEnd
from renderers.messages import Conversation, Effort, Message, Tool, ToolCall
from tests.support.renderer_kit import Parsed, assistant, oracle_ids, parse, pieces_of, result, system, template, user

TYPES = {
    "city": {"type": "string"},
    "zip": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object"},
    "note": {"type": ["string", "null"]},
}
"""The parameters of `FORECAST`."""

_DECLARED = {"name": "forecast", "description": "A forecast.", "parameters": {"type": "object", "properties": TYPES}}
FORECAST = Tool("forecast", _DECLARED["parameters"], {"type": "function", "function": _DECLARED})
_NOW = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
NOW = Tool("now", _NOW["parameters"], {"type": "function", "function": _NOW})
TOOLS = (FORECAST, NOW)

EFFORTS: list[Effort] = [True, False, "none", "minimal", "low", "medium", "high", "xhigh", "max", "true", "", 0, 1, 0.5]


@dataclass(frozen=True)
class Reply:
    """A reply as its caller gets it. `calls`: names, and arguments in their order."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = ()

    @property
    def fields(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.reasoning, self.text, [(name, dump(arguments)) for name, arguments in self.calls]


@dataclass(frozen=True)
class Mode:
    """One effort of a model. `write` spells a reply as the model does, after what the prompt has begun of it. All that
    it is given can be written: `reasons` and the case say so.
    """

    effort: Effort | None
    reasons: bool
    write: Callable[[Reply], str] = field(repr=False)
    keeps_calls: bool = True
    """A reply that called, sent back with its results, is rendered as it was sampled."""
    keeps_empty_reasoning: bool = True
    """So is one whose reasoning is empty."""


@dataclass(frozen=True)
class Case:
    """One model of a family.

    `template` None: the family has none, and is not compared. `efforts`: those accepted, with the arguments that the
    template gets for each. `malformed`: replies in the first mode that break the format, with what a stream has sent
    as reasoning, text and calls. `parts`: pieces of replies, in the order in which only chance puts them. `reads`:
    spellings that the template looks for in a text, which is therefore not the same to it as any other.
    """

    name: str
    family: str
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    template: str | None
    modes: tuple[Mode, ...]
    end: str
    """The spelling of the end token; empty where a reply has none."""
    efforts: Mapping[Effort, Mapping[str, object]] = field(default_factory=dict)
    malformed: Mapping[str, tuple[str, str, str, list[tuple[str, str]]]] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    recognised: bool = True
    takes_tools: bool = True
    """Whether calls are parsed; `template_takes_tools`: whether the template renders tools and calls."""
    template_takes_tools: bool = True
    takes_system: bool = True
    alternates: bool = False
    """Turns of user and assistant must alternate."""
    arguments_as_text: bool = False
    markers_are_tokens: bool = True
    oracle: Callable[..., list[int]] = oracle_ids
    """What the template itself makes of a conversation (called as `oracle_ids` is)."""
    takes_empty_texts: bool = True
    """Whether an assistant's turn may be empty."""
    call_ids: str = "call_{}"
    """What ids look like in a random conversation."""

    def _repr_pretty_(self, printer, cycle) -> None:
        """In hypothesis's reports."""
        printer.text(self.name)

    @property
    def renderer(self) -> Renderer:
        return _built(self.family, self.tokenizer, self.template)

    @property
    def source(self) -> str | None:
        return None if self.template is None else template(self.template)

    def prompt(self, mode: Mode, *messages: Message) -> RenderedPrompt:
        tools = TOOLS if self.template_takes_tools else ()
        return self.renderer.render(Conversation(messages or (user("q"),), tools, mode.effort))

    def pieces(self, text: str):
        return pieces_of(self.tokenizer(), text)

    def parse(self, mode: Mode, chunks, end: ReplyEnd = ReplyEnd.END) -> Parsed:
        return parse(self.renderer, chunks, end, self.prompt(mode).prefill, TOOLS)


@cache
def _built(family: str, tokenizer: Callable[[], PreTrainedTokenizerFast], name: str | None) -> Renderer:
    built = registry.build(family, tokenizer(), None if name is None else template(name))
    assert built is not None
    return built


def dump(arguments: Mapping[str, object]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


# --- random conversations ---

# No marker, nor a beginning or an end of one that would join with the template's.
TEXT = st.text(st.sampled_from("ab Z09.,!?'\"{}[]:\n\t éüß日本한국👍🏽\u200d\\_-#*"), max_size=30)
_WORDS = st.lists(st.sampled_from(["why", "so", "Köln", "日本", "👍🏽", "a\nb", "5", "true", "{x}", "it's", "<b>"]))
WORDS = _WORDS.map(" ".join)
"""Text without space at its ends, which templates trim."""
VALUES = {
    "city": WORDS | st.sampled_from(["5", "true", "null", '{"a": 1}', "a\n\nb"]),
    "zip": st.sampled_from(["01067", "1e3", "-5"]),
    "days": st.integers(-9, 10**20),
    "share": st.sampled_from([0.5, -1.25, 3]),
    "exact": st.booleans(),
    "tags": st.lists(WORDS, max_size=2),
    "place": st.dictionaries(st.sampled_from(["lat", "ö"]), st.integers(0, 9) | st.none() | WORDS, max_size=2),
    "note": st.none() | st.just("5"),
}
ARGUMENTS = st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)
CALLS = st.lists(st.tuples(st.just("forecast"), ARGUMENTS) | st.just(("now", {})), max_size=2).map(tuple)


@st.composite
def conversations(draw, case: Case, text=TEXT):
    """A conversation with every field in which text travels."""
    answers = text if case.takes_empty_texts else text.filter(bool)
    messages = [system(draw(text))] if case.takes_system and draw(st.booleans()) else []
    tools = TOOLS if case.template_takes_tools and draw(st.booleans()) else ()
    for turn in range(draw(st.integers(0, 2))):
        messages.append(user(draw(text)))
        if case.template_takes_tools and draw(st.booleans()):
            messages += _tool_loop(draw, case, text, turn)
        if case.alternates or draw(st.booleans()):
            messages.append(assistant(draw(answers), reasoning=draw(st.none() | text)))
    messages.append(user(draw(text)))
    if case.template_takes_tools and draw(st.booleans()):
        messages += _tool_loop(draw, case, text, 9)
    return Conversation(tuple(messages), tools)


def _tool_loop(draw, case: Case, text, turn: int) -> list[Message]:
    arguments = st.dictionaries(text.filter(bool), text | st.none() | st.integers() | st.booleans(), max_size=2)
    calls = [
        ToolCall(
            case.call_ids.format(f"{turn}{index}"), draw(st.sampled_from(["forecast", "now"])), dump(draw(arguments))
        )
        for index in range(draw(st.integers(1, 2)))
    ]
    turn_of_calls = assistant(draw(text), *calls, reasoning=draw(st.none() | text))
    return [turn_of_calls, *(result(call.id, draw(text)) for call in calls)]


@st.composite
def replies(draw, case: Case, mode: Mode):
    reply = Reply(
        reasoning=draw(WORDS) if mode.reasons else "",
        text=draw(WORDS),
        calls=draw(CALLS) if case.takes_tools else (),
    )
    return reply if reply.text or reply.calls else Reply(reply.reasoning, "hi")


def history(reply: Reply, ids: list[str]) -> list[Message]:
    """A reply that was sent back, with the results of its calls."""
    calls = [
        ToolCall(call_id, name, dump(arguments)) for call_id, (name, arguments) in zip(ids, reply.calls, strict=True)
    ]
    turn = assistant(reply.text, *calls, reasoning=reply.reasoning or None)
    return [turn, *(result(call.id, "18") for call in calls)]
