"""Models that are being loaded: who waits for one, for how long, and what an edit of the catalogue loads again."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.fake import FakeConfig
from serve_app.base.errors import ConfigRefused, NoReplica
from serve_app.catalog.loading import LOADING, Models
from serve_app.catalog.served_model import ServedModel, load_model
from serve_app.config.catalog_entry import ModelConfig
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.harness import BASE, CHAT, CONTEXT, RunningEdge, StoredCheckpoint, config_for, running_edge
from tests.support.processes.demo_modules import ROOT
from tests.support.waiting import eventually

pytest_plugins = ("tests.support.edge_fixtures",)

LATE = "late/Model"
PATH = "tinker://r/sampler_weights/n"
LONGEST_S = 30


@dataclass
class GatedLoad:
    """Loads as the service does, but a held model only once it is let go. Notes every call."""

    held: dict[str, threading.Event] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)

    def __call__(self, config: ModelConfig, before: ServedModel | None) -> ServedModel:
        self.begun.append(config.id)
        gate = self.held.get(config.id)
        assert gate is None or gate.wait(LONGEST_S)
        return load_model(config, before)

    def hold(self, *ids: str) -> None:
        self.held |= {model_id: threading.Event() for model_id in ids}

    def let_all_go(self) -> None:
        for gate in self.held.values():
            gate.set()


@dataclass
class SlowEdge:
    """A service whose models load when a test says so."""

    edge: RunningEdge
    load: GatedLoad

    def late(self, **fields: Any) -> dict[str, Any]:
        return {**self.edge.config["models"][2], "id": LATE, **fields}

    def begin(self, *models: dict[str, Any]) -> "Future[None]":
        """Add models to the configuration; returns once they are being loaded."""
        raw = {**self.edge.config, "models": [*self.edge.config["models"], *models]}
        change = asyncio.run_coroutine_threadsafe(self.edge.service.reconfigure(raw), self.edge.loop)
        eventually(lambda: {model["id"] for model in models} <= set(self.edge.service.settings.catalog.entries))
        return change

    def ask(self, model: str) -> int:
        return self.edge.complete(model=model, max_tokens=1).status_code


@pytest.fixture
def slow(model_folders: dict[str, str]) -> Iterator[SlowEdge]:
    load = GatedLoad()
    with running_edge(config_for(model_folders), FakeConfig(vocab_size=512, context_length=CONTEXT), load=load) as edge:
        yield SlowEdge(edge, load)
        load.let_all_go()


def test_a_request_waits_for_its_model_and_the_other_models_serve_meanwhile(slow: SlowEdge) -> None:
    slow.load.hold(LATE)
    change = slow.begin(slow.late())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slow.ask, LATE)
        assert [slow.ask(model) for model in (BASE, CHAT)] == [200, 200]
        assert not waiting.done()
        slow.load.let_all_go()
        assert waiting.result() == 200
    change.result(LONGEST_S)


def test_a_checkpoint_waits_for_the_base_that_it_names(slow: SlowEdge) -> None:
    slow.edge.checkpoints.held[PATH] = StoredCheckpoint("d1", base_model=LATE)
    slow.load.hold(LATE)
    slow.begin(slow.late(source=str(slow.edge.config["models"][2]["source"])))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slow.ask, f"{LATE};{PATH}")
        assert slow.ask(BASE) == 200
        slow.load.let_all_go()
        assert waiting.result() == 200


def test_the_service_is_not_ready_while_a_model_is_being_loaded(slow: SlowEdge) -> None:
    slow.load.hold(LATE)
    change = slow.begin(slow.late())
    with slow.edge.http(None) as client:
        response = client.get("../readyz")
        assert (response.status_code, response.json()["error"]["message"]) == (503, "Not ready: 1 of 4 models.")
        slow.load.let_all_go()
        change.result(LONGEST_S)
        assert client.get("../readyz").json() == {"status": "ready"}


def test_a_model_that_takes_too_long_is_503_with_retry_after_and_not_waited_for_again(
    model_folders: dict[str, str],
) -> None:
    load = GatedLoad()
    engine = FakeConfig(vocab_size=512, context_length=CONTEXT)
    with running_edge(config_for(model_folders), engine, load=load, loading_timeout_s=0.2) as edge:
        load.hold(LATE)
        slow = SlowEdge(edge, load)
        slow.begin(slow.late())
        response = edge.complete(model=LATE, max_tokens=1)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        error = response.json()["error"]
        sentence = f"No replica of this model is available now: {LOADING}; try again."
        assert (error["code"], error["message"]) == ("unavailable", sentence)
        with edge.http() as client:
            assert [item["id"] for item in client.get("/models").json()["data"] if item["id"] == LATE] == []
        load.let_all_go()
        eventually(lambda: slow.ask(LATE) == 200)


def test_a_configuration_takes_effect_while_a_model_of_the_last_one_is_being_loaded(slow: SlowEdge) -> None:
    slow.load.hold(LATE)
    first = slow.begin(slow.late())
    slow.begin(slow.late(), slow.late(id="good/Model"))
    assert slow.ask("good/Model") == 200
    assert not first.done()
    slow.load.let_all_go()
    first.result(LONGEST_S)
    assert slow.load.begun.count(LATE) == 1  # what is being loaded is not loaded twice
    assert slow.ask(LATE) == 200


def test_a_model_is_listed_once_it_is_loaded_and_asking_waits_for_it(slow: SlowEdge) -> None:
    slow.load.hold(LATE)
    slow.begin(slow.late())
    with ThreadPoolExecutor(1) as pool, slow.edge.http() as client:
        listed = pool.submit(client.get, "/models")
        assert slow.ask(BASE) == 200
        slow.load.let_all_go()
        assert LATE in [item["id"] for item in listed.result().json()["data"]]


def test_the_last_version_serves_until_the_next_is_loaded(slow: SlowEdge) -> None:
    slow.load.hold(BASE)
    raw = {**slow.edge.config, "models": [{**slow.edge.config["models"][2], "context_length": 77}]}
    change = asyncio.run_coroutine_threadsafe(slow.edge.service.reconfigure(raw), slow.edge.loop)
    eventually(lambda: slow.load.begun.count(BASE) == 2)
    with slow.edge.http() as client:
        assert client.get(f"/models/{BASE}").json()["context_length"] == 4096
        slow.load.let_all_go()
        change.result(LONGEST_S)
        assert client.get(f"/models/{BASE}").json()["context_length"] == 77


CHANGES: dict[str, tuple[Any, bool]] = {
    "id": ("other/Name", True),
    "app": ("other", False),
    "source": (None, True),
    "revision": ("main", True),
    "renderer": ("generic", True),
    "context_length": (99, True),
    "variants": ({"peft:7": 7}, True),
    "allow_checkpoint_chat_template": (True, False),
    "fetch_images": (True, False),
    "also_known_as": (("other",), False),
    "owned_by": ("someone", False),
    "price": ({"prompt": "1", "completion": "2"}, False),
}
"""For each field of an entry another value, and whether that loads the model again."""


@pytest.mark.parametrize("name", ModelConfig.model_fields)
def test_only_an_edit_of_what_loading_depends_on_loads_a_model_again(
    model_folders: dict[str, str], tmp_path: Any, name: str
) -> None:
    raw = {"id": "m", "app": "a", "source": model_folders["chat"], "renderer": "qwen3"}
    value, loads = CHANGES[name]
    edited = {**raw, name: str(save_model_folder(tmp_path)) if name == "source" else value}
    load = GatedLoad()

    async def edit(models: Models) -> None:
        for entry in (raw, edited):
            for loading in models.take_over([ModelConfig.model_validate(entry)]):
                await loading.outcome
        (entry,) = models.entries.values()
        assert entry.config == ModelConfig.model_validate(edited)
        assert isinstance(entry, ServedModel)

    run(load, edit)
    assert len(load.begun) == 1 + loads


def test_an_edit_of_a_length_or_a_renderer_keeps_the_tokenizer(model_folders: dict[str, str]) -> None:
    first = load_model(ModelConfig(id="m", app="a", source=model_folders["chat"], renderer="qwen3"))
    second = load_model(first.config.model_copy(update={"renderer": "generic", "context_length": 99}), first)
    assert second.tokenizer is first.tokenizer
    assert second.context_length == 99
    assert type(second.renderer) is not type(first.renderer)
    other = first.config.model_copy(update={"source": model_folders["base"], "renderer": None})
    assert load_model(other, first).tokenizer is not first.tokenizer


def run(load: Callable[..., ServedModel], test: Callable[[Models], Awaitable[None]], *, wait_s: float = 30) -> None:
    async def main() -> None:
        models = Models(lambda: None, wait_s=wait_s, load=load)
        try:
            await test(models)
        finally:
            models.close()

    asyncio.run(main())


def entries(source: str, *ids: str) -> list[ModelConfig]:
    return [ModelConfig(id=model_id, app="a", source=source) for model_id in ids]


def test_a_model_that_a_request_waits_for_is_loaded_before_the_others(model_folders: dict[str, str]) -> None:
    load, ids = GatedLoad(), [f"m{n}" for n in range(12)]
    load.hold(*ids[:-1])

    async def ask_for_the_last(models: Models) -> None:
        loading = models.take_over(entries(model_folders["base"], *ids))
        model = await loading[-1].wait()
        assert model is not None
        assert sorted(load.begun) == ["m0", "m1", "m11"]  # two are loaded unasked
        load.let_all_go()
        await asyncio.gather(*(one.outcome for one in loading))
        assert list(models.entries) == ids

    run(load, ask_for_the_last)
    assert sorted(load.begun) == sorted(ids)


def test_who_waits_for_a_model_that_cannot_be_loaded_is_told_and_the_others_are_loaded(
    model_folders: dict[str, str],
) -> None:
    async def ask(models: Models) -> None:
        bad, good = models.take_over([*entries("/nowhere", "bad"), *entries(model_folders["base"], "good")])
        assert await bad.wait() is None
        assert (await good.wait()) is not None
        assert list(models.entries) == ["good"]

    run(load_model, ask)


def test_a_model_that_is_no_longer_wanted_ends_the_wait_for_it(model_folders: dict[str, str]) -> None:
    load, source = GatedLoad(), model_folders["base"]
    load.hold("m0", "m1")

    async def drop(models: Models) -> None:
        loading = models.take_over(entries(source, "m0", "m1", "m2"))
        models.take_over(entries(source, "m0"))
        assert await loading[2].wait() is None  # nothing had begun
        load.let_all_go()
        assert (await loading[1].wait()) is not None  # a thread had it, for whom began with it
        assert list(models.entries) == ["m0"]

    run(load, drop)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), ConfigRefused("It is wrong.")])
def test_whatever_loading_raises_refuses_this_model_alone(error: BaseException) -> None:
    def fail(config: ModelConfig, before: ServedModel | None) -> ServedModel:
        raise error

    async def load(models: Models) -> None:
        (loading,) = models.take_over(entries("/x", "m"))
        assert await loading.wait() is None
        assert "cannot be loaded" in str(await loading.outcome) or str(await loading.outcome) == "It is wrong."

    run(fail, load)


def test_models_that_load_at_the_same_time_in_a_new_process_are_all_loaded(model_folders: dict[str, str]) -> None:
    """Their first act is to import transformers, which cannot be imported by two threads at a time."""
    code = f"""
from concurrent.futures import ThreadPoolExecutor
from serve_app.catalog.served_model import load_model
from serve_app.config.catalog_entry import ModelConfig
def load(name):
    return load_model(ModelConfig(id=name, app="a", source={model_folders["chat"]!r})).id
with ThreadPoolExecutor(4) as threads:
    print(*threads.map(load, "abcd"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (list("abcd"), 0), done.stderr


def test_the_wait_for_what_hangs_is_bounded_from_its_beginning(model_folders: dict[str, str]) -> None:
    load = GatedLoad()
    load.hold("m")

    async def wait(models: Models) -> None:
        (loading,) = models.take_over(entries(model_folders["base"], "m"))
        loop = asyncio.get_running_loop()
        took = []
        for _ in range(3):
            began = loop.time()
            with pytest.raises(NoReplica):
                await loading.wait()
            took.append(loop.time() - began)
        assert took[0] > 0.99
        assert sum(took[1:]) < 1.0, "the bound began anew"
        load.let_all_go()
        await loading.outcome

    run(load, wait, wait_s=1.0)
