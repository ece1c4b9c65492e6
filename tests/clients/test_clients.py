"""Other people's clients, in a virtual environment of their own, against the running service (`make test-clients`)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the helpers that all tests share

from client_service import (
    BASE,
    BASE_FLOAT32,
    CHECKPOINTS,
    QUILL,
    QUILL_FLOAT32,
    ROOT,
    ClientService,
    client_service,
)
from docstrings import Docstring, docstrings
from harness import KEY, PLAIN
from lm_eval_run import Reference, evaluate, worst_difference
from scripted_model import MODEL, scripted_service

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
NODE = HERE / "node"
FEW = 40


@pytest.fixture(scope="module")
def venv() -> Path:
    """The folder with the clients' programs."""
    programs = Path(os.environ.get("CLIENTS_VENV", ROOT / ".venv-clients")).absolute() / "bin"
    assert (programs / "python").exists(), f"{programs} has no python: run `make test-clients`."
    return programs


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientService]:
    with client_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def texts() -> list[Docstring]:
    return docstrings(300)


def run_suite(venv: Path, name: str, environment: dict[str, str]) -> None:
    suites = HERE / "suites"
    command = [str(venv / "python"), "-m", "pytest", "-c", str(suites / "pytest.ini"), "--rootdir", str(suites)]
    done = subprocess.run([*command, str(suites / f"suite_{name}.py")], cwd=suites, env=environment, timeout=900)
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["openai", "openai_async", "litellm", "llm"])
def test_a_python_clients_suite_passes(venv: Path, service: ClientService, name: str) -> None:
    run_suite(venv, name, service.environment())


def test_langchains_standard_tests_pass(venv: Path, service: ClientService, tmp_path: Path) -> None:
    with scripted_service(tmp_path) as scripted:
        where = {
            "ROUNDHOUSE_SCRIPTED_URL": scripted.url,
            "ROUNDHOUSE_SCRIPTED_KEY": KEY,
            "ROUNDHOUSE_SCRIPTED_MODEL": MODEL,
            "ROUNDHOUSE_SCRIPTED_OTHER_MODEL": PLAIN,
        }
        run_suite(venv, "langchain", {**service.environment(), **where})


@pytest.mark.skipif(shutil.which("npm") is None, reason="openai-node needs npm, and this machine has none")
def test_openai_nodes_suite_passes(service: ClientService) -> None:
    assert (NODE / "node_modules" / "openai").is_dir(), f"{NODE} has no node_modules: run `make test-clients`."
    done = subprocess.run(["npm", "test"], cwd=NODE, env=service.environment(), timeout=600)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("model", "dtype", "adapter", "tolerance"),
    [
        (BASE_FLOAT32, torch.float32, None, 1e-3),
        (QUILL_FLOAT32, torch.float32, CHECKPOINTS / "quill", 1e-3),
        (BASE, torch.bfloat16, None, 1.0),
        (QUILL, torch.bfloat16, CHECKPOINTS / "quill", 1.0),
    ],
)
def test_lm_evals_log_likelihoods_are_those_of_transformers(
    venv: Path,
    service: ClientService,
    tmp_path: Path,
    texts: list[Docstring],
    model: str,
    dtype: torch.dtype,
    adapter: Path | None,
    tolerance: float,
) -> None:
    got = evaluate(venv / "lm_eval", service, tmp_path, model, texts=texts, few=FEW)
    reference = Reference(dtype, adapter)
    expected = reference.evaluate(texts, few=FEW)
    worst = worst_difference(got.continuations, expected.continuations)
    print(f"{model}, {dtype}: {len(texts)} log-likelihoods differ by at most {worst:.1e} nats")
    assert worst <= tolerance
    assert worst_difference(got.whole, expected.whole) <= tolerance
    if dtype == torch.float32:  # bfloat16 has ties
        assert got.are_greedy == expected.are_greedy
        assert set(expected.are_greedy) == {False, True}
        assert got.generations == expected.generations
