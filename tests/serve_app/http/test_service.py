"""The configuration changes while the service runs."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeConfig
from engines.interface.errors import AdapterChanged, EngineError
from engines.interface.protocol import Adapter, GenerateRequest
from serve_app.base.errors import ConfigRefused
from serve_app.catalog.catalog import Catalog
from serve_app.catalog.served_model import load_model
from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.service import CheckpointsConfig
from serve_app.http.service import Service
from serve_app.replicas.in_process import LocalReplicas
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.harness import (
    BASE,
    CHAT,
    CONTEXT,
    KEY,
    OTHER_KEY,
    MemoryCheckpoints,
    RunningEdge,
    StoredCheckpoint,
    config_for,
    running_edge,
)

pytest_plugins = ("tests.support.edge_fixtures",)


def test_keys_and_models_change_without_a_restart(edge: RunningEdge) -> None:
    models, keys = edge.config["models"], edge.config["keys"]
    edge.reconfigure(models=models[:1], keys=[{**keys[1], "models": None}])
    try:
        assert [model.id for model in edge.sdk(OTHER_KEY).models.list()] == [CHAT, f"{CHAT}:peft:128"]
        assert edge.post("/completions", key=KEY, model=CHAT, prompt="x").status_code == 401
        assert edge.post("/completions", key=OTHER_KEY, model=BASE, prompt="x").status_code == 404
    finally:
        edge.reconfigure()
    assert edge.complete(max_tokens=1).status_code == 200


def test_models_that_did_not_change_are_not_loaded_again(edge: RunningEdge) -> None:
    before = dict(edge.service.settings.catalog.models)
    edge.reconfigure(limits={"messages": 7})
    try:
        assert edge.service.settings.catalog.models == before
        assert edge.service.settings.limits.messages == 7
    finally:
        edge.reconfigure()


def test_the_store_of_checkpoints_is_opened_in_a_thread_and_closed_once_no_request_can_need_it(
    model_folders: dict[str, str],
) -> None:
    async def change() -> None:
        opened, threads = list[MemoryCheckpoints](), list[str]()

        def open_checkpoints(_: CheckpointsConfig) -> MemoryCheckpoints:
            threads.append(threading.current_thread().name)
            opened.append(MemoryCheckpoints())
            return opened[-1]

        service = Service(LocalReplicas({}), open_checkpoints)
        config = config_for(model_folders)
        briefly = {"body_timeout_s": 0.2, "total_timeout_s": 0.1}
        await service.reconfigure({**config, "limits": briefly, "checkpoints": {"roots": ["/1"]}})
        await service.reconfigure({**config, "limits": {}, "checkpoints": {"roots": ["/1"]}})
        await service.reconfigure({**config, "limits": briefly, "checkpoints": {"roots": ["/2"]}})
        assert threading.current_thread().name not in threads
        await service.reconfigure({**config, "limits": briefly, "checkpoints": {"roots": ["/3"]}})
        assert [store.closed.is_set() for store in opened] == [False] * 3
        await asyncio.wait_for(opened[1].closed.wait(), 20)  # requests with the first may take an hour
        assert [store.closed.is_set() for store in opened] == [False, True, False]
        await service.close()
        assert [store.closed.is_set() for store in opened] == [True] * 3

    asyncio.run(change())


def test_a_request_that_looks_again_does_so_by_the_configuration_of_now(edge: RunningEdge) -> None:
    path, before = "tinker://r/sampler_weights/n", edge.service.settings
    edge.checkpoints.held[path] = StoredCheckpoint("d1")
    now = MemoryCheckpoints({path: StoredCheckpoint("d2")})

    def reply(request: GenerateRequest) -> list[int | EngineError] | None:
        if request.adapter == Adapter("d1", "/nowhere"):
            edge.service.settings = replace(before, catalog=Catalog(before.catalog.models, now))
            return [AdapterChanged("gone")]
        return None

    edge.script.reply = reply
    try:
        assert edge.chat(model=path, max_tokens=1).status_code == 200
    finally:
        edge.service.settings = before
    assert [request.adapter for request in edge.script.requests] == [Adapter(d, "/nowhere") for d in ("d1", "d2")]


def test_a_checkpoint_s_files_are_kept_while_a_request_runs_and_looked_for_again_when_they_are_gone(
    edge: RunningEdge,
) -> None:
    path, kept = "tinker://r/sampler_weights/n", list[list[str]]()
    edge.checkpoints.held[path] = StoredCheckpoint("d1")
    edge.checkpoints.removed.append("d1")

    def reply(request: GenerateRequest) -> None:
        kept.append(list(edge.checkpoints.kept))

    edge.script.reply = reply
    for stream in (False, True):
        assert edge.chat(model=path, max_tokens=1, stream=stream).status_code == 200
    assert kept == [["d1"], ["d1"]]
    assert edge.chat(model=CHAT, max_tokens=1).status_code == 200
    assert kept[-1] == edge.checkpoints.kept == []


def test_a_request_under_way_finishes_with_the_configuration_it_began_with(edge: RunningEdge) -> None:
    edge.script.says_and_hangs("ab", edge.engine)
    with edge.sdk().completions.create(model=BASE, prompt="x", stream=True) as stream:
        first = next(iter(stream))
        edge.reconfigure(models=edge.config["models"][:1])
        edge.engine.resume()
        assert first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream) == "ab"
    edge.reconfigure()


def test_a_service_without_a_usable_configuration_lives_and_is_not_ready(model_folders: dict[str, str]) -> None:
    with running_edge({"models": [], "keys": []}, FakeConfig()) as idle, idle.http() as client:
        live, ready, models = client.get("../healthz"), client.get("../readyz"), client.get("/models")
    assert live.status_code == 200
    assert (ready.status_code, ready.headers["retry-after"]) == (503, "2")
    message = "Not ready: nothing is served."
    expected = {"message": message, "type": "server_error", "param": None, "code": "not_ready"}
    assert ready.json() == {"error": expected}
    assert (models.status_code, models.headers["retry-after"]) == (503, "2")
    assert models.json() == {"error": {**expected, "message": "Not ready: the service has no configuration."}}


def test_readiness_is_judged_by_progress(model_folders: dict[str, str]) -> None:
    config = config_for(model_folders)
    config["models"][2]["app"] = "missing"
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as half, half.http() as client:
        response = client.get("../readyz")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "Not ready: 1 of 3 models."


# --- loading a model ---


def model(source: Path, **fields: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": "m", "app": "a", "source": str(source), **fields})


def refusal(config: ModelConfig) -> str:
    with pytest.raises(ConfigRefused) as caught:
        load_model(config)
    return str(caught.value)


def test_facts_come_from_the_models_folder(tmp_path: Path) -> None:
    found = load_model(model(save_model_folder(tmp_path, context_length=777)))
    assert (found.context_length, found.vocab_size) == (777, 512)
    ends = [found.tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")]
    assert found.end_token_ids == frozenset(ends)
    assert found.renderer is not None
    assert found.renderer.name == "qwen3"


def test_the_facts_of_a_composed_model_are_those_of_its_text_model(tmp_path: Path) -> None:
    save_model_folder(tmp_path)
    text = {"max_position_embeddings": 99, "vocab_size": 600}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}))
    found = load_model(model(tmp_path))
    assert (found.context_length, found.vocab_size) == (99, 600)


def test_a_model_without_template_has_no_renderer_unless_one_is_named(tmp_path: Path) -> None:
    save_model_folder(tmp_path, with_template=False)
    assert load_model(model(tmp_path)).renderer is None
    named = load_model(model(tmp_path, renderer="role_colon")).renderer
    assert named is not None
    assert named.name == "role_colon"


def test_a_context_length_that_nobody_tells_is_refused(tmp_path: Path) -> None:
    save_model_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    assert refusal(model(tmp_path)) == f"The model 'm' needs context_length: {str(tmp_path)!r} does not name one."
    assert load_model(model(tmp_path, context_length=50)).context_length == 50


def test_a_context_longer_than_the_model_was_made_for_is_refused(tmp_path: Path) -> None:
    save_model_folder(tmp_path, context_length=777)
    most = f"must be at most 777, the max_position_embeddings of {str(tmp_path)!r}, got"
    assert refusal(model(tmp_path, context_length=778)) == f"The context_length of 'm' {most} 778."
    variants = {"peft:777": 777, "peft:9999": 9999}
    assert refusal(model(tmp_path, variants=variants)) == f"The context_length of 'm:peft:9999' {most} 9999."
    found = load_model(model(tmp_path, context_length=777, variants={"peft:777": 777}))
    assert found.context_lengths == (777, 777)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    assert refusal(model(tmp_path)) == f"The tokenizer of the model 'm' cannot be loaded from {str(tmp_path)!r}."


def test_a_source_that_does_not_exist_is_refused_as_such(tmp_path: Path) -> None:
    place = tmp_path / "none"
    assert refusal(model(place)) == f"The source of the model 'm' does not exist: {str(place)!r}."
    assert refusal(model(tmp_path / "m.gguf")).startswith("The source of the model 'm' does not exist: ")


def test_an_unknown_renderer_is_refused_with_those_there_are(tmp_path: Path) -> None:
    said = refusal(model(save_model_folder(tmp_path), renderer="gpt9"))
    assert said.startswith("The model 'm' cannot have the renderer 'gpt9': renderer must be one of ")


def test_a_tokenizer_saved_for_training_does_not_cut_prompts(tmp_path: Path) -> None:
    save_model_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(state))
    found = load_model(model(tmp_path))
    assert len(found.tokenizer.backend_tokenizer.encode("x" * 50).ids) > 4
