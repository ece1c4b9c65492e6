"""A configuration that is bad in part: what is good of it takes effect, and what is bad is named."""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from engines.fake import FakeConfig
from serve_app.base.errors import CheckpointUnavailable, ConfigRefused
from serve_app.catalog.catalog import CheckpointPage
from serve_app.config.service import CheckpointsConfig
from serve_app.http.service import Service
from serve_app.replicas.in_process import LocalReplicas
from tests.support.harness import (
    BASE,
    CHAT,
    CONTEXT,
    KEY,
    OTHER_KEY,
    PLAIN,
    MemoryCheckpoints,
    RunningEdge,
    StoredCheckpoint,
    config_for,
    running_edge,
)

pytest_plugins = ("tests.support.edge_fixtures",)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
PATH = "tinker://r/sampler_weights/n"
NEW_KEY = "rh-new-key-of-16-characters"
NO_MODEL = {"id": "new/Model", "app": "tiny", "source": "/nowhere"}
BAD_MODELS = [
    ({"id": "new/Model", "app": "tiny"}, "models[3].source is required.", "models[3]"),
    (NO_MODEL, "The source of the model 'new/Model' does not exist: '/nowhere'.", "models"),
    ("new/Model", 'models[3] must be an object, got "new/Model".', "models[3]"),
]


@pytest.fixture
def edge(edge: RunningEdge) -> Iterator[RunningEdge]:
    yield edge
    edge.reconfigure()
    assert edge.service.config_error is None


def key(secret: str, **fields: Any) -> dict[str, Any]:
    return {"name": secret, "sha256": hashlib.sha256(secret.encode()).hexdigest(), **fields}


def status(edge: RunningEdge, secret: str, model: str = BASE) -> int:
    return edge.post("/completions", key=secret, model=model, prompt="x", max_tokens=1).status_code


def served(edge: RunningEdge) -> list[str]:
    return list(edge.service.settings.catalog.models)


@pytest.mark.parametrize(("model", "sentence", "part"), BAD_MODELS)
def test_a_key_is_revoked_and_another_let_in_beside_a_bad_model(
    edge: RunningEdge, caplog: pytest.LogCaptureFixture, model: Any, sentence: str, part: str
) -> None:
    with caplog.at_level(logging.ERROR, "serve_app.http.service"):
        edge.reconfigure(models=[*edge.config["models"], model], keys=[key(NEW_KEY)])
    assert [status(edge, secret) for secret in (KEY, OTHER_KEY, NEW_KEY)] == [401, 401, 200]
    assert served(edge) == [CHAT, PLAIN, BASE]
    assert edge.service.config_error == sentence
    assert edge.recorder.config_errors[-1] == [sentence]
    assert f"Configuration: refused: {sentence}" in caplog.messages
    with edge.http(None) as client:
        ready = client.get("../readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "config_errors": [part]})


def test_a_good_model_is_served_beside_a_bad_one_and_a_bad_key(edge: RunningEdge) -> None:
    good = {**edge.config["models"][2], "id": "new/Good"}
    bad_key = {"name": "bad", "env": "NO_SUCH_VARIABLE_HERE"}
    edge.reconfigure(models=[NO_MODEL, good], keys=[bad_key, *edge.config["keys"]])
    assert served(edge) == ["new/Good"]
    assert status(edge, KEY, "new/Good") == 200
    assert edge.recorder.config_errors[-1] == [
        "The key 'bad' is empty in the environment variable 'NO_SUCH_VARIABLE_HERE'.",
        "The source of the model 'new/Model' does not exist: '/nowhere'.",
    ]


def test_a_model_that_is_wrong_stays_as_it_was_and_one_that_is_gone_is_gone(edge: RunningEdge) -> None:
    chat, plain, _ = edge.config["models"]
    before = edge.service.settings.catalog.models[CHAT]
    edge.reconfigure(models=[{**chat, "renderer": "gpt9"}, {**plain, "context_length": 0}])
    assert served(edge) == [CHAT, PLAIN]
    assert edge.service.settings.catalog.models[CHAT] is before
    assert status(edge, KEY, CHAT) == 200
    assert status(edge, KEY, BASE) == 404


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"limits": {"messages": "many"}}, 'limits.messages must be an integer, got "many".'),
        ({"models": []}, "models must not be empty."),
        ({"models": None}, "models is required."),
        ({"checkpoints": {"roots": [7]}}, "checkpoints.roots[0] must be a string, got 7."),
        (
            {"nonsense": 1},
            "nonsense is not a known key; "
            "the keys here are models, checkpoints, images, keys, limits, marketplace, ledger.",
        ),
    ],
)
def test_a_bad_section_stays_as_it_was_and_the_others_change(edge: RunningEdge, change: Any, sentence: str) -> None:
    edge.reconfigure(limits={"messages": 7})
    before = served(edge)
    edge.reconfigure(**{"limits": {"messages": 7}, **change}, keys=[key(NEW_KEY)])
    assert edge.service.config_error == sentence
    assert (served(edge), edge.service.settings.limits.messages) == (before, 7)
    assert [status(edge, secret) for secret in (KEY, NEW_KEY)] == [401, 200]


def test_what_is_missing_beside_a_misspelt_section_stays_as_it_was(edge: RunningEdge) -> None:
    edge.reconfigure(limits={"messages": 7})
    raw = {"models": edge.config["models"], "kyes": [], "limts": {"messages": 9}}
    edge.run(edge.service.reconfigure(raw))
    assert edge.service.settings.limits.messages == 7
    assert status(edge, KEY) == 200


@pytest.mark.parametrize("raw", [None, [], "x", 7])
def test_what_is_no_configuration_at_all_changes_nothing(edge: RunningEdge, raw: object) -> None:
    edge.run(edge.service.reconfigure(raw))
    assert (edge.service.config_error or "").startswith("The configuration must be an object, got ")
    assert status(edge, KEY) == 200


def test_all_keys_can_be_revoked_at_once(edge: RunningEdge) -> None:
    edge.reconfigure(keys=[])
    assert [status(edge, secret) for secret in (KEY, OTHER_KEY)] == [401, 401]
    assert edge.service.config_error == "keys must not be empty: without a key every request is refused."


@pytest.mark.parametrize(
    "bad", [{"sha256": "x"}, {"env": "NO_SUCH_VARIABLE_HERE"}, {"file": "/nowhere"}, {"models": 7}]
)
def test_a_key_that_is_wrong_does_not_let_in_whom_it_let_in_before(edge: RunningEdge, bad: Any) -> None:
    first, second = edge.config["keys"]
    place = {} if "models" in bad else {"sha256": None}
    edge.reconfigure(keys=[{**first, **place, **bad}, second])
    assert [status(edge, secret) for secret in (KEY, OTHER_KEY)] == [401, 200]


def test_a_key_that_names_a_model_which_is_not_there_has_the_others(edge: RunningEdge) -> None:
    edge.reconfigure(keys=[key(NEW_KEY, models=[BASE, "no/Model"])])
    assert edge.service.config_error == 'keys[0].models[1] must be the id of a model or slug, got "no/Model".'
    assert [status(edge, NEW_KEY, model) for model in (BASE, CHAT, "no/Model")] == [200, 404, 404]


def test_revocation_waits_for_nothing_that_is_still_being_loaded(model_folders: dict[str, str]) -> None:
    config = config_for(model_folders)

    async def change() -> None:
        started, goes_on = threading.Event(), threading.Event()

        def open_slowly(_: CheckpointsConfig) -> MemoryCheckpoints:
            started.set()
            assert goes_on.wait(30)
            return MemoryCheckpoints()

        service = Service(LocalReplicas({}), open_slowly)
        first = asyncio.create_task(service.reconfigure(config))
        await asyncio.to_thread(started.wait, 30)
        assert len(service.settings.keyring) == 2  # in force before anything else is there
        second = asyncio.create_task(service.reconfigure({**config, "keys": [key(NEW_KEY)]}))
        while len(service.settings.keyring) != 1:  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0)
        assert not first.done()
        goes_on.set()
        await asyncio.gather(first, second)
        assert len(service.settings.keyring) == 1
        assert list(service.settings.catalog.models) == [CHAT, PLAIN, BASE]
        await service.close()

    asyncio.run(change())


def test_a_fresh_ingress_serves_what_it_can(model_folders: dict[str, str]) -> None:
    config = config_for(model_folders)
    models = [NO_MODEL, *config["models"]]
    bad = {"models": models, "limits": {"messages": 0}, "checkpoints": 7}
    with running_edge({**config, **bad}, FakeConfig(vocab_size=512, context_length=CONTEXT)) as fresh:
        fresh.service.require_configuration()
        assert fresh.complete(max_tokens=1).status_code == 200
        assert fresh.recorder.config_errors[-1] == [
            "checkpoints must be an object, got 7.",
            "limits.messages must be at least 1, got 0.",
            "The source of the model 'new/Model' does not exist: '/nowhere'.",
        ]


def test_without_a_store_a_checkpoint_may_be_there_later(model_folders: dict[str, str]) -> None:
    async def ask() -> None:
        def refuse(_: CheckpointsConfig) -> MemoryCheckpoints:
            raise ConfigRefused("The root 's3://x' needs a package that is not installed: s3fs.")

        service = Service(LocalReplicas({}), refuse)
        await service.reconfigure(config_for(model_folders))
        assert service.config_error == "The root 's3://x' needs a package that is not installed: s3fs."
        caller = service.settings.keyring.authenticate(f"Bearer {KEY}", NOW)
        with pytest.raises(CheckpointUnavailable):
            await service.settings.catalog.resolve(PATH, caller)
        assert await service.settings.catalog.checkpoints_of(caller, None) == CheckpointPage([], has_more=True)
        await service.close()

    asyncio.run(ask())


def test_the_ingress_is_unhealthy_until_it_has_had_a_model_and_a_key(model_folders: dict[str, str]) -> None:
    config = config_for(model_folders)
    bad_key = {"name": "k", "env": "NO_SUCH_VARIABLE_HERE"}
    with running_edge({**config, "keys": [bad_key]}, FakeConfig(vocab_size=512, context_length=CONTEXT)) as fresh:
        sentence = r"^The key 'k' is empty in the environment variable 'NO_SUCH_VARIABLE_HERE'\.$"
        with pytest.raises(ConfigRefused, match=sentence):
            fresh.service.require_configuration()
        assert fresh.complete(max_tokens=1).status_code == 503
        fresh.reconfigure(keys=config["keys"])
        fresh.service.require_configuration()
        fresh.reconfigure(models=[], keys=[])
        fresh.service.require_configuration()  # it told nobody that a good key is wrong
        assert fresh.complete(max_tokens=1).status_code == 401


def test_a_checkpoint_store_that_is_refused_leaves_the_one_that_is_there(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model=BASE)
    edge.reconfigure(checkpoints={"root": []})
    assert status(edge, KEY, PATH) == 200
