"""Two small vision models that were trained to name colours answer over HTTP what they see: on both endpoints, streamed
and whole, two images in their order, beside requests without images.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from engines.interface.config import EngineConfig
from engines.torch_engine import TorchEngine
from tests.support.files.image_files import data_url, encoded, picture
from tests.support.harness import KEY, RunningEdge, config_for, running_edge
from tests.support.readme_blocks import ROOT
from tests.support.sample_code import environment, run_python, sample

MODELS = {
    "tiny/Qwen": ROOT / "cluster" / "examples" / "tiny-vision",
    "tiny/Llava": ROOT / "tests" / "support" / "models" / "tiny-llava",
}
WHICH = "What colour is the shape?"
EACH = "What is in each image?"


def url_of(colour: str, format: str = "PNG", **options: Any) -> str:
    return data_url(encoded(picture(colour), format, **options), f"image/{format.lower()}")


@pytest.fixture(scope="module", params=MODELS)
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningEdge, str]]:
    name: str = request.param
    config = {
        "models": [{"id": name, "app": "tiny", "source": str(MODELS[name]), "renderer": "generic"}],
        "keys": config_for({"chat": "unused", "base": "unused"})["keys"][:1],
        "images": {"app": "images"},
    }
    engine = lambda: TorchEngine(  # noqa: E731
        EngineConfig(source=str(MODELS[name]), threads=1, kv_cache_bytes=16 << 20, max_running=16)
    )
    with running_edge(config, engine) as edge:
        yield edge, name


def client_of(edge: RunningEdge) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{edge.port}/v1", api_key=KEY, max_retries=0)


def parts(question: str, *urls: str) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": question}]


def answer(edge: RunningEdge, model: str, content: object, **fields: Any) -> str:
    reply = client_of(edge).chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],  # type: ignore[misc,list-item]
        temperature=0,
        max_tokens=24,
        **fields,
    )
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize("colour", ["red", "blue", "green"])
def test_a_chat_names_the_colour_of_a_shape(seeing: tuple[RunningEdge, str], colour: str) -> None:
    assert answer(*seeing, parts(WHICH, url_of(colour))) == colour


@pytest.mark.parametrize("format", ["JPEG", "GIF", "WEBP"])
def test_every_format_is_seen(seeing: tuple[RunningEdge, str], format: str) -> None:
    assert answer(*seeing, parts(WHICH, url_of("red", format))) == "red"


def test_two_images_are_seen_in_their_order(seeing: tuple[RunningEdge, str]) -> None:
    red_first = answer(*seeing, parts(EACH, url_of("red"), url_of("blue")))
    blue_first = answer(*seeing, parts(EACH, url_of("blue"), url_of("red")))
    assert red_first.index("red") < red_first.index("blue")
    assert blue_first.index("blue") < blue_first.index("red")


def test_a_stream_says_what_a_whole_reply_says(seeing: tuple[RunningEdge, str]) -> None:
    edge, model = seeing
    content = parts(EACH, url_of("red"), url_of("blue"))
    stream = client_of(edge).chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],  # type: ignore[misc,list-item]
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer(edge, model, content)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens > 2 * 16, "the tokens of images are the prompt's"


def prompt_chunks(model: str, question: str, *urls: str) -> list[dict[str, Any]]:
    """What the chat template would render, cut where the images are."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS[model])
    before, after = ("<|vision_start|>", "<|vision_end|>") if model == "tiny/Qwen" else ("", "")
    texts = [f"<|im_start|>user\n{before}"]
    texts += [f"{after}{before}" for _ in urls[1:]]
    texts += [f"{after}{question}<|im_end|>\n<|im_start|>assistant\n"]
    tokens = [
        {"type": "tokens", "tokens": tokenizer(text, add_special_tokens=False).input_ids} if text else None
        for text in texts
    ]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    mixed = [tokens[0], *(part for pair in zip(images, tokens[1:], strict=True) for part in pair)]
    return [part for part in mixed if part is not None]


def complete(edge: RunningEdge, model: str, chunks: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt_chunks": chunks, "max_tokens": 24, "temperature": 0, **fields}
    return httpx.post(
        f"http://127.0.0.1:{edge.port}/v1/completions",
        json=body,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    )


def test_a_completion_of_chunks_sees_the_images_of_a_chat(seeing: tuple[RunningEdge, str]) -> None:
    edge, model = seeing
    urls = (url_of("blue"), url_of("red"))
    response = complete(edge, model, prompt_chunks(model, EACH, *urls), return_token_ids=True)
    choice = response.json()["choices"][0]
    assert choice["text"] == answer(edge, model, parts(EACH, *urls))
    assert "prompt_token_ids" not in choice or choice["prompt_token_ids"] is None


def test_images_in_several_turns_are_seen(seeing: tuple[RunningEdge, str]) -> None:
    edge, model = seeing
    messages = [
        {"role": "user", "content": parts(WHICH, url_of("green"))},
        {"role": "assistant", "content": "green"},
        {"role": "user", "content": parts(WHICH, url_of("red"))},
    ]
    reply = client_of(edge).chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
    )
    assert reply.choices[0].message.content == "red"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 2 * 16


def test_sixteen_clients_with_and_without_images_get_their_own_answers(seeing: tuple[RunningEdge, str]) -> None:
    edge, model = seeing
    asked = [parts(WHICH, url_of(colour)) for colour in ("red", "blue", "green") for _ in range(4)]
    texts: list[Any] = ["Hello"] * 4
    alone = answer(edge, model, "Hello")
    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(lambda content: answer(edge, model, content), [*asked, *texts]))
    assert found == [*["red"] * 4, *["blue"] * 4, *["green"] * 4, *[alone] * 4]


def test_bad_images_are_named_and_change_nothing(seeing: tuple[RunningEdge, str]) -> None:
    edge, model = seeing

    def refused(content: list[dict[str, Any]]) -> tuple[str, str | None]:
        with pytest.raises(openai.BadRequestError) as caught:
            answer(edge, model, content)
        error: Any = caught.value.body
        return error["message"], error["param"]

    at = "messages[0].content[1]"
    good = url_of("red")
    assert refused(parts(WHICH, good, "http://127.0.0.1/a.png")) == (
        f'The image at {at} must be a data URL, "data:image/png;base64,…"; this model does not fetch images.',
        at,
    )
    assert refused(parts(WHICH, good, data_url(b"GIF89a"))) == (
        f"The image at {at} must be a PNG, JPEG, GIF or WebP image; its bytes have another format.",
        at,
    )
    assert refused(parts(WHICH, *[good] * 17)) == (
        "A request must have at most 16 images, got another one at messages[0].content[16].",
        "messages[0].content[16]",
    )
    assert answer(edge, model, parts(WHICH, good)) == "red"
    edge.wait_until_idle()


def test_an_image_without_its_frame_is_refused_with_its_place(seeing: tuple[RunningEdge, str]) -> None:
    edge, model = seeing
    if model != "tiny/Qwen":
        return  # its images have no frame
    whole = prompt_chunks(model, WHICH, url_of("red"))
    bare = [{"type": "tokens", "tokens": whole[0]["tokens"][:-1]}, *whole[1:]]
    error = complete(edge, model, bare).json()["error"]
    assert error["param"] == "prompt_chunks[1]"
    assert error["message"].startswith("prompt_chunks[1] must have the image token 3 right before it, got token ")
    alone = complete(edge, model, whole[1:2]).json()["error"]
    assert alone["message"] == "prompt_chunks[0] must have the image token 3 right before it, got no token."


def test_the_documents_sample_of_an_image_runs_as_it_stands(
    seeing: tuple[RunningEdge, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edge, model = seeing
    for name, value in environment(KEY).items():
        monkeypatch.setenv(name, value)
    code = sample("text_images.py", host=f"http://127.0.0.1:{edge.port}", chat_model=model)
    before, image, after = prompt_chunks(model, WHICH, url_of("blue"))
    code = code.replace("data:image/png;base64,...", image["image_url"]["url"])
    run_python(code, before_image=before["tokens"], after_image=after["tokens"])
    assert capsys.readouterr().out.strip(), "it asks for no temperature, so the words may differ"
    edge.wait_until_idle()
    record = edge.recorder.ended[-1]
    counted = record.prompt_tokens - len(before["tokens"]) - len(after["tokens"])
    assert record.image_tokens == counted
    assert counted == (16 if model == "tiny/Llava" else 30), "the image's tokens are counted"


def test_a_tools_result_may_hold_an_image(seeing: tuple[RunningEdge, str]) -> None:
    edge, model = seeing
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": url_of("red")}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [image]},
        {"role": "user", "content": WHICH},
    ]
    reply = client_of(edge).chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
    )
    without = client_of(edge).chat.completions.create(
        model=model,
        messages=[*messages[:2], {**messages[2], "content": "red"}, messages[3]],  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
    )
    assert reply.usage is not None
    assert without.usage is not None
    assert reply.usage.prompt_tokens - without.usage.prompt_tokens > 10, "the image has its tokens in the prompt"
