"""By which names checkpoints find their base, and which names two models may not share."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.checking.base_names import BaseNames
from serve_app.config.service import ServiceConfig, read_config


def model(name: str, source: str, **fields: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": name, "app": "a", "source": source, **fields})


def meant(name: str, *models: ModelConfig) -> list[str]:
    return [found.id for found in BaseNames(models).meant_by(name)]


LLAMA = model("tiny/Llama", "/models/tiny-llama", variants={"peft:128": 128}, also_known_as=("/train/base",))
QWEN = model("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    "name",
    [
        "tiny/Llama",
        "tiny/Llama/",
        "tiny/Llama:peft:128",
        "tiny/Llama:peft:999",
        "/train/base",
        "/train/base/",
        "/models/tiny-llama",
        "/models/tiny-llama/",
        "models/tiny-llama",
        "./models/tiny-llama/",
        "tiny-llama",
    ],
)
def test_a_base_is_found_by_its_id_its_other_names_its_path_and_its_folder(name: str) -> None:
    assert meant(name, QWEN, LLAMA) == ["tiny/Llama"]


@pytest.mark.parametrize(
    "name", ["", "/", ".", "./", "..", "llama", "ny-llama", "/tiny-llama", "/other/tiny-llama", "tiny", "Qwen3-8B", "~"]
)
def test_nothing_else_is_a_name(name: str) -> None:
    assert meant(name, QWEN, LLAMA) == []


def test_a_relative_source_is_found_by_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDHOUSE_ROOT", "/srv/project")
    one = model("m", "./models/tiny-llama/")
    for name in ("./models/tiny-llama/", "models/tiny-llama", "/srv/project/models/tiny-llama"):
        assert meant(name, one) == ["m"]


def test_models_that_share_a_source_are_all_meant_and_the_named_one_first() -> None:
    first, second = model("first", "/models/m"), model("second", "/models/m/", variants={"peft:9": 9})
    assert meant("m", first, second) == meant("/models/m", first, second) == ["first", "second"]
    assert meant("second", first, second) == meant("second:peft:9", first, second) == ["second", "first"]
    assert meant("m", first, model("third", "/models/m", revision="v2"), second) == ["first", "third", "second"]


def test_a_folders_name_that_several_paths_end_in_may_mean_each_of_them() -> None:
    assert meant("final", model("a", "/a/final"), model("b", "/b/final"), LLAMA) == ["a", "b"]
    assert meant("a/final", model("a", "/a/final"), model("b", "/b/final"), LLAMA) == ["a"]


def test_an_id_goes_before_another_name() -> None:
    served_elsewhere = model("Qwen/Qwen3-8B", "/models/qwen")
    assert meant("Qwen/Qwen3-8B", model("ref", "Qwen/Qwen3-8B"), served_elsewhere) == ["Qwen/Qwen3-8B"]


def refusals(*models: ModelConfig) -> list[str]:
    raw = {"models": [each.model_dump(mode="json") for each in models]}
    return [refusal.sentence for refusal in read_config(raw).refusals]


@pytest.mark.parametrize(
    "name", ["tiny/Llama", "tiny/Llama/", "tiny/Llama:peft:128", "/train/base", "/models/tiny-llama"]
)
def test_another_name_may_not_be_a_name_of_another_model(name: str) -> None:
    other = model("other", "/models/other", also_known_as=("fine", name))
    (sentence,) = refusals(LLAMA, other)
    where = "models[1].also_known_as[1]"
    assert sentence == f"{where} must not be a name of another model: {name.rstrip('/')!r} is one of 'tiny/Llama'."


def test_the_order_of_two_models_does_not_hide_a_clash() -> None:
    other = model("other", "/models/other", also_known_as=("tiny/Llama",))
    assert refusals(other, LLAMA)[0].startswith("models[0].also_known_as[0] must not be a name of another model")


def test_models_of_the_same_weights_may_share_their_other_names() -> None:
    twin = model("twin", "/models/tiny-llama", also_known_as=("/train/base", "tiny/Llama"))
    assert refusals(LLAMA, twin) == []


def test_the_model_that_claims_anothers_name_stays_as_it_was() -> None:
    before = model("other", "/models/other")
    last = ServiceConfig(models=(before, LLAMA))
    raw = {
        "models": [{**before.model_dump(mode="json"), "also_known_as": ["tiny/Llama"]}, LLAMA.model_dump(mode="json")]
    }
    reading = read_config(raw, last)
    assert reading.config.models == (before, LLAMA)
    assert len(reading.refusals) == 1


def test_a_path_that_starts_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert refusals(model("m", "~no-such-user/m")) == [
        "The path '~no-such-user/m' starts with a home folder that does not exist."
    ]
