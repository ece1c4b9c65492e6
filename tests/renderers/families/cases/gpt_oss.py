"""gpt-oss."""

from tests.renderers.families.case import Case, Mode, Reply, dump
from tests.support.special_tokens import GPT_OSS, gpt_oss_tokenizer

START = "<|start|>assistant"
END = "<|return|>"
EFFORTS = {effort: {"reasoning_effort": effort} for effort in ("low", "medium", "high")}


def write(reply: Reply) -> str:
    """Each part ends with `<|end|>`, as all but the last of a reply do."""
    messages = [f"<|channel|>analysis<|message|>{reply.reasoning}<|end|>"] * bool(reply.reasoning)
    messages += [f"<|channel|>final<|message|>{reply.text}<|end|>"] * bool(reply.text)
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dump(arguments)}<|end|>"
        for name, arguments in reply.calls
    ]
    return START.join(messages) + END


CASES = [
    Case(
        name="gpt_oss",
        family="gpt_oss",
        tokenizer=gpt_oss_tokenizer,
        template="gpt_oss",
        modes=tuple(Mode(effort, reasons=True, write=write, keeps_calls=False) for effort in (None, "high")),
        end=END,
        efforts=EFFORTS,
        parts=(
            *GPT_OSS, "assistant", " to=functions.now", "analysis", "final", "commentary", " json", "{}", "\n", "👍🏽",
            f"{START}<|channel|>final<|message|>hi<|end|>",
            f"{START}<|channel|>commentary to=functions.now json<|message|>{{}}<|end|>",
        ),
        one_call_a_turn=True,
        needs_markers=True,
    )
]  # fmt: skip
