"""Gemma 3, whose replies are text, and Gemma 4."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode, Reply
from tests.support.renderer_kit import family_tokenizer

GEMMA3_END = "<end_of_turn>"
END = "<turn|>"
QUOTE = '<|"|>'
SPECIAL = [
    "<eos>", "<bos>", "<|turn>", END, "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_call>",
    "<tool_call|>", "<|tool_response>", "<tool_response|>", QUOTE, "<|image|>",
]  # fmt: skip


@cache
def gemma3_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<eos>", "<bos>", "<start_of_turn>", GEMMA3_END, "<start_of_image>"]
    return family_tokenizer(special, eos=GEMMA3_END, bos="<bos>")


@cache
def gemma4_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer(SPECIAL, eos=END, bos="<bos>")


def write_value(value: object) -> str:
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case dict():
            return "{" + ",".join(f"{key}:{write_value(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(write_value, value)) + "]"
        case True | False | None:
            return {True: "true", False: "false", None: "null"}[value]
        case _:
            return str(value)


def write_call(name: str, arguments: dict[str, object]) -> str:
    return f"<|tool_call>call:{name}{write_value(arguments)}<tool_call|>"


def write_plain(reply: Reply) -> str:
    return reply.text + "".join(write_call(*call) for call in reply.calls) + END


def write(reply: Reply) -> str:
    reasoning = f"<|channel>thought\n{reply.reasoning}\n<channel|>" if reply.reasoning else ""
    return reasoning + write_plain(reply)


CALL = write_call("now", {})
NOW = ("now", "{}")
BROKEN_CALLS = {
    "no braces": "call:now",
    "no name": "call:{}",
    "no call": "now{}",
    "a value without quotes": "call:forecast{city:Köln}",
    "a string in JSON's quotes": 'call:forecast{city:"Köln"}',
    "no value": "call:forecast{city:}",
    "no key": "call:forecast{:3}",
    "an open brace": "call:forecast{city:{}",
    "an open string": f"call:forecast{{city:{QUOTE}a}}",
    "text behind the braces": "call:now{} now",
    "JSON": '{"name": "now", "arguments": {}}',
    "a number that is none": "call:forecast{days:NaN}",
    "a list as arguments": "call:now[1]",
}
MALFORMED = {
    **{
        name: (f"x<|tool_call>{body}<tool_call|>y{END}", "", f"x<|tool_call>{body}<tool_call|>y", [])
        for name, body in BROKEN_CALLS.items()
    },
    "an unclosed call": (f"{CALL}<|tool_call>call:now{{}}{END}", "", "<|tool_call>call:now{}", [NOW]),
    "a stray end of a call": (f"hi<tool_call|>{END}", "", "hi<tool_call|>", []),
    "a call inside a call": (f"<|tool_call>{CALL}{END}", "", f"<|tool_call>{CALL}", []),
    "a stray quote": (f"hi{QUOTE}x{END}", "", f"hi{QUOTE}x", []),
    "a stray end of reasoning": (f"hi<channel|>x{END}", "", "hi<channel|>x", []),
    "tokens after the end": (f"hi{END}x{END}", "", f"hi{END}x", []),
    "nothing": (END, "", "", []),
}
MALFORMED_REASONING = {
    "another channel": (f"<|channel>final\nhi<channel|>{END}", "", "<|channel>final\nhi<channel|>", []),
    "another channel that begins alike": (f"<|channel>though{END}", "", "<|channel>though", []),
    "a channel without a name": (f"<|channel><channel|>hi{END}", "", "<|channel><channel|>hi", []),
    "a call for a name": (f"<|channel>tho{CALL}{END}", "", f"<|channel>tho{CALL}", []),
    "reasoning inside reasoning": (
        f"<|channel>thought\na<|channel>thought\nb{END}",
        "a",
        "<|channel>thought\nb",
        [],
    ),
    "a call inside reasoning": (f"<|channel>thought\na{CALL}<channel|>{END}", "a", f"{CALL}<channel|>", []),
}
PARTS = (
    "<|channel>", "<channel|>", "thought", "tho", "\n", "<|tool_call>", "<tool_call|>", "<|think|>", QUOTE, "a", " <",
    "👍🏽", "call:now{}", CALL, write_call("other", {}), "<|channel>thought\nwhy\n<channel|>",
)  # fmt: skip
READS = ("<|channel>", "<channel|>")
SWITCH = {True: {"enable_thinking": True}, False: {"enable_thinking": False}, "none": {"enable_thinking": False}}


def mode(effort: bool | None, *, reasons: bool) -> Mode:
    """The templates sort arguments by name, and write the text of an answer behind the results of its calls."""
    return Mode(effort, reasons=reasons, write=write if reasons else write_plain, keeps_calls=False)


def gemma4(name: str, default: Mode, **fields) -> Case:
    given = {
        "name": name,
        "family": "gemma4",
        "tokenizer": gemma4_tokenizer,
        "template": name,
        "modes": (default, mode(True, reasons=True)),
        "end": END,
        "efforts": SWITCH,
        "malformed": MALFORMED,
        "parts": PARTS,
        "reads": READS,
    }
    return Case(**{**given, **fields})


CASES = [
    Case(
        name="gemma3",
        family="gemma3",
        tokenizer=gemma3_tokenizer,
        template="gemma3",
        modes=(Mode(None, reasons=False, write=lambda reply: f"{reply.text}{GEMMA3_END}"),),
        end=GEMMA3_END,
        parts=("<start_of_turn>", "<start_of_image>", "<think>", "```tool_code", "\n", " "),
        takes_tools=False,
        template_takes_tools=False,
        alternates=True,
    ),
    # By default this one closes the reasoning in the prompt.
    gemma4("gemma4_31b", mode(None, reasons=False)),
    gemma4("gemma4_v2", mode(None, reasons=True), malformed={**MALFORMED, **MALFORMED_REASONING}),
    gemma4("gemma4_v5", mode(None, reasons=True), malformed={**MALFORMED, **MALFORMED_REASONING}),
]
