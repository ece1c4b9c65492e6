"""The chat templates that checkpoints bring along: what they cost, and whom."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import ParamSpec, TypeVar

import pytest

from renderers.base import Renderer
from serve_app.base.errors import CheckpointRefused
from serve_app.base.workers import Workers
from serve_app.catalog.checkpoint_templates import OwnTemplates
from serve_app.catalog.served_model import ServedModel, load_model
from serve_app.config.catalog_entry import ModelConfig
from tests.support.harness import CHAT, CONTEXT, RunningEdge, StoredCheckpoint

pytest_plugins = ("tests.support.edge_fixtures",)

P = ParamSpec("P")
T = TypeVar("T")
PATH = "tinker://r/sampler_weights/n"
GOOD = "{% for m in messages %}{{ m.content }}!{{ '<|im_end|>' }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class CountingModel(ServedModel):
    """Tells which templates it was given."""

    built: list[str] = field(default_factory=list)

    def renderer_with(self, chat_template: str) -> Renderer:
        self.built.append(chat_template)
        return ServedModel.renderer_with(self, chat_template)


class ToldWorkers(Workers):
    """Tells on which thread each piece of work ran."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    async def run(self, cost_us: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def told() -> T:
            self.threads.append(threading.current_thread().name)
            return function(*args, **kwargs)

        return await super().run(cost_us, told)


@pytest.fixture(scope="module")
def loaded(model_folders: dict[str, str]) -> ServedModel:
    return load_model(ModelConfig(id=CHAT, app="tiny", source=model_folders["chat"]))


@pytest.fixture
def model(loaded: ServedModel) -> CountingModel:
    return CountingModel(**{each.name: getattr(loaded, each.name) for each in fields(loaded)})


@contextmanager
def allowed(edge: RunningEdge) -> Iterator[None]:
    first, *others = edge.config["models"]
    edge.reconfigure(models=[{**first, "allow_checkpoint_chat_template": True}, *others])
    try:
        yield
    finally:
        edge.reconfigure()


def test_a_template_is_built_once_for_all_who_ask_at_once_and_later(model: CountingModel) -> None:
    async def ask() -> set[int]:
        templates = OwnTemplates()
        found = await asyncio.gather(*(templates.renderer(model, GOOD) for _ in range(20)))
        return {id(renderer) for renderer in (*found, await templates.renderer(model, GOOD))}

    assert len(asyncio.run(ask())) == 1
    assert model.built == [GOOD]


def test_a_template_that_is_refused_is_refused_again_without_another_look(model: CountingModel) -> None:
    async def ask() -> list[CheckpointRefused]:
        templates = OwnTemplates()
        first = await asyncio.gather(*(templates.renderer(model, "{{") for _ in range(5)), return_exceptions=True)
        again = await asyncio.gather(templates.renderer(model, "{{"), return_exceptions=True)
        return [error for error in (*first, *again) if isinstance(error, CheckpointRefused)]

    errors = asyncio.run(ask())
    assert len({id(error) for error in errors}) == 6
    (message,) = {str(error) for error in errors}
    assert message.startswith(
        "chat_template.jinja of the checkpoint cannot be used: The chat template does not compile"
    )
    assert model.built == ["{{"]


def test_a_template_is_built_for_the_next_when_the_one_who_asked_has_left(model: CountingModel) -> None:
    async def leave() -> None:
        templates = OwnTemplates()
        asked = asyncio.create_task(templates.renderer(model, GOOD))
        await asyncio.sleep(0)
        asked.cancel()
        await templates.renderer(model, GOOD)

    asyncio.run(leave())
    assert model.built == [GOOD]


def test_what_is_remembered_is_bounded(model: CountingModel) -> None:
    async def ask() -> None:
        templates = OwnTemplates()
        for i in (*range(65), 64, 0):
            with pytest.raises(CheckpointRefused):
                await templates.renderer(model, f"{{{{{i}")

    asyncio.run(ask())
    assert model.built[64:] == ["{{64", "{{0"]


def test_a_checkpoints_own_template_never_runs_on_the_event_loop(edge: RunningEdge) -> None:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", chat_template=GOOD)
    before, told = edge.service.workers, ToldWorkers()
    edge.service.workers = told
    try:
        assert edge.chat(model=PATH, max_tokens=1).status_code == 200
        assert set(told.threads) == {"edge"}  # the model's own, for a short body
        with allowed(edge):
            assert edge.chat(model=PATH, max_tokens=1).status_code == 200
        assert [name for name in told.threads if name.startswith("large-work")] != []
    finally:
        edge.service.workers = before
        told.close()


def test_a_template_that_writes_more_than_the_context_is_told_so(edge: RunningEdge) -> None:
    template = "{% for m in messages %}{{ m.content * (300000 if 'long' in m.content else 1) }}{% endfor %}"
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", chat_template=template)
    with allowed(edge):
        assert edge.chat("short", model=PATH, max_tokens=1).status_code == 200
        refused = edge.chat("a long ", model=PATH, max_tokens=1)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert error["message"].startswith(
        f"messages must have fewer tokens than the model's context window of {CONTEXT}, got at least "
    )
