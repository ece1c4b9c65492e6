"""What the README runs needs no more than what the README's first command installs: no tool of the developers."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.support.processes.set_up import make_environment
from tests.support.readme_blocks import ROOT, blocks, environment


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("set-up") / "venv")


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )


def imports(code: str) -> list[str]:
    return [ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_every_python_snippet_finds_what_it_imports(python: Path) -> None:
    lines = sorted({line for block in blocks(language="python") for line in imports(block.text)})
    assert "from openai import OpenAI" in lines
    done = run(python, "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", ["pytest", "hypothesis", "ruff", "schemathesis"])
def test_the_tools_of_the_developers_are_not_there(python: Path, tool: str) -> None:
    assert f"No module named '{tool}'" in run(python, "-c", f"import {tool}").stderr


def test_the_terminal_commands_work(python: Path) -> None:
    done = run(python, "-m", "serve_app", "check")
    assert "is valid" in done.stdout, done.stderr


def test_the_example_finds_what_it_imports(python: Path) -> None:
    done = run(python, "cluster/examples/train_checkpoint.py", "--help")
    assert "--recipe" in done.stdout, done.stderr
