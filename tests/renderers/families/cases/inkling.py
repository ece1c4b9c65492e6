"""Inkling."""

import json

from tests.renderers.families.case import Case, Mode, Reply
from tests.support.special_tokens import INKLING, inkling_tokenizer

END = "<|content_model_end_sampling|>"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", 0, 0.5)


def message(kind: str, text: str, name: str = "") -> str:
    return f"<|message_model|>{name}<|content_{kind}|>{text}<|end_message|>"


def write_call(name: str, arguments: dict[str, object]) -> str:
    body = json.dumps({"name": name, "args": arguments}, ensure_ascii=False, separators=(",", ":"))
    return message("invoke_tool_json", body, name)


def write(reply: Reply) -> str:
    messages = [message("thinking", reply.reasoning)] * bool(reply.reasoning)
    messages += [message("text", reply.text)] * bool(reply.text)
    return "".join([*messages, *(write_call(*call) for call in reply.calls)]) + END


CASES = [
    Case(
        name="inkling",
        family="inkling",
        tokenizer=inkling_tokenizer,
        template=None,
        # Arguments are sorted when a call is sent back: see test_inkling.
        modes=tuple(Mode(effort, reasons=True, write=write, keeps_calls=False) for effort in (None, "none")),
        end=END,
        efforts={effort: {} for effort in EFFORTS},
        parts=(
            *INKLING,
            "now",
            "other",
            '{"name":"now","args":{}}',
            " ",
            "👍🏽",
            write_call("now", {}),
            message("text", "hi"),
        ),
        needs_markers=True,
    )
]
