"""Processor time of the renderers: `python tests/bench/rendering.py TOKENIZER_FOLDER` (best of five, this thread)."""

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

TEMPLATE = (Path(__file__).parents[1] / "renderers" / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
TEXT = "\n".join(pydoc_data.topics.topics.values())[:20_000]


def best_us(action: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(5):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return min(times) / count * 1e6


def parse(renderer: Renderer, pieces: list[Piece]) -> None:
    parser = renderer.parser(RenderedPrompt(()), ())
    for piece in pieces:
        parser.feed([piece])
    parser.finish(ReplyEnd.END)


def main(folder: str) -> None:
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
    print(f"detokenise                {best_us(detokenize, len(ids)):8.2f} us a token")
    print(f"two stop strings          {best_us(match, len(ids)):8.2f} us a token")
    print(f"parse, tags as text       {best_us(lambda: parse(renderer, pieces), len(ids)):8.2f} us a token")
    short = Conversation((Message(Role.USER, (TextPart("Hello there"),)),))
    long = Conversation((Message(Role.USER, (TextPart(TEXT * 10),)),))
    print(f"render a short question   {best_us(lambda: renderer.render(short), 1):8.0f} us")
    print(f"render 200 000 characters {best_us(lambda: renderer.render(long), 1000):8.0f} ms")
    hf = [{"role": "user", "content": "Hello there"}]
    apply = best_us(lambda: tokenizer.apply_chat_template(hf, chat_template=TEMPLATE, add_generation_prompt=True), 1)
    print(f"(transformers, short      {apply:8.0f} us)")
    print(f"build a renderer          {best_us(lambda: registry.build(None, tokenizer, TEMPLATE), 1000):8.0f} ms")


if __name__ == "__main__":
    main(sys.argv[1])
