"""Mistral, by the forms of calls that the versions of its tokenizer have."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode, Reply, dump
from tests.support.renderer_kit import family_tokenizer, hf_messages

END = "</s>"
SPECIAL = [
    "<unk>", "<s>", END, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]",
]  # fmt: skip
LATER = ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"]


@cache
def array_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer(SPECIAL, eos=END, bos="<s>")


@cache
def named_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer([*SPECIAL, *LATER], eos=END, bos="<s>")


@cache
def reasoning_tokenizer() -> PreTrainedTokenizerFast:
    return family_tokenizer([*SPECIAL, *LATER, "[THINK]", "[/THINK]"], eos=END, bos="<s>")


def call_id(index: int) -> str:
    return f"a1B2c3D4{index}"


def write_array(reply: Reply) -> str:
    calls = [
        {"name": name, "arguments": arguments, "id": call_id(index)}
        for index, (name, arguments) in enumerate(reply.calls)
    ]
    return reply.text + (f"[TOOL_CALLS]{dump(calls)}" if calls else "") + END


def write_with_ids(reply: Reply) -> str:
    return reply.text + "".join(_call(*call, index) for index, call in enumerate(reply.calls)) + END


def _call(name: str, arguments: dict[str, object], index: int) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]{call_id(index)}[ARGS]{dump(arguments)}"


def write_named(reply: Reply) -> str:
    return reply.text + "".join(f"[TOOL_CALLS]{name}[ARGS]{dump(given)}" for name, given in reply.calls) + END


def write_reasoning(reply: Reply) -> str:
    return (f"[THINK]{reply.reasoning}[/THINK]" if reply.reasoning else "") + write_named(reply)


NOW = ("now", "{}")
ALWAYS = {
    "tokens after the end": (f"hi{END}x{END}", "", f"hi{END}x", []),
    "nothing": (END, "", "", []),
}
MALFORMED_ARRAYS = {
    **ALWAYS,
    **{
        name: (f"x[TOOL_CALLS]{body}{END}", "", f"x[TOOL_CALLS]{body}", [])
        for name, body in {
            "bad JSON": "[{oops}]",
            "no array": '{"name": "now", "arguments": {}}',
            "no call": "[]",
            "text behind the array": '[{"name": "now", "arguments": {}}] so',
            "one call that is none": '[{"name": "now", "arguments": {}}, {"name": "now"}]',
            "arguments that are text": '[{"name": "now", "arguments": "{}"}]',
            "no body": "",
            "a marker in the array": '[{"name": "now", "arguments": {"city": "[INST]"}}]',
        }.items()
    },
}
MALFORMED_NAMED = {
    **ALWAYS,
    **{
        name: (f"x[TOOL_CALLS]{body}{END}", "", f"x[TOOL_CALLS]{body}", [])
        for name, body in {
            "bad JSON": "now[ARGS]{oops}",
            "no name": "[ARGS]{}",
            "no arguments": "now",
            "arguments that are a list": "now[ARGS][]",
            "an array": '[{"name": "now", "arguments": {}}]',
            "text behind the arguments": "now[ARGS]{} so",
            "arguments twice": "now[ARGS]{}[ARGS]{}",
            "the id at the end": "now[ARGS]{}[CALL_ID]a1B2c3D4e",
            "no body": "",
        }.items()
    },
    "a bad call after a good one": (
        f"[TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]now[ARGS]{{{END}",
        "",
        "[TOOL_CALLS]now[ARGS]{",
        [NOW],
    ),
    "a good call after a bad one": (
        f"[TOOL_CALLS]now[ARGS]{{[TOOL_CALLS]now[ARGS]{{}}{END}",
        "",
        "[TOOL_CALLS]now[ARGS]{[TOOL_CALLS]now[ARGS]{}",
        [],
    ),
    "stray arguments": (f"hi[ARGS]{{}}{END}", "", "hi[ARGS]{}", []),
}
MALFORMED_REASONING = {
    **MALFORMED_NAMED,
    "a stray end of reasoning": (f"hi[/THINK]x{END}", "", "hi[/THINK]x", []),
    "reasoning inside reasoning": (f"[THINK]a[THINK]b{END}", "a", "[THINK]b", []),
    "a call inside reasoning": (f"[THINK]a[TOOL_CALLS]now[ARGS]{{}}{END}", "a", "[TOOL_CALLS]now[ARGS]{}", []),
}
PARTS = (
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[INST]", "[", "{}", "now", "a", "\n", " ", "👍🏽",
    '[{"name": "now", "arguments": {}}]', "[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}",
)  # fmt: skip


def mistral(name: str, tokenizer, mode: Mode, **fields) -> Case:
    given = {
        "name": name,
        "family": "mistral",
        "tokenizer": tokenizer,
        "template": name,
        "modes": (mode,),
        "end": END,
        "parts": PARTS,
        "call_ids": "call{:0>5}",
        "alternates": True,
    }
    return Case(**{**given, **fields})


def oracle_with_thinking(tokenizer, source, conversation, *, arguments_as_text, **variables) -> list[int]:
    """The template takes reasoning as a part of the content."""
    del arguments_as_text
    messages = hf_messages(conversation)
    for message in messages:
        if message.get("reasoning_content"):
            thinking = {"type": "thinking", "thinking": message["reasoning_content"]}
            message["content"] = [thinking, {"type": "text", "text": message["content"] or ""}]
    return tokenizer.apply_chat_template(
        messages,
        tools=[item.declared for item in conversation.tools] or None,
        chat_template=source,
        add_generation_prompt=True,
        return_dict=False,
        **variables,
    )


# The older templates drop the text beside calls from a history.
CASES = [
    mistral(
        "mistral_nemo_2407",
        array_tokenizer,
        Mode(None, reasons=False, write=write_array, keeps_calls=False),
        malformed=MALFORMED_ARRAYS,
    ),
    mistral(
        "mistral_small_3_2",
        named_tokenizer,
        Mode(None, reasons=False, write=write_with_ids, keeps_calls=False),
        malformed=MALFORMED_NAMED,
    ),
    mistral(
        "ministral_3_reasoning",
        reasoning_tokenizer,
        Mode(None, reasons=True, write=write_reasoning),
        efforts={True: {}},
        malformed=MALFORMED_REASONING,
        takes_empty_texts=False,
        oracle=oracle_with_thinking,
    ),
    mistral(
        "mixtral_8x22b",
        array_tokenizer,
        Mode(None, reasons=False, write=lambda reply: f" {reply.text}{END}"),
        takes_tools=False,
        template_takes_tools=False,
    ),
]
