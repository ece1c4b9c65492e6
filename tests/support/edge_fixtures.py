"""The fixtures over `harness.py`; a test module takes them with `pytest_plugins = ("tests.support.edge_fixtures",)`."""

from collections.abc import Iterator

import pytest

from engines.fake import FakeConfig
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.harness import CONTEXT, RunningEdge, config_for, running_edge


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    chat = save_model_folder(root / "chat", context_length=CONTEXT)
    base = save_model_folder(root / "base", with_template=False, context_length=CONTEXT)
    return {"chat": str(chat), "base": str(base)}


@pytest.fixture(scope="session")
def session_edge(model_folders: dict[str, str]) -> Iterator[RunningEdge]:
    with running_edge(config_for(model_folders), FakeConfig(vocab_size=512, context_length=CONTEXT)) as running:
        yield running


@pytest.fixture
def edge(session_edge: RunningEdge) -> Iterator[RunningEdge]:
    with session_edge.in_first_state() as running:
        yield running
