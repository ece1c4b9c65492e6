"""The grammar of `model`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.errors import InvalidRequest
from serve_app.base.model_id import BaseModelId, CheckpointPath, ModelId, parse

NAMES = st.text(st.characters(exclude_characters=";:", exclude_categories=["Cs"]), min_size=1, max_size=40)
VARIANTS = st.none() | st.text(st.characters(exclude_characters=";", exclude_categories=["Cs"]), max_size=20)
PARTS = st.from_regex(r"[A-Za-z0-9._:-]{1,40}", fullmatch=True).filter(lambda part: set(part) != {"."})
BASES = st.builds(BaseModelId, NAMES, VARIANTS).filter(lambda base: not str(base).startswith("tinker://"))
PATHS = st.builds(CheckpointPath, PARTS, PARTS)
MODELS = st.builds(ModelId, BASES, st.none()) | st.builds(ModelId, st.none() | BASES, PATHS)


@given(MODELS)
def test_what_is_printed_parses_to_the_same(model: ModelId) -> None:
    assert parse(str(model)) == model


@given(st.text(max_size=60) | st.builds("{};tinker://{}/sampler_weights/{}".format, st.text(), PARTS, PARTS))
def test_what_parses_prints_as_it_was(text: str) -> None:
    try:
        model = parse(text)
    except InvalidRequest:
        return
    assert str(model) == text


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen/Qwen3-8B", ModelId(BaseModelId("Qwen/Qwen3-8B"))),
        ("thinkingmachines/Inkling:peft:262144", ModelId(BaseModelId("thinkingmachines/Inkling", "peft:262144"))),
        ("tinker://0-1:train:0/sampler_weights/000080", ModelId(None, CheckpointPath("0-1:train:0", "000080"))),
        ("a:b;tinker://r:t:0/sampler_weights/n", ModelId(BaseModelId("a", "b"), CheckpointPath("r:t:0", "n"))),
    ],
)
def test_the_documented_forms(text: str, model: ModelId) -> None:
    assert parse(text) == model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model must have 1 to 1024 characters, got 0."),
        ("m" * 1025, "model must have 1 to 1024 characters, got 1025."),
        (";tinker://r/sampler_weights/n", "model has no base model before ';': ';tinker://r/sampler_weights/n'."),
        ("a;b", "model holds a malformed checkpoint path 'b': it must start with 'tinker://'."),
        (
            "tinker://r/weights/n",
            "model holds a malformed checkpoint path 'tinker://r/weights/n': "
            "only checkpoints of the type 'sampler_weights' can be sampled, got 'weights'.",
        ),
        (
            "tinker://r/sampler_weights",
            "model holds a malformed checkpoint path 'tinker://r/sampler_weights': "
            "it must have the three parts run/sampler_weights/name, got 2.",
        ),
        (
            "tinker://../sampler_weights/n",
            "model holds a malformed checkpoint path 'tinker://../sampler_weights/n': "
            "its run must be 1 to 255 letters, digits and '._:-', got '..'.",
        ),
        (
            "tinker://r/sampler_weights/",
            "model holds a malformed checkpoint path 'tinker://r/sampler_weights/': "
            "its name must be 1 to 255 letters, digits and '._:-', got ''.",
        ),
    ],
)
def test_a_malformed_model_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text)
    assert (str(caught.value), caught.value.param) == (message, "model")


@pytest.mark.parametrize("part", ["a/b", "a\\b", "a b", "a\n", "a\0", "ä", "%2e%2e", ".", "..", "...", "x" * 256])
def test_no_part_of_a_path_can_leave_its_folder(part: str) -> None:
    for text in (f"tinker://{part}/sampler_weights/n", f"tinker://r/sampler_weights/{part}"):
        with pytest.raises(InvalidRequest):
            parse(text)
