"""Processor time of the renderers, the best of several runs, in this thread.

`python -m tests.bench.rendering` measures every family; `python -m tests.bench.rendering TOKENIZER_FOLDER` measures the
shared parts with a real tokenizer.
"""

import pydoc_data.topics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from renderers import registry
from renderers.base import RenderedPrompt, Renderer, ReplyEnd
from renderers.deltas import Piece
from renderers.messages import Conversation, Message, Role, TextPart
from renderers.replies.detokenize import token_table
from renderers.replies.stop import StopMatcher
from tests.renderers.families.case import TOOLS, Case, Reply, history
from tests.renderers.families.test_contract import CASES
from tests.support.renderer_kit import oracle_ids, system, user

TEMPLATE = (Path(__file__).parents[1] / "renderers" / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
TEXT = "\n".join(pydoc_data.topics.topics.values())[:20_000]
TURN = TEXT[1000:1200].strip()


def best_us(action: Callable[[], object], count: int, times_run: int = 5) -> float:
    times = []
    for _ in range(times_run):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return min(times) / count * 1e6


def parse(renderer: Renderer, pieces: list[Piece], prompt: RenderedPrompt) -> None:
    parser = renderer.parser(prompt, TOOLS)
    for piece in pieces:
        parser.feed([piece])
    parser.finish(ReplyEnd.END)


def hundred_messages(case: Case) -> Conversation:
    """Questions and answers; where the template takes tools, by a call. (99 where it takes no system message.)"""
    reply = Reply(text=TURN, calls=(("forecast", {"city": "Köln"}),))
    answered = [user(TURN), *history(Reply(text=TURN), [])]
    called = [user(TURN), *history(reply, [case.call_ids.format("1")]), answered[1]]
    turns = called * 24 + answered if case.template_takes_tools else answered * 49
    first = [system(TURN)] if case.takes_system else []
    return Conversation((*first, *turns, user(TURN)), TOOLS if case.template_takes_tools else ())


def measure_rendering(case: Case) -> str:
    """What rendering takes beyond transformers' `apply_chat_template`, in milliseconds."""
    conversation = hundred_messages(case)
    ours = best_us(lambda: case.renderer.render(conversation), 1000, 20)
    if case.source is None:
        return f"{ours:8.1f} {'':>14}"
    tokenizer, source, as_text = case.tokenizer(), case.source, case.arguments_as_text
    theirs = best_us(lambda: case.oracle(tokenizer, source, conversation, arguments_as_text=as_text), 1000, 20)
    return f"{ours:8.1f} {ours - theirs:14.1f}"


def measure_parsing(case: Case) -> float:
    """Tokens a second, one token a call."""
    mode = case.modes[0]
    arguments = {"city": TEXT[:4000].strip(), "days": 3}
    reply = Reply(
        reasoning=TEXT[:8000].strip() if mode.reasons else "",
        text=TEXT[8000:16000].strip(),
        calls=(("forecast", arguments), ("now", {})) if case.takes_tools else (),
    )
    pieces = case.pieces(mode.write(reply))
    parsed = case.parse(mode, [[piece] for piece in pieces])
    assert (parsed.fields[:3], parsed.malformed) == (reply.fields, False)
    prompt = case.prompt(mode)
    return 1e6 / best_us(lambda: parse(case.renderer, pieces, prompt), len(pieces))


def measure_families() -> None:
    print(f"{'100 messages: ms, of which':>52}")
    print(f"{'':24} {'all':>8} {'not template':>14} {'parsed tokens/s':>16}")
    for case in CASES:
        print(f"{case.name:24} {measure_rendering(case)} {measure_parsing(case):16,.0f}", flush=True)


def measure_parts(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    table = token_table(tokenizer)
    renderer = registry.build("qwen3_text", tokenizer, TEMPLATE)

    def detokenize() -> list[Piece]:
        detokenizer = table.detokenizer([0])
        return [piece for token_id in ids for piece in detokenizer.feed([token_id])] + detokenizer.flush()

    def match() -> None:
        matcher = StopMatcher(["\n\nUser:", "###"])
        for piece in pieces:
            matcher.feed([piece])

    pieces = detokenize()
    begun = RenderedPrompt(())
    print(f"detokenise                {best_us(detokenize, len(ids)):8.2f} us a token")
    print(f"two stop strings          {best_us(match, len(ids)):8.2f} us a token")
    print(f"parse, tags as text       {best_us(lambda: parse(renderer, pieces, begun), len(ids)):8.2f} us a token")
    short = Conversation((Message(Role.USER, (TextPart("Hello there"),)),))
    long = Conversation((Message(Role.USER, (TextPart(TEXT * 10),)),))
    print(f"render a short question   {best_us(lambda: renderer.render(short), 1):8.0f} us")
    print(f"render 200 000 characters {best_us(lambda: renderer.render(long), 1000):8.0f} ms")
    hf = [{"role": "user", "content": "Hello there"}]
    apply = best_us(lambda: tokenizer.apply_chat_template(hf, chat_template=TEMPLATE, add_generation_prompt=True), 1)
    print(f"(transformers, short      {apply:8.0f} us)")
    case = next(case for case in CASES if case.name == "qwen3")
    many = hundred_messages(case)
    ours = best_us(lambda: renderer.render(many), 1000, 20)
    theirs = best_us(lambda: oracle_ids(tokenizer, TEMPLATE, many), 1000, 20)
    print(f"render 100 messages       {ours:8.1f} ms (transformers, {theirs:.1f} ms)")
    print(f"build a renderer          {best_us(lambda: registry.build(None, tokenizer, TEMPLATE), 1000):8.0f} ms")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_parts(sys.argv[1])
    else:
        measure_families()
