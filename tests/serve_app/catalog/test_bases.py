"""Which model a checkpoint runs on, where several could be meant."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.harness import BASE, CHAT, OTHER_KEY, PLAIN, RunningEdge, StoredCheckpoint

pytest_plugins = ("tests.support.edge_fixtures",)

PATH = "tinker://r/sampler_weights/n"
VARIANT = f"{CHAT}:peft:128"


@pytest.fixture
def edge(edge: RunningEdge) -> Iterator[RunningEdge]:
    yield edge
    edge.reconfigure()


def context_of(edge: RunningEdge, model: str, key: str | None = None) -> int:
    with edge.http(*([key] if key else [])) as client:
        length: int = client.get(f"/models/{model}").raise_for_status().json()["context_length"]
    return length


@pytest.mark.parametrize("model", [PATH, f"{CHAT};{PATH}", f"{PLAIN};{PATH}", f"{VARIANT};{PATH}"])
@pytest.mark.parametrize("base", [CHAT, PLAIN, "source", "source/", "folder"])
def test_a_checkpoint_can_be_asked_for_on_each_model_of_the_same_weights(
    edge: RunningEdge, model: str, base: str
) -> None:
    source = edge.config["models"][0]["source"]
    names = {"source": source, "source/": f"{source}/", "folder": source.rpartition("/")[2]}
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model=names.get(base, base))
    response = edge.complete(model=model, max_tokens=1)
    assert (response.status_code, response.json()["model"]) == (200, model)


def test_without_a_named_base_the_first_model_of_the_configuration_is_meant(edge: RunningEdge) -> None:
    source = edge.config["models"][0]["source"]
    chat, plain, base = edge.config["models"]
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model=source)
    edge.reconfigure(models=[{**plain, "context_length": 99}, chat, base])
    assert context_of(edge, PATH) == 99
    edge.checkpoints.held[PATH] = StoredCheckpoint("d2", base_model=VARIANT)
    assert context_of(edge, PATH) == 128


def test_of_models_of_the_same_weights_the_one_is_taken_that_the_key_may_use(edge: RunningEdge) -> None:
    *others, own = edge.config["keys"]
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model=CHAT)
    chat, plain, base = edge.config["models"]
    models = [chat, {**plain, "context_length": 99}, base]
    edge.reconfigure(models=models, keys=[*others, {**own, "models": [PLAIN]}])
    assert context_of(edge, PATH, OTHER_KEY) == 99


def test_a_name_that_may_mean_two_bases_is_400_that_says_how_to_choose(edge: RunningEdge, tmp_path: Any) -> None:
    folders = [str(save_model_folder(tmp_path / name / "final")) for name in ("a", "b")]
    models = [{"id": name, "app": "tiny", "source": folder} for name, folder in zip("ab", folders, strict=True)]
    edge.reconfigure(models=models)
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model="final")
    error = edge.complete(model=PATH).json()["error"]
    message = f"The base 'final' of the checkpoint {PATH} may be 'a' or 'b': use '<base>;{PATH}'."
    assert (error["message"], error["param"]) == (message, "model")
    assert edge.complete(model=f"b;{PATH}", max_tokens=1).status_code == 200


def test_a_model_of_other_weights_is_still_refused(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model=CHAT)
    error = edge.complete(model=f"{BASE};{PATH}").json()["error"]
    assert error["message"] == f"The checkpoint {PATH} was trained on {CHAT!r}, not on {BASE!r}."
