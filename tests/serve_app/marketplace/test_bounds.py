"""No prompt has more tokens than its bound, and images have their own."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config.marketplace import TokenBounds
from serve_app.marketplace.bounds import Bounds, PromptSize
from tests.support.files.json_texts import spelled
from tests.support.files.tiny_tokenizer import SPECIAL, make_tokenizer

TOKENIZER = make_tokenizer()
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from([*SPECIAL, "\0\1\2", "🦙", '"\\"'])
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXTS}), min_size=1)
TOOLS = st.lists(st.dictionaries(TEXTS, st.lists(st.integers(0, 9), max_size=30) | TEXTS, max_size=3), max_size=3)
PLAIN = TokenBounds(template=64)  # what `# Tools` and the beginning of a reply are written with


def prompt_bound(content: bytes, messages: Any, tokens: TokenBounds = PLAIN) -> int:
    return Bounds.of(PromptSize.of(content, messages), None, 1, tokens).prompt


@given(MESSAGES, TOOLS, st.data())
def test_a_template_makes_no_more_tokens_of_a_body_than_its_bound(messages: Any, tools: Any, data: Any) -> None:
    content = data.draw(spelled({"model": "m", "messages": messages, "tools": tools}))
    encoded = TOKENIZER.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True)
    assert len(encoded["input_ids"]) <= prompt_bound(content, messages)


def part(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "hi"}, fields]}


DATA = "data:image/png;base64," + "A" * 100_000
SHORT = "https://example.com/a.png"


@pytest.mark.parametrize(
    "message",
    [
        part(type="image_url", image_url={"url": DATA}),
        part(type="image_url", image_url=DATA),
        part(type="image_url", image_url={"url": SHORT}),
        part(image_url={"url": SHORT}),
        part(type="video_url", video_url={"url": SHORT}),
        part(type="text", text="x", image="y"),
        {"role": "tool", "content": [{"type": "tool_result", "content": []}]},
        "no message",
    ],
    ids=lambda message: str(message)[:60],
)
def test_what_is_no_text_counts_by_its_limit_and_an_image_s_own_bytes_do_not(message: Any) -> None:
    bare = {"messages": [{"role": "user", "content": "hi"}]}
    more = prompt_bound(json.dumps({"messages": [message]}).encode(), [message]) - prompt_bound(
        json.dumps(bare).encode(), bare["messages"]
    )
    limit = 0 if message == "no message" else PLAIN.image
    assert limit - 100 <= more <= limit + 150


def test_images_in_the_result_of_a_tool_count_too() -> None:
    image = {"type": "image_url", "image_url": {"url": SHORT}}
    messages = [{"role": "tool", "content": [{"type": "tool_result", "content": [image, image]}]}]
    assert PromptSize.of(b"{}", messages).num_media == 3


def test_audio_in_the_body_counts_by_its_bytes_as_well() -> None:
    message = part(type="input_audio", input_audio={"data": "A" * 100_000})
    assert prompt_bound(json.dumps({"messages": [message]}).encode(), [message]) > 100_000 + PLAIN.image


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.none() | st.integers(1, 10**6), st.integers(1, 9), st.data())
def test_no_bound_is_beyond_the_context(body: int, text: int, asked: int | None, choices: int, data: Any) -> None:
    context = data.draw(st.none() | st.integers(1, 10**5))
    found = Bounds.of(PromptSize(body, text), asked, choices, TokenBounds(context=context, reply=500))
    assert 0 <= found.guessed_prompt <= found.prompt <= (context or 10**7)
    assert found.completion == choices * min(asked or 500, context or 10**6)
