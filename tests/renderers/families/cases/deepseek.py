"""DeepSeek V3, V3.1, R1's distillations, V3.2, V4 and V4.1."""

from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.renderers.families.case import Case, Mode, Reply, dump
from tests.support.renderer_kit import family_tokenizer

BEGINNING, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
ROLES = ["<｜User｜>", "<｜Assistant｜>"]
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OUTPUTS = [f"<｜tool▁output{plural}▁{edge}｜>" for plural in ("", "s") for edge in ("begin", "end")]
THINK = ["<think>", "</think>"]
DSML = "｜DSML｜"
SWITCH = {True: {"thinking": True}, False: {"thinking": False}, "none": {"thinking": False}}


def tokenizer(*special: str, markers: list[str]) -> PreTrainedTokenizerFast:
    made = family_tokenizer([BEGINNING, END, *special], markers, eos=END)
    made.bos_token = BEGINNING
    return made


@cache
def v3_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer(markers=[*ROLES, CALLS_BEGIN, CALLS_END, CALL_BEGIN, SEP, CALL_END, *OUTPUTS, *THINK])


@cache
def distilled_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer(markers=[*ROLES, *THINK])


@cache
def v4_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer(markers=[*ROLES, *THINK, DSML])


@cache
def v4_1_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer("<｜System｜>", markers=[*ROLES, *THINK, DSML])


# --- sections of markers ---


def write_call(name: str, arguments: dict[str, object]) -> str:
    return f"{CALL_BEGIN}{name}{SEP}{dump(arguments)}{CALL_END}"


def write_code_call(name: str, arguments: dict[str, object]) -> str:
    return f"{CALL_BEGIN}function{SEP}{name}\n```json\n{dump(arguments)}\n```{CALL_END}"


def section(*calls: str, between: str = "") -> str:
    return f"{CALLS_BEGIN}{between.join(calls)}{CALLS_END}" if calls else ""


def write_v3_1(reply: Reply) -> str:
    return f"{reply.text}{section(*(write_call(*call) for call in reply.calls))}{END}"


def write_v3_1_thinking(reply: Reply) -> str:
    return f"{reply.reasoning}</think>{write_v3_1(reply)}"


def write_v3(reply: Reply) -> str:
    calls = section(*(write_code_call(*call) for call in reply.calls), between="\n")
    return f"{reply.reasoning}\n</think>\n\n{reply.text}{calls}{END}"


NOW = ("now", "{}")
V3_CALL = section(write_call("now", {}))
V3_BROKEN = {
    "bad JSON": write_call("now", {}).replace("{}", "{oops}"),
    "arguments that are a list": write_call("now", {}).replace("{}", "[]"),
    "no name": write_call("", {}),
    "no arguments": f"{CALL_BEGIN}now{CALL_END}",
    "no call": "",
    "text before a call": f"a{write_call('now', {})}",
    "text after a call": f"{write_call('now', {})}\n",
    "a call inside a call": f"{CALL_BEGIN}{write_call('now', {})}",
    "an unclosed call": f"{CALL_BEGIN}now{SEP}{{}}",
}
SECTIONS_MALFORMED = {
    **{
        name: (f"x{CALLS_BEGIN}{calls}{CALLS_END}y{END}", "", f"x{CALLS_BEGIN}{calls}{CALLS_END}y", [])
        for name, calls in V3_BROKEN.items()
    },
    "an unclosed section": (f"x{CALLS_BEGIN}{write_call('now', {})}{END}", "", f"x{V3_CALL[: -len(CALLS_END)]}", []),
    "text after the section": (f"{V3_CALL}x{END}", "", "x", [NOW]),
    "a second section": (f"{V3_CALL}{V3_CALL}{END}", "", V3_CALL, [NOW]),
    "a stray end of a section": (f"x{CALLS_END}{END}", "", f"x{CALLS_END}", []),
    "a stray call": (f"x{write_call('now', {})}{END}", "", f"x{write_call('now', {})}", []),
    "reasoning though it is switched off": (f"<think>a</think>b{END}", "", "<think>a</think>b", []),
    "tokens after the end": (f"hi{END}x{END}", "", f"hi{END}x", []),
    "nothing": (END, "", "", []),
}
THINKING_MALFORMED = {
    "no end of reasoning": (f"why{END}", "why", "", []),
    "a stray end of reasoning": (f"why</think>a</think>b{END}", "why", "a</think>b", []),
    "reasoning inside reasoning": (f"a<think>b</think>c{END}", "a", "<think>b</think>c", []),
    "nothing": (END, "", "", []),
}
V3_PARTS = (
    *THINK, CALLS_BEGIN, CALLS_END, CALL_BEGIN, SEP, CALL_END, "now", "{}", "\n", "a\n\n", " <", "👍🏽", *ROLES,
    V3_CALL, write_call("forecast", {"city": "日"}), section(write_call("elsewhere", {})),
)  # fmt: skip


def v3_1(name: str, mode: Mode, **fields) -> Case:
    given = {
        "name": name,
        "family": "deepseek_v3",
        "tokenizer": v3_tokenizer,
        "template": "deepseek_v3_1",
        "modes": (mode,),
        "end": END,
        "efforts": SWITCH,
        "parts": V3_PARTS,
        "reads": ("</think>",),
    }
    return Case(**given | fields)


# --- DSML ---


def dsml_call(name: str, arguments: dict[str, object], *, indent: str = "", empty: str = "\n") -> str:
    opening, closing = f"<{DSML}{indent}", f"</{DSML}{indent}"
    parameters = "".join(
        f'{opening}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else dump(value)}{closing}parameter>\n"
        for key, value in arguments.items()
    )
    return f'{opening}invoke name="{name}">\n{parameters or empty}{closing}invoke>\n'


def dsml_block(*calls: str, name: str = "tool_calls") -> str:
    return f"<{DSML}{name}>\n{''.join(calls)}</{DSML}{name}>"


def write_v4(reply: Reply) -> str:
    block = dsml_block(*(dsml_call(*call) for call in reply.calls))
    return reply.text + (f"\n\n{block}" if reply.calls else "") + END


def write_v4_thinking(reply: Reply) -> str:
    return f"{reply.reasoning}</think>{write_v4(reply)}"


def write_v4_1(reply: Reply) -> str:
    block = dsml_block(*(dsml_call(*call, indent=" ") for call in reply.calls), name=" calls")
    return reply.text + (f"\n\n{block}" if reply.calls else "") + END


def write_v4_1_thinking(reply: Reply) -> str:
    return f"{reply.reasoning}</think>{write_v4_1(reply)}"


def write_v3_2(reply: Reply) -> str:
    block = dsml_block(*(dsml_call(*call, empty="") for call in reply.calls), name="function_calls")
    return reply.text + (f"\n\n{block}" if reply.calls else "") + END


def write_v3_2_thinking(reply: Reply) -> str:
    return f"{reply.reasoning}</think>{write_v3_2(reply)}"


def parameter(name: str, value: str, is_string: str = "true") -> str:
    return f'<{DSML}parameter name="{name}" string="{is_string}">{value}</{DSML}parameter>\n'


def invoke(*parameters: str, name: str = "forecast") -> str:
    return f'<{DSML}invoke name="{name}">\n{"".join(parameters)}</{DSML}invoke>\n'


V4_CALL = dsml_block(invoke(name="now"))
V4_BROKEN = {
    "a parameter twice": dsml_block(invoke(parameter("city", "a"), parameter("city", "b"))),
    "a parameter without a name": dsml_block(invoke(parameter("", "a"))),
    "a call without a name": dsml_block(invoke(name="")),
    "text outside parameters": dsml_block(invoke("a")),
    "text outside calls": dsml_block(f"a{invoke()}"),
    "text between calls": dsml_block(invoke(), "a", invoke()),
    "no call": dsml_block(),
    "bad JSON": dsml_block(invoke(parameter("days", "{oops", "false"))),
    "another kind of value": dsml_block(invoke(parameter("days", "1", "maybe"))),
    "an unknown tag": dsml_block(f"<{DSML}other>\n"),
    "a stray marker in a value": dsml_block(invoke(parameter("city", f"a{DSML}b"))),
    "an unclosed parameter": dsml_block(invoke(f'<{DSML}parameter name="city" string="true">a')),
    "a parameter outside a call": dsml_block(parameter("city", "a")),
    "a call inside a call": dsml_block(invoke(invoke())),
    "reasoning inside a call": dsml_block(invoke(parameter("city", "<think>"))),
}
V4_MALFORMED = {
    **THINKING_MALFORMED,
    **{name: (f"w</think>x\n\n{block}{END}", "w", f"x\n\n{block}", []) for name, block in V4_BROKEN.items()},
    "text after the block": (f"w</think>{V4_CALL}x{END}", "w", "x", [NOW]),
    "a newline after the block": (f"w</think>{V4_CALL}\n{END}", "w", "\n", [NOW]),
    "a second block": (f"w</think>{V4_CALL}\n\n{V4_CALL}{END}", "w", f"\n\n{V4_CALL}", [NOW]),
    "an unclosed block": (f"w</think>x\n\n{V4_CALL[:-3]}{END}", "w", f"x\n\n{V4_CALL[:-3]}", []),
    "a stray marker": (f"w</think>a {DSML} b{END}", "w", f"a {DSML} b", []),
    "a stray marker in a bracket": (f"w</think>a <{DSML} b{END}", "w", f"a <{DSML} b", []),
    "a stray end of a block": (f"w</think>a</{DSML}tool_calls>{END}", "w", f"a</{DSML}tool_calls>", []),
    "the tag of another model": (f"w</think>a\n<{DSML}calls>{END}", "w", f"a\n<{DSML}calls>", []),
    "tokens after the end": (f"w</think>hi{END}x{END}", "w", f"hi{END}x", []),
}
V4_PARTS = (
    *THINK, DSML, "<", "</", f"<{DSML}", f"</{DSML}tool_calls>", f"<{DSML}tool_calls>", "tool_", "calls>", "\n", "\n\n",
    "a", "👍🏽", V4_CALL, dsml_block(invoke(parameter("city", "日"))), dsml_block(invoke(name="elsewhere")), *ROLES,
)  # fmt: skip
LEVELS = {level: {"thinking": True, "reasoning_effort": level} for level in ("high", "max")}


def v4(name: str, **fields) -> Case:
    given = {
        "name": name,
        "family": "deepseek_v4",
        "tokenizer": v4_tokenizer,
        "template": name,
        "modes": (Mode("max", reasons=True, write=write_v4_thinking), Mode(None, reasons=False, write=write_v4)),
        "end": END,
        "efforts": LEVELS | SWITCH,
        "malformed": V4_MALFORMED,
        "parts": V4_PARTS,
    }
    return Case(**given | fields)


CASES = [
    v3_1("deepseek_v3_1", Mode(None, reasons=False, write=write_v3_1), malformed=SECTIONS_MALFORMED),
    v3_1(
        "deepseek_v3_1_thinking",
        Mode(True, reasons=True, write=write_v3_1_thinking, keeps_calls=False),
        malformed=THINKING_MALFORMED,
    ),
    v3_1(
        "deepseek_v3",
        Mode(None, reasons=True, write=write_v3, keeps_calls=False),
        template="deepseekv3",
        efforts={True: {}},
        malformed=THINKING_MALFORMED,
        arguments_as_text=True,
    ),
    v3_1(
        "deepseek_r1_distill",
        Mode(None, reasons=True, write=write_v3),
        tokenizer=distilled_tokenizer,
        template="deepseek_r1_distill",
        efforts={True: {}},
        malformed=THINKING_MALFORMED,
        takes_tools=False,
        template_takes_tools=False,
    ),
    v4(
        "deepseek_v3_2",
        modes=(
            Mode(True, reasons=True, write=write_v3_2_thinking),
            Mode(None, reasons=False, write=write_v3_2, keeps_calls=False),
        ),
        efforts=SWITCH,
        malformed=THINKING_MALFORMED,
    ),
    v4("deepseek_v4"),
    v4("deepseek_v4_flash"),
    v4(
        "deepseek_v4_1",
        family="deepseek_v4_1",
        tokenizer=v4_1_tokenizer,
        template=None,
        modes=(
            Mode("low", reasons=True, write=write_v4_1_thinking),
            Mode(None, reasons=True, write=write_v4_1_thinking),
            Mode("none", reasons=False, write=write_v4_1),
        ),
        efforts={effort: {} for effort in ("low", "high", "max", True, False, "none")},
        malformed=THINKING_MALFORMED,
    ),
]
