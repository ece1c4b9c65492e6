"""Other people's clients, in a virtual environment of their own, against the running service (`make test-clients`)."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tests.clients.client_service import (
    BASE,
    BASE_FLOAT32,
    CHECKPOINTS,
    QUILL,
    QUILL_FLOAT32,
    ROOT,
    ClientService,
    client_service,
)
from tests.clients.docstrings import Docstring, docstrings
from tests.clients.lm_eval_run import Evaluation, Reference, differences, evaluate
from tests.clients.scripted_model import MODEL, scripted_service
from tests.support.harness import KEY, PLAIN

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


@pytest.fixture(scope="module", params=[None, CHECKPOINTS / "quill"], ids=["base", "adapter"])
def adapter(request: pytest.FixtureRequest) -> Path | None:
    return request.param


@pytest.fixture(scope="module")
def exact(adapter: Path | None, texts: list[Docstring]) -> Evaluation:
    """What transformers and PEFT compute in float32."""
    return Reference(torch.float32, adapter).evaluate(texts, few=FEW)


def test_lm_eval_gets_what_transformers_compute(
    venv: Path, service: ClientService, tmp_path: Path, texts: list[Docstring], adapter: Path | None, exact: Evaluation
) -> None:
    model = QUILL_FLOAT32 if adapter else BASE_FLOAT32
    got = evaluate(venv / "lm_eval", service, tmp_path, model, texts=texts, few=FEW)
    nats = differences(got.continuations + got.whole, exact.continuations + exact.whole)
    print(f"{model}: {len(nats)} log-likelihoods differ by at most {max(nats):.1e} nats")
    assert max(nats) <= 1e-3
    assert got.are_greedy == exact.are_greedy
    assert set(exact.are_greedy) == {False, True}
    assert got.generations == exact.generations


def test_in_bfloat16_lm_eval_is_as_close_to_float32_as_transformers_are(
    venv: Path, service: ClientService, tmp_path: Path, texts: list[Docstring], adapter: Path | None, exact: Evaluation
) -> None:
    model = QUILL if adapter else BASE
    got = evaluate(venv / "lm_eval", service, tmp_path, model, texts=texts, few=1)
    ours = differences(got.continuations, exact.continuations)
    bfloat16 = Reference(torch.bfloat16, adapter).evaluate(texts, few=1)
    theirs = differences(bfloat16.continuations, exact.continuations)
    for name, nats in (("lm-eval", ours), ("transformers", theirs)):
        print(f"{model}, {name}: at most {max(nats):.2f} nats from float32, on average {fmean(nats):.3f}")
    assert max(ours) <= 1.5 * max(theirs)
    assert fmean(ours) <= 1.5 * fmean(theirs)
